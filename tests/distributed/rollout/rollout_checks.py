"""What a started engine is checked for; run by ``test_rollout_engine.py`` as ``single``, ``tensor`` or ``replicas``.

Every check prints one line ``CHECK <name> <rank> ok`` or ``CHECK <name> <rank> <what is wrong>``.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from mega_rl.bridge.mapping.megatron import rank_series
from mega_rl.bridge.mapping.vllm import vllm_series, vllm_slices
from mega_rl.bridge.slices import extents, indices
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.evaluation.evaluate import STREAM, AnsweredPrompt, EvaluationRow, EvaluationSettings, evaluate
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.collectives import broadcast_object, gather_objects
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote.weight_store import Store, take
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.sinks import InPlaceSink, SentWeights
from mega_rl.rollout.store_form import StoreForm
from mega_rl.rollout.temperature_probe import probe_prompt
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.types import Prompt, Score, Trajectory
from tests.distributed.rollout.episode_checks import episodes
from tests.distributed.rollout.tail_checks import (
    pieces_are_the_responses,
    tail_tokens_are_of_their_version,
    tails_are_functions_of_what_is_kept,
    unfinished_responses_go_on,
)
from tests.models.rollout_support import (
    EOS,
    answer_of,
    errors_under,
    hf_greedy,
    hf_logprobs,
    hf_weights,
    perturb,
    prompt,
    save,
    span_error,
    tiny_model,
)
from tests.pretended.adapted_model import AdaptedModel
from tests.pretended.engine_process import sealed
from tests.pretended.tokens import measured_temperatures

MAX_MODEL_LEN = 384
LONG = 300  # tokens of a prompt that fills two blocks of the prefix cache (128 tokens each on a CPU)


def start(path: Path, *, max_model_len: int = MAX_MODEL_LEN, device_type: str = "cpu", **keys: Any) -> VLLMEngine:
    """An engine with these keys of ``rollout``."""
    rollout = RolloutConfig(kv_cache_bytes=1 << 24, **keys)
    return VLLMEngine(path, rollout, max_model_len=max_model_len, device_type=device_type, dtype="float32")


def sample(engine: VLLMEngine, prompts: list[Prompt], **keys: Any) -> list[Trajectory]:
    return engine.generate(make_requests(prompts, **{"n": 1, "step": 0, "seed": 0, "temperature": 1.0, **keys}))


def check(name: str, body: Callable[..., object], *args: object) -> None:
    try:
        body(*args)
        verdict = "ok"
    except Exception as error:  # noqa: BLE001 - every check must report, and the next ones must run
        verdict = f"{type(error).__name__}: {error}".replace("\n", " ")
    line = f"CHECK {name} {os.environ.get('RANK', '0')} {verdict}\n"
    os.write(sys.stdout.fileno(), line.encode())  # at once: other ranks write into the same file


def equals_hf(engine: VLLMEngine, model: PreTrainedModel) -> float:
    """Greedy tokens and sampled log-probabilities are Hugging Face's, for a short prompt and a long one.

    Returns:
        The largest difference of a log-probability, nats.
    """
    largest, prompts = 0.0, [prompt(0, 5), prompt(1, LONG)]
    for trajectory in sample(engine, prompts, max_tokens=12, temperature=0.0):
        expected = hf_greedy(model, trajectory.prompt, 12)
        assert answer_of(trajectory) == expected, (answer_of(trajectory), expected)
    temperature = 0.7
    for trajectory in sample(engine, prompts, n=4, max_tokens=12, temperature=temperature):
        expected_logprobs = hf_logprobs(model, trajectory.prompt, answer_of(trajectory), temperature)
        difference = (torch.from_numpy(trajectory.sampled_logprobs) - expected_logprobs).abs().max().item()
        assert difference < 1e-4, difference
        largest = max(largest, difference)
    return largest


def layout_is_the_bridges(
    engine: VLLMEngine, path: Path, model: PreTrainedModel, size: int, tp_rank: int, has_whole_experts: bool = False
) -> None:
    """Names, coverage and contents of the live parameters are what the bridge expects of this engine."""
    live, full = engine.parameters(), dict(hf_weights(model))
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in live.items()}
    for piece in vllm_slices(read_model_shape(path), size, tp_rank, has_whole_experts):
        local = live[piece.local_name][indices(piece.local_box)]
        assert tuple(local.shape) == extents(piece.local_box), piece
        expected = full[piece.hf_name][indices(piece.hf_box)]
        assert torch.equal(local.view_as(expected), expected), piece
        covered[piece.local_name][indices(piece.local_box)] += 1
    for name, times in covered.items():
        padded = name in ("model.embed_tokens.weight", "lm_head.weight")
        assert times.max() == 1 and (padded or times.min() == 1), f"{name}: {times.min()} to {times.max()} times"


def takes_weights(engine: VLLMEngine, model: PreTrainedModel, version: int, seed: int) -> float:
    """After an update through the loader, in two chunks, the engine is the perturbed model, prefix cache included."""
    equals_hf(engine, model)  # fills the prefix cache with the old weights
    return loads(engine, model, version, seed)


def loads(engine: VLLMEngine, model: PreTrainedModel, version: int, seed: int) -> float:
    perturb(model, seed, 0.05)
    weights = hf_weights(model)
    engine.begin_update()
    engine.load_hf_weights(iter(weights[:5]))
    engine.load_hf_weights(iter(weights[5:]))
    engine.finish_update(version)
    assert engine.weight_version == version
    return equals_hf(engine, model)


def takes_live_writes(engine: VLLMEngine, model: PreTrainedModel, path: Path, size: int, tp_rank: int) -> float:
    """Writing the bridge's slices in place makes the engine the perturbed model."""
    equals_hf(engine, model)
    return writes(engine, model, path, size, tp_rank, 1, 17)


