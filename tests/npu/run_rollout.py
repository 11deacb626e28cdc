"""Started as ``run_rollout.py FOLDER RESULT``: engines of three families, alone, on the platform of MEGA_RL_PLATFORM.

Writes what was found into RESULT, as JSON: check -> the largest difference from transformers in nats, or what is wrong;
answers to requests that every release must answer alike; how often operators ran.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mega_rl import platform
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.platform.roles import trainer_role
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.types import Prompt
from tests.distributed.rollout import rollout_checks as checks
from tests.distributed.rollout.tail_checks import (
    ended,
    steps,
    tails_are_functions_of_what_is_kept,
    unfinished_responses_go_on,
)
from tests.models.rollout_support import EOS, hf_logprobs, prompt, save, tiny_model

ON_NPU = os.environ["MEGA_RL_PLATFORM"] == "npu"
SLEEPER = "qwen3_moe"  # vllm-ascend lets one engine of a process sleep
WIDE_EXPERTS = {"moe_intermediate_size": 1536}  # above 1 MB each, so that nothing small lies beside them
VLLM = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 16} if ON_NPU else {}
FOUND: dict[str, Any] = {}
SECOND_END = 40  # a token that ends an answer beside EOS


def found(name: str, body: Callable[..., Any], *args: Any, **keys: Any) -> None:
    try:
        FOUND[name] = body(*args, **keys)
    except Exception as error:  # noqa: BLE001 - every check must report, and the next ones must run
        traceback.print_exc()
        FOUND[name] = f"{type(error).__name__}: {error}"


def slept(engine: VLLMEngine, rewritten: Sequence[str], update: Callable[..., float], *args: Any) -> float:
    """The update of an engine that has been asleep, whose memory the device had back though it had work under way."""
    from torch import npu

    engine.submit(make_requests([prompt(2, 9)], n=2, step=0, seed=0, max_tokens=9, temperature=1.0))
    num_ended = len(steps(engine, 4))
    _, tails = engine.interrupt()
    free = npu.mem_get_info()[0]
    live = engine.parameters() if rewritten else {}
    held = {name: live[name].clone() for name in rewritten}
    engine.sleep(rewritten)
    freed = npu.mem_get_info()[0] - free
    for forbidden in (engine.begin_update, lambda: engine.submit(tails)):  # vLLM would write where no memory is
        with pytest.raises(AssertionError, match="sleep"):
            forbidden()
    engine.wake_weights()
    engine.wake_cache()
    lost = {name for name, values in held.items() if not torch.equal(engine.parameters()[name], values)}
    FOUND.setdefault("dropped", []).extend(sorted(lost))
    assert freed > VLLM["kv_cache_memory_bytes"], freed
    difference = update(*args)
    engine.submit(tails)
    late = ended(engine)
    assert num_ended + len(late) == 2 and all(len(t.spans) == 2 for t in late), late
    return difference


def cached_prefix(engine: VLLMEngine, model: PreTrainedModel) -> float:
    """A prompt whose first blocks are cached is answered as it was without them."""
    question = {"type": "token", "prompt_token_ids": list(prompt(1, checks.LONG).token_ids)}
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)
    engine._llm.reset_prefix_cache()
    first, second = (engine._llm.generate([question], parameters, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 256), second.num_cached_tokens
    ours, theirs = ([next(iter(row.values())).logprob for row in o.outputs[0].logprobs] for o in (first, second))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def logprobs_of(tokens: Sequence[int], rows: Sequence[dict[int, Any]]) -> list[float]:
    return [row[token].logprob for token, row in zip(tokens, rows, strict=False)]


def answers(engine: VLLMEngine) -> dict[str, Any]:
    """Greedy answers to requests with every parameter of sampling that a run uses, and with its relatives."""
    from vllm import SamplingParams

    questions = [prompt(index, 5 + 3 * index) for index in range(4)]

    def ask(prompts: list[Prompt], **keys: Any) -> list[dict[str, Any]]:
        parameters = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "logprobs": 0, **keys})
        asked = [{"type": "token", "prompt_token_ids": list(p.token_ids)} for p in prompts]
        return [
            {
                "tokens": [list(output.token_ids) for output in answer.outputs],
                "ends": [output.finish_reason for output in answer.outputs],
                "logprobs": [logprobs_of(output.token_ids, output.logprobs) for output in answer.outputs],
                "prompt": logprobs_of(answer.prompt_token_ids[1:], (answer.prompt_logprobs or [])[1:]),
            }
            for answer in engine._llm.generate(asked, parameters, use_tqdm=False)
        ]

    plain = ask(questions, ignore_eos=True)
    stop = plain[0]["tokens"][0][5]
    return {
        "plain": plain,
        "stop_token": ask(questions, ignore_eos=True, stop_token_ids=[stop]),
        "min_tokens": ask(questions, ignore_eos=True, stop_token_ids=[stop], min_tokens=9),
        "several_ends": ask(questions, stop_token_ids=[EOS, stop, SECOND_END]),
        "prompt_logprobs": ask(questions, ignore_eos=True, prompt_logprobs=0),
    }


def several(engine: VLLMEngine, model: PreTrainedModel) -> float:
    """``n`` answers with a seed differ from each other, come again, and have transformers' log-probabilities."""
    from vllm import SamplingParams

    question, temperature = prompt(3, 9), 0.6
    asked = {"type": "token", "prompt_token_ids": list(question.token_ids)}
    parameters = SamplingParams(n=3, seed=5, temperature=temperature, max_tokens=12, ignore_eos=True, logprobs=0)
    first, again = (engine._llm.generate([asked], parameters, use_tqdm=False)[0].outputs for _ in range(2))
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in again]
    assert len({tuple(answer.token_ids) for answer in first}) == 3
    differences = []
    for answer in first:
        own = torch.tensor(logprobs_of(answer.token_ids, answer.logprobs))
        expected = hf_logprobs(model, question, tuple(answer.token_ids), temperature)
        differences.append((own - expected).abs().max().item())
    return max(differences)