def writes(
    engine: VLLMEngine, model: PreTrainedModel, path: Path, size: int, tp_rank: int, version: int, seed: int
) -> float:
    perturb(model, seed, 0.05)
    full = dict(hf_weights(model))
    engine.begin_update()
    live = engine.parameters()
    for piece in vllm_slices(read_model_shape(path), size, tp_rank):
        live[piece.local_name][indices(piece.local_box)] = full[piece.hf_name][indices(piece.hf_box)]
    engine.finish_update(version)
    return equals_hf(engine, model)


def takes_whole_experts(engine: VLLMEngine, model: PreTrainedModel, path: Path) -> float:
    """A sync by the plan brings every worker its experts, from a trainer whose ranks have some whole too."""
    equals_hf(engine, model)
    layout, shape = ParallelLayout.create(2, expert=2), read_model_shape(path)
    sources = [rank_series(shape, layout, rank) for rank in range(2)]
    weights = SentWeights(shape, torch.float32, 1 << 16, torch.device("cpu"), has_whole_experts=True)
    sink = InPlaceSink(engine, weights, EngineLayout(2, 2))
    sink.connect(sources)
    perturb(model, 17, 0.05)
    full = dict(hf_weights(model))
    transfer_count = sink.update(lambda local_name, name, box, local_box: full[name][indices(box)], 1)
    experts = sum(tensor.numel() for name, tensor in full.items() if ".experts." in name)
    assert transfer_count.bytes_local >= 4 * experts // 2, "own experts were sent"
    return equals_hf(engine, model)


def live_write(model: PreTrainedModel, path: Path) -> Callable[[Mapping[str, torch.Tensor]], None]:
    """What puts the model's present weights into the live parameters of an engine of one rank."""
    full = dict(hf_weights(model))

    def write(live: Mapping[str, torch.Tensor]) -> None:
        for piece in vllm_slices(read_model_shape(path), 1, 0):
            live[piece.local_name][indices(piece.local_box)] = full[piece.hf_name][indices(piece.hf_box)]

    return write