def sampled(engine: VLLMEngine) -> None:
    checks.same_samples_in_any_batch(engine)
    checks.limits_are_per_request(engine)
    checks.stops(engine)
    unfinished_responses_go_on(engine)
    tails_are_functions_of_what_is_kept(engine)


def family(name: str, directory: Path, tied: bool) -> None:
    model = tiny_model(name, tied=tied, **(WIDE_EXPERTS if name == SLEEPER else {}))
    path = save(model, directory / name)
    sleeps = {"enable_sleep_mode": name == SLEEPER} if ON_NPU else {}
    engine = checks.start(path, device_type=os.environ["MEGA_RL_PLATFORM"], vllm=VLLM | sleeps)
    where = (path, 1, 0)
    found(f"{name} layout", checks.layout_is_the_bridges, engine, path, model, 1, 0)
    found(f"{name} fresh", checks.equals_hf, engine, model)
    found(f"{name} prefix cache", cached_prefix, engine, model)
    if name == "qwen2":
        found("sampling", sampled, engine)
        found("several answers", several, engine, model)
        FOUND["answers"] = answers(engine)
    if not ON_NPU:
        return
    found(f"{name} in place", checks.takes_live_writes, engine, model, *where)
    if name == "qwen2":  # a step of the engine is under way as weights change
        found("changed under way", checks.tokens_are_of_their_version, engine, model, path)
        found(
            "changed under way, kept", checks.kept_keys_and_values_show, model, path, VLLM | sleeps, device_type="npu"
        )
    if name == SLEEPER:
        found(
            f"{name} slept, in place",
            slept,
            engine,
            list(engine.parameters()),
            checks.writes,
            engine,
            model,
            *where,
            2,
            18,
        )
    engine.use_loader()
    found(f"{name} loader", checks.takes_weights, engine, model, 3, 19)
    if name == SLEEPER:
        found(f"{name} slept, loader", slept, engine, (), checks.loads, engine, model, 4, 20)


def schema_of(operator: str) -> str:
    namespace, _, name = operator.partition("::")
    return str(getattr(getattr(torch.ops, namespace), name).default._schema)


def main() -> None:
    directory, result = Path(sys.argv[1]), Path(sys.argv[2])
    here = platform.select(os.environ["MEGA_RL_PLATFORM"], trainer_role(RolloutConfig(vllm=VLLM), False))
    here.set_device(0)
    families = {  # vLLM makes groups of experts with the first engine
        "qwen3_moe": False,
        "qwen2": True,
        "qwen3": False,
    }
    for name in families if ON_NPU else ["qwen2"]:
        family(name, directory, families[name])
    if ON_NPU:
        from tests.npu.kernels import counts
        from tests.npu.rollout_operators import ROLLOUT

        FOUND["operators"] = dict(counts)
        FOUND["schemas"] = {name: schema_of(name) for name in ROLLOUT}
    result.write_text(json.dumps(FOUND))


if __name__ == "__main__":
    main()