def weights_change_under_way(engine: VLLMEngine, model: PreTrainedModel, path: Path) -> None:
    """Responses go on with new weights as if these had computed all that was there; each token tells its version.

    With keys and values of the old weights the rest would be another: the first prompt is long.
    """
    questions, before = [prompt(0, LONG), prompt(1, 7)], engine.weight_version
    whole = make_requests(questions, n=1, step=0, seed=0, max_tokens=12, temperature=0.0)
    old = [answer_of(trajectory) for trajectory in engine.generate(whole)]
    engine.submit(whole)
    for _ in range(5):
        assert not engine.step(), "ended before the weights changed"
    perturb(model, 5, 0.05)
    engine.exchange(live_write(model, path), before + 1)
    found: list[Trajectory] = []
    while engine.num_unfinished:
        found += engine.step()
    for trajectory, question, first in zip(sorted(found, key=lambda t: t.prompt.index), questions, old, strict=True):
        start, changed = trajectory.spans
        num_old = changed.start - start.start
        assert (start.version, changed.version) == (before, before + 1) and 0 < num_old <= 5, trajectory.spans
        answer = answer_of(trajectory)
        assert answer[:num_old] == first[:num_old]
        prefix = Prompt(question.index, question.token_ids + answer[:num_old], "", "", "test")
        assert answer[num_old:] == hf_greedy(model, prefix, len(answer) - num_old)
    (later, *_) = engine.generate(whole)
    assert [span.version for span in later.spans] == [before + 1]


def tokens_are_of_their_version(engine: VLLMEngine, model: PreTrainedModel, path: Path) -> float:
    """Each sampled token's log-probability is that of the weights of its own version."""
    requests = make_requests([prompt(0, LONG)], n=4, step=0, seed=6, max_tokens=12, temperature=1.0)
    found, models = changed_after_five_steps(engine, model, path, requests, 6)
    assert any(len(trajectory.spans) == 2 for trajectory in found)
    largest = max(span_error(trajectory, models) for trajectory in found)
    assert largest < 1e-4, largest
    return largest


def kept_keys_and_values_show(
    model: PreTrainedModel, path: Path, vllm: Mapping[str, object] | None = None, **keys: Any
) -> float:
    """Responses that run go on with keys and values of older weights; nothing that begins later shares them."""
    options, model = {**(vllm or {}), "max_num_seqs": 3}, copy.deepcopy(model)
    engine = start(path, kv_on_update="keep", ignore_eos=True, vllm=options, **keys)
    engine.exchange(live_write(model, path), 1)
    asked = {"n": 4, "seed": 7, "max_tokens": 12, "temperature": 1.0}
    first = make_requests([prompt(0, LONG)], step=0, **asked)  # the last one waits for a place
    later = make_requests([prompt(0, LONG)], step=1, **asked)
    found, models = changed_after_five_steps(engine, model, path, first, 7, later)
    found += engine.generate(make_requests([prompt(0, LONG)], step=2, **asked))
    mixed, whole = ([t for t in found if len(t.spans) == number] for number in (2, 1))
    assert len(mixed) == 3 and len(whole) == 9
    for trajectory in mixed:
        change = trajectory.spans[1].start - LONG
        of_old, of_new = (errors_under(trajectory, models[version]) for version in (1, 2))
        assert of_old[:change].max() < 1e-4 < 1e-3 < of_old[change], (change, of_old)
        assert of_new[change:].max() > 1e-3, (change, of_new)
    largest = max(span_error(trajectory, models) for trajectory in whole)
    assert largest < 1e-4, largest
    return largest


def changed_after_five_steps(
    engine: VLLMEngine,
    model: PreTrainedModel,
    path: Path,
    requests: list[Request],
    seed: int,
    later: Sequence[Request] = (),
) -> tuple[list[Trajectory], dict[int, PreTrainedModel]]:
    """What becomes of requests whose engine gets other weights, and of later ones; and the models by their versions."""
    old, found = copy.deepcopy(model), list[Trajectory]()
    engine.submit(requests)
    for _ in range(5):
        found += engine.step()
    perturb(model, seed, 0.05)
    engine.exchange(live_write(model, path), engine.weight_version + 1)
    engine.submit(later)
    while engine.num_unfinished:
        found += engine.step()
    return found, {engine.weight_version - 1: old, engine.weight_version: model}


def fifty_updates_under_way(engine: VLLMEngine, model: PreTrainedModel, path: Path) -> None:
    """Every step samples with other weights, of which all bytes are proved as they arrive from a store."""
    form = StoreForm((tuple(vllm_series(read_model_shape(path), 1, 0)),), torch.float32, num_slots=2, salt=5)
    store = Store(form)
    models, found = {engine.weight_version: copy.deepcopy(model)}, list[Trajectory]()
    for version in range(engine.weight_version + 1, engine.weight_version + 51):
        if not engine.num_unfinished:
            engine.submit(make_requests([prompt(0, 7)], n=3, step=version, seed=7, max_tokens=12, temperature=1.0))
        found += engine.step()
        perturb(model, version, 0.01)
        live_write(model, path)(store.parameters(0, version))
        engine.exchange(partial(take, store, 0, form.slot(version), sealed(store, version).of(0)), version)
        models[version] = copy.deepcopy(model)
    while engine.num_unfinished:
        found += engine.step()
    store.close()
    assert len({span.version for trajectory in found for span in trajectory.spans}) > 40
    errors = [span_error(trajectory, models) for trajectory in found]
    assert max(errors) < 1e-4, errors


def adapters_are_added_under_way(path: Path) -> None:
    """An engine adds what a version brings to frozen weights, those of stacked experts too, and samples on with it."""
    engine, model = start(path, dtype="bfloat16"), AdaptedModel(read_model_shape(path), engine_size=1)
    engine.submit(make_requests([prompt(0, 7)], n=3, step=0, seed=7, max_tokens=12, temperature=1.0))
    answers, found = list[dict[int, float]](), list[Trajectory]()
    for version in range(3):
        stored, (wanted,) = model.put(version)
        slot = model.form.slot(version)
        write = partial(take, model.store, 0, slot, stored.of(0), has_fixed=version > 0)
        engine.exchange(write, engine.weight_version + 1)
        live = engine.parameters()
        wrong = [
            n for n, t in wanted.items() if not torch.equal(live[n][: len(t)].view(torch.int16), t.view(torch.int16))
        ]
        assert not wrong, wrong
        answers += engine.first_logprobs(prompt(1, 9).token_ids, 1.0)
        found += engine.step()
    while engine.num_unfinished:
        found += engine.step()
    model.store.close()
    assert len(found) == 3 and len({tuple(answer.items()) for answer in answers}) == 3, (
        "every version is another policy"
    )


def same_samples_in_any_batch(engine: VLLMEngine) -> None:
    """A response depends on its own seed alone: not on the batch, the order, or what was sampled before."""
    requests = make_requests([prompt(i, 4 + i) for i in range(5)], n=3, step=2, seed=1, max_tokens=10, temperature=1.0)
    together = engine.generate(requests)
    assert len({answer_of(trajectory) for trajectory in together}) == len(together), "samples repeat"
    alone = [engine.generate([request])[0] for request in reversed(requests)][::-1]
    assert [answer_of(t) for t in alone] == [answer_of(t) for t in together]
    assert [(c.prompt.index, c.sample_index) for c in together] == [(r.prompt.index, r.sample_index) for r in requests]


def prompts_stay_whole(path: Path, engine: VLLMEngine) -> None:
    """Seeded prompts that one step of the engine has no room for wait for the next one."""
    small = start(path, vllm={"max_num_seqs": 3, "max_num_batched_tokens": MAX_MODEL_LEN})
    assert small._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 3
    prompts = [prompt(0, LONG), prompt(1, LONG)]
    assert 2 * LONG > MAX_MODEL_LEN
    found, expected = (sample(each, prompts, max_tokens=4) for each in (small, engine))
    assert [answer_of(trajectory) for trajectory in found] == [answer_of(trajectory) for trajectory in expected]


def seeds_of_the_engine(path: Path) -> None:
    """With ``rollout.seeds=engine`` a batch is the same when it is sampled again, and the trainer's generators stay."""
    engine = start(path, seeds="engine")
    requests = make_requests([prompt(i, 4 + i) for i in range(5)], n=3, step=2, seed=1, max_tokens=10, temperature=1.0)
    before = torch.get_rng_state(), random.getstate()
    sampled = [answer_of(trajectory) for trajectory in engine.generate(requests)]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert len(set(sampled)) == len(sampled), "samples repeat"
    torch.rand(3)
    assert [answer_of(trajectory) for trajectory in engine.generate(requests)] == sampled
    others = make_requests([prompt(i, 4 + i) for i in range(5)], n=3, step=3, seed=1, max_tokens=10, temperature=1.0)
    assert [answer_of(trajectory) for trajectory in engine.generate(others)] != sampled


def limits_are_per_request(engine: VLLMEngine) -> None:
    engine._rollout.ignore_eos = True
    requests = [Request(prompt(i, 6), 0, 5, max_tokens=limit) for i, limit in enumerate((1, 7, 3))]
    trajectories = engine.generate(requests)
    engine._rollout.ignore_eos = False
    assert [len(t.sampled_ids) for t in trajectories] == [1, 7, 3]
    assert [len(t.sampled_logprobs) for t in trajectories] == [1, 7, 3]
    assert {t.finish_reason for t in trajectories} == {"length"}
    assert engine.generate([]) == []


def probe_of_the_temperature(engine: VLLMEngine) -> None:
    """Raw log-probabilities are measured as such, and a probe leaves no trace in later samples."""

    def give(mode: str) -> Callable[[Any], None]:
        def change(worker: Any) -> None:
            sampler = worker.model_runner.sampler
            sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode

        return change

    question = [prompt(3, LONG), prompt(4, 5)]
    before = sample(engine, question, n=2, max_tokens=8)
    generators = torch.get_rng_state(), random.getstate()
    (found,) = measured_temperatures(engine, probe_prompt(97))
    assert found is not None and abs(found - 2) < 1e-3, found
    assert torch.equal(generators[0], torch.get_rng_state()) and generators[1] == random.getstate()
    engine._llm.collective_rpc(give("raw_logprobs"))
    (found,) = measured_temperatures(engine, probe_prompt(97))
    assert found is not None and abs(found - 1) < 1e-3, found
    engine._llm.collective_rpc(give("processed_logprobs"))
    assert sample(engine, question, n=2, max_tokens=8) == before


def stops(engine: VLLMEngine) -> None:
    """At the end-of-sequence token, at stop tokens and at stop strings."""
    requests = make_requests([prompt(i, 6) for i in range(4)], n=16, step=0, seed=3, max_tokens=40, temperature=1.5)
    sampled = engine.generate(requests)
    ended = [t for t in sampled if t.finish_reason == "stop"]
    assert ended and len(ended) < len(sampled), f"{len(ended)} of {len(sampled)} ended"
    assert all(answer_of(t).index(EOS) == t.num_sampled - 1 and "<eos>" not in t.text for t in ended)
    assert all(EOS not in answer_of(t) and t.num_sampled == 40 for t in sampled if t.finish_reason == "length")

    long = next(t for t in sampled if t.finish_reason == "length")
    request = requests[sampled.index(long)]
    answer = answer_of(long)
    engine._rollout.stop_token_ids = [answer[5]]
    (cut,) = engine.generate([request])
    engine._rollout.stop_token_ids = []
    end = answer.index(answer[5])
    assert cut.finish_reason == "stop" and answer_of(cut) == answer[: end + 1]

    engine._rollout.stop = [long.text[8:11]]
    (cut,) = engine.generate([request])
    engine._rollout.stop = []
    end = long.text.index(long.text[8:11])
    assert cut.finish_reason == "stop" and answer_of(cut) == answer[: end + 3] and cut.text == long.text[:end], cut


def process_is_untouched(path: Path) -> None:
    """Neither construction nor generation moves a generator, a thread count or a variable that others read."""

    def state() -> dict[str, object]:
        return {
            "torch": torch.get_rng_state().tolist(),
            "numpy": str(np.random.get_state()),
            "random": str(random.getstate()),
            "environ": {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            "threads": torch.get_num_threads(),
            "set_num_threads": torch.set_num_threads,
            "precision": torch.get_float32_matmul_precision(),
            "dtype": torch.get_default_dtype(),
            "grad": torch.is_grad_enabled(),
        }

    os.environ["LOCAL_WORLD_SIZE"] = "7"
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    first = start(path)  # imports vLLM, whose environment defaults are meant to stay
    before = state()
    sample(first, [prompt(0, 4)], n=2, max_tokens=4)
    start(path)
    after = state()
    assert before["environ"]["LOCAL_WORLD_SIZE"] == "7"  # type: ignore[index]
    assert torch.initial_seed() == 11, torch.initial_seed()
    torch.manual_seed(11)
    assert torch.get_rng_state().tolist() == before["torch"], "the first construction moved torch's generator"
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, changed
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def groups_survive_a_dropped_engine(path: Path, engine: VLLMEngine) -> None:
    """The groups are the trainer's, and other engines' too."""
    start(path)  # dropped at once
    gc.collect()
    assert dist.is_initialized()
    assert len(sample(engine, [prompt(0, 4)], max_tokens=4)) == 1


def bad_input(path: Path, engine: VLLMEngine, packed: VLLMEngine) -> None:
    def sentence(action: Callable[[], object]) -> str:
        try:
            action()
        except InputError as error:
            return str(error)
        raise AssertionError("no InputError")

    odd = Path(shutil.copytree(path, path.with_name("odd_heads")))
    config = json.loads((odd / "config.json").read_text())
    config |= {"hidden_size": 16 * config["num_attention_heads"], "head_dim": 16}
    (odd / "config.json").write_text(json.dumps(config))
    assert "attention heads of 16 channels" in sentence(lambda: start(odd))
    assert "rollout.vllm.max_num_seqs" in sentence(lambda: start(path, vllm={"max_num_seq": 4}))
    assert "rollout.tensor_parallel_size" in sentence(lambda: start(path, vllm={"tensor_parallel_size": 2}))
    assert "max_model_len" in sentence(lambda: start(path, max_model_len=100_000))
    assert "data.max_prompt_length" in sentence(lambda: engine.generate([Request(prompt(9, 380), 0, 0, max_tokens=5)]))
    assert "rollout.weight_update" in sentence(packed.parameters)


def incomplete_reload(packed: VLLMEngine, model: PreTrainedModel) -> None:
    packed.begin_update()
    packed.load_hf_weights((name, t) for name, t in hf_weights(model) if "down_proj" not in name)
    try:
        packed.finish_update(9)
    except RuntimeError as error:
        assert "down_proj" in str(error), error
        return
    raise AssertionError("an incomplete reload passed")


def equals_fresh_engine(engine: VLLMEngine, model: PreTrainedModel, directory: Path) -> None:
    """An engine that took new weights samples bit for bit what an engine started with them does."""
    fresh = start(save(model, directory / "fresh"), weight_update=engine._rollout.weight_update)
    requests = make_requests([prompt(0, 5), prompt(1, LONG)], n=3, step=4, seed=0, max_tokens=12, temperature=1.0)
    mine, theirs = (e.generate(requests) for e in (engine, fresh))
    assert [answer_of(t) for t in mine] == [answer_of(t) for t in theirs]
    pairs = zip(mine, theirs, strict=True)
    assert all(np.array_equal(ours.logprobs, other.logprobs) for ours, other in pairs)


def single(directory: Path) -> None:
    for family, tied in (("qwen2", True), ("qwen3", False), ("llama", True)):
        model = tiny_model(family, tied=tied)
        path = save(model, directory / family)
        if family == "qwen2":
            check("process_is_untouched", process_is_untouched, path)
        live, packed = start(path), start(path, weight_update="reload")
        twin = tiny_model(family, tied=tied)
        check(f"{family}_layout", layout_is_the_bridges, live, path, model, 1, 0)
        check(f"{family}_equals_hf", equals_hf, live, model)
        if family == "qwen2":
            check("same_samples_in_any_batch", same_samples_in_any_batch, live)
            check("episodes", episodes, live, model, path)
            check("prompts_stay_whole", prompts_stay_whole, path, live)
            check("seeds_of_the_engine", seeds_of_the_engine, path)
            check("limits_are_per_request", limits_are_per_request, live)
            check("probe_of_the_temperature", probe_of_the_temperature, live)
            check("stops", stops, live)
            check("groups_survive_a_dropped_engine", groups_survive_a_dropped_engine, path, live)
            check("bad_input", bad_input, path, live, packed)
            check("weights_change_under_way", weights_change_under_way, live, model, path)
            check("tokens_are_of_their_version", tokens_are_of_their_version, live, model, path)
            check("fifty_updates_under_way", fifty_updates_under_way, live, model, path)
            check("unfinished_responses_go_on", unfinished_responses_go_on, live)
            check("tails_are_functions_of_what_is_kept", tails_are_functions_of_what_is_kept, live)
            write = partial(live_write, model, path)
            check("tail_tokens_are_of_their_version", tail_tokens_are_of_their_version, live, model, write)
            check("pieces_are_the_responses", pieces_are_the_responses, live, model, write)
            check("kept_keys_and_values_show", kept_keys_and_values_show, model, path)
        check(f"{family}_live_writes", takes_live_writes, live, model, path, 1, 0)
        check(f"{family}_live_loader", takes_weights, live, model, 2, 23)
        check(f"{family}_reload", takes_weights, packed, twin, 1, 23)
        check(f"{family}_reload_again", takes_weights, packed, twin, 2, 29)
        if family == "qwen2":
            check("live_equals_fresh_engine", equals_fresh_engine, live, model, directory)
            live.use_loader()
            check("live_then_reload", takes_weights, live, model, 3, 31)
            check("reload_equals_fresh_engine", equals_fresh_engine, packed, twin, directory)
            check("incomplete_reload", incomplete_reload, packed, twin)


def tensor(directory: Path) -> None:
    """Two ranks, one engine; that with experts comes first, as in ``families``."""
    model = tiny_model("qwen3_moe", tied=False)
    path = directory / "experts"
    if dist.get_rank() == 0:
        save(model, path)
    dist.barrier()
    whole = start(path, tensor_parallel_size=2, vllm={"enable_expert_parallel": True})
    check("experts_layout", layout_is_the_bridges, whole, path, model, 2, dist.get_rank(), True)
    check("experts_sync", takes_whole_experts, whole, model, path)
    check("experts_loader", takes_weights, whole, model, 2, 23)
    for family, tied in (("qwen2", True), ("qwen3", True), ("llama", False)):
        model = tiny_model(family, tied=tied)
        path = directory / family
        if dist.get_rank() == 0:
            save(model, path)
        dist.barrier()
        live = start(path, tensor_parallel_size=2)
        check(f"{family}_layout", layout_is_the_bridges, live, path, model, 2, dist.get_rank())
        check(f"{family}_equals_hf", equals_hf, live, model)
        if family == "qwen2":
            check("episodes", episodes, live, model, path, dist.group.WORLD)
        check(f"{family}_live_writes", takes_live_writes, live, model, path, 2, dist.get_rank())
        check(f"{family}_live_loader", takes_weights, live, model, 2, 23)
        if family == "qwen2":
            check(f"{family}_probe", probe_of_the_temperature, live)
            packed = start(path, tensor_parallel_size=2, weight_update="reload")
            check(f"{family}_reload", takes_weights, packed, tiny_model(family, tied=tied), 1, 23)


def families(directory: Path) -> None:
    """One process, the families that came after the first three.

    Those with experts come first: vLLM makes their groups only with the first engine of a process.
    """
    for family in ("qwen3_moe", "qwen2_moe", "mistral"):
        model = tiny_model(family, tied=False)
        path = save(model, directory / family)
        live = start(path)
        check(f"{family}_layout", layout_is_the_bridges, live, path, model, 1, 0)
        check(f"{family}_live_writes", takes_live_writes, live, model, path, 1, 0)
        packed = start(path, weight_update="reload")
        check(f"{family}_reload", takes_weights, packed, tiny_model(family, tied=False), 1, 23)
        live.use_loader()
        check(f"{family}_live_then_reload", takes_weights, live, model, 2, 31)
        if family == "qwen3_moe":
            check("adapters_are_added_under_way", adapters_are_added_under_way, path)


@dataclasses.dataclass
class Failing:
    """An engine that refuses its requests on one rank."""

    engine: VLLMEngine
    fails: bool

    def check(self, requests: list[Request]) -> None:
        if self.fails:
            raise InputError("the engine of this rank has no room")


class Unscored:
    """A scorer without rewards."""

    def start(self, trajectory: Trajectory) -> Future[Score]:
        known: Future[Score] = Future()
        known.set_result(Score(0.0))
        return known


def replicas(directory: Path, tensor_parallel_size: int) -> None:
    """Several engines side by side, each with work of its own."""
    rank = dist.get_rank()
    model, path = tiny_model("qwen2", tied=True), directory / "model"
    if rank == 0:
        save(model, path)
    dist.barrier()
    engine = start(path, tensor_parallel_size=tensor_parallel_size)
    layout = EngineLayout(dist.get_world_size(), tensor_parallel_size)
    prompts = [prompt(i, 4 + 3 * i) for i in range(5)]
    settings = EvaluationSettings(layout, n=3, temperature=1.0, max_tokens=9, seed=0)
    requests = make_requests(prompts, n=3, step=STREAM, seed=0, max_tokens=9, temperature=1.0)

    def answers(engine: Any, prompts: list[Prompt]) -> list[EvaluationRow]:
        mine: list[AnsweredPrompt] = []
        evaluate(engine, Unscored(), prompts, settings, mine.append)  # type: ignore[arg-type]
        assert (layout.tensor_rank(rank) == 0) or not mine
        found = sorted((a for part in gather_objects(mine) for a in part), key=lambda answered: answered.prompt.index)
        rows = [row for answered in found for row in answered.rows]
        return [row for is_greedy in (True, False) for row in rows if row.is_greedy is is_greedy]

    def everywhere() -> None:
        shared = answers(engine, prompts)
        alone = engine.generate(requests)  # every replica samples everything
        greedy = engine.generate(make_requests(prompts, n=1, step=0, seed=0, max_tokens=9, temperature=0.0))
        assert [answer_of(row.trajectory) for row in shared] == [answer_of(t) for t in [*greedy, *alone]]
        assert [row.trajectory.sample_index for row in shared] == [0] * 5 + [0, 1, 2] * 5
        seen = gather_objects(shared)
        assert all(other == seen[0] for other in seen)

    def fewer_prompts_than_replicas() -> None:
        assert len(answers(engine, prompts[:1])) == 4
        assert answers(engine, []) == []

    def failure_is_everybodys() -> None:
        failing = Failing(engine, fails=layout.replica(rank) == layout.num_replicas - 1)
        try:
            answers(failing, prompts)
        except InputError as error:
            assert "no room" in str(error)
        else:
            raise AssertionError("no error")
        assert len(answers(engine, prompts)) == 4 * len(prompts)

    check("everywhere", everywhere)
    check("equals_hf", equals_hf, engine, model)
    if tensor_parallel_size == 1:
        check("episodes", episodes, engine, model, path, None, rank, layout.num_replicas)
    check("fewer_prompts_than_replicas", fewer_prompts_than_replicas)
    check("failure_is_everybodys", failure_is_everybodys)


def shared_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as own:
        yield Path(broadcast_object(own))
        if dist.is_initialized():
            dist.barrier()


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    mode = sys.argv[1]
    for directory in shared_directory():
        if mode == "single":
            single(directory)
        elif mode == "tensor":
            tensor(directory)
        elif mode == "families":
            families(directory)
        else:
            replicas(directory, tensor_parallel_size=int(sys.argv[2]))
    if dist.is_initialized():
        dist.destroy_process_group()
