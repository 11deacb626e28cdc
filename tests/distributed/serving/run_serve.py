"""``tools/serve.py`` with a tiny model, and agents that ask it; run by ``test_serve.py``.

The server has the main thread, as it wants for its signals, and the agents another one. Every check prints one line
``CHECK <name> ok`` or ``CHECK <name> <what is wrong>``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from transformers import AutoModelForCausalLM

from mega_rl.parallel.watch.process import fail
from mega_rl.rollout.collect.records import read_step, to_group
from mega_rl.rollout.engine import Request
from mega_rl.rollout.vllm.streaming_engine import StreamingEngine
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from mega_rl.types import Trajectory
from tests.launching.launch import free_port
from tests.models.chat_templates import tokenizer_of
from tools import serve

ASK = [{"role": "user", "content": "What is 2 + 2?"}]
MAX_LEN = 512
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


class Watched(StreamingEngine):
    """Counts what is given up, and stands still when told to."""

    num_steps_left = 1 << 60
    given_up: list[tuple[int, int]] = []  # noqa: RUF012 - requests under way before and after each call of abort

    def step(self) -> list[Trajectory]:
        if Watched.num_steps_left <= 0:
            time.sleep(0.01)
            return []
        Watched.num_steps_left -= 1
        return super().step()

    def abort(self, requests: Sequence[Request]) -> None:
        before = self.num_unfinished
        super().abort(requests)
        Watched.given_up.append((before, self.num_unfinished))


def main() -> None:
    scratch = Path(sys.argv[1])
    spec = TinyModelSpec(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, ffn=64, max_positions=MAX_LEN)
    model = write_tiny_model(scratch / "model", spec, tokenizer_of("qwen2.5"))
    serve.StreamingEngine = Watched  # type: ignore[misc]
    port = free_port()
    agents = threading.Thread(target=ask, args=(f"http://127.0.0.1:{port}", model, scratch))
    agents.start()
    options = ["--port", str(port), "--name", "tiny", "--max-model-len", str(MAX_LEN), "--tool-parser", "hermes"]
    recorded = ["--record", str(scratch / "rollouts"), "--step", "4"]
    keys = ["platform.name=cpu", "model.dtype=float32", "rollout.kv_cache_bytes=16777216"]
    try:
        serve.main([str(model), *options, *recorded, *keys])
    except SystemExit as ended:
        print(f"ENDED {ended.code}", flush=True)
    except Exception as error:  # noqa: BLE001 - the agents wait for what will never come
        fail(error)
    agents.join(60)


def check(name: str, body: Callable[..., object], *args: object) -> None:
    try:
        body(*args)
        verdict = "ok"
    except BaseException as error:  # noqa: BLE001 - every check must report, and the server must be ended
        traceback.print_exc()
        verdict = f"{type(error).__name__}: {error}".replace("\n", " ")
    print(f"CHECK {name} {verdict}", flush=True)


def ask(url: str, model: Path, scratch: Path) -> None:
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=900)
        check("starts", until, lambda: is_up(url))
        check("seeds_and_streams", seeds_and_streams, client)
        check("logprobs", logprobs, client, model)
        check("stops", stops, client)
        check("tools", tools, client)
        check("gives_up", gives_up, url)
        check("records", records, url, model, scratch / "rollouts")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 900  # the launch has a shorter limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def seeds_and_streams(client: openai.OpenAI) -> None:
    def one(**keys: Any) -> Any:
        extra = {"return_token_ids": True}
        return client.completions.create(model="m", prompt="2 + 2", max_tokens=24, extra_body=extra, **keys)

    whole = one(seed=3).choices[0]
    assert whole.token_ids == one(seed=3).choices[0].token_ids != one(seed=4).choices[0].token_ids
    chunks = [choice for chunk in one(seed=3, stream=True) for choice in chunk.choices]
    assert [token for chunk in chunks for token in chunk.model_extra.get("token_ids", ())] == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text and len(chunks) > 2
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [whole.finish_reason]
    several = one(seed=3, n=3).choices
    assert [choice.index for choice in several] == [0, 1, 2] and several[0].token_ids == whole.token_ids
    assert len({tuple(choice.token_ids) for choice in several}) == 3


@torch.no_grad()
def of_transformers(model: Path, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids) - 1]: log-probabilities of every token but the first."""
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([list(ids)])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(list(ids))[1:, None])[:, 0]


def logprobs(client: openai.OpenAI, model: Path) -> None:
    answer = client.chat.completions.create(
        model="m", messages=ASK, max_tokens=16, seed=1, logprobs=True, extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    told = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    expected = of_transformers(model, [*answer.prompt_token_ids, *choice.token_ids])[-len(told) :]
    assert torch.allclose(told, expected, atol=1e-5), (told - expected).abs().max()
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)


def stops(client: openai.OpenAI) -> None:
    keys: dict[str, Any] = {"model": "m", "prompt": "abc", "max_tokens": 40, "seed": 2}
    text = client.completions.create(**keys).choices[0].text
    stop = next(text[i] for i in range(4, len(text)) if text[i].isascii())
    for is_streamed in (False, True):
        answer = client.completions.create(**keys, stop=[stop], stream=is_streamed)
        choices = [choice for chunk in answer for choice in chunk.choices] if is_streamed else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)], (stop, text)
        assert choices[-1].finish_reason == "stop"


def tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=ASK, tools=[TOOL], max_tokens=8, seed=1)
    assert answer.choices[0].message.tool_calls is None, "a model with random weights calls nothing"
    longer = client.chat.completions.create(model="m", messages=ASK, max_tokens=8, seed=1)
    assert answer.usage.prompt_tokens > longer.usage.prompt_tokens, "the template shows the tools"


def gives_up(url: str) -> None:
    Watched.given_up.clear()
    Watched.num_steps_left = 3
    body = {"prompt": "abc", "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=900) as answer:
        next(answer.iter_lines())
    until(lambda: Watched.given_up)
    assert Watched.given_up == [(1, 0)], Watched.given_up
    Watched.num_steps_left = 1 << 60


def records(url: str, model: Path, directory: Path) -> None:
    fields = {"session": "s", "prompt_index": 3, "sample_index": 1, "ground_truth": "4"}
    base = httpx.post(f"{url}/v1/sessions", json=fields, timeout=900).json()["base_url"]
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=900)
    messages, told = list(ASK), []
    for number in range(3):
        answer = client.chat.completions.create(
            model="m", messages=messages, max_tokens=12, seed=number, extra_body={"return_token_ids": True}
        )
        told.append((answer.prompt_token_ids, answer.choices[0].token_ids))
        said = {"role": "assistant", "content": answer.choices[0].message.content}
        messages += [said, {"role": "user", "content": f"and {number}?"}]
    given = httpx.post(f"{url}/v1/sessions/s/reward", json={"reward": 0.5}, timeout=900).json()
    (trajectory,) = to_group(read_step(directory, 4)).trajectories
    assert given["rows"] == 1 and trajectory.prompt.index == 3 and trajectory.newest_version == 3
    assert trajectory.token_ids.tolist() == told[-1][0] + told[-1][1], "what the engine was given and what it wrote"
    assert trajectory.sampled_ids.tolist() == [token for _, ids in told for token in ids]
    for (before, sampled), (after, _) in zip(told, told[1:], strict=False):
        assert after[: len(before) + len(sampled)] == before + sampled, "the next turn goes on from the same tokens"
    expected = of_transformers(model, trajectory.token_ids.tolist())
    found = torch.from_numpy(trajectory.logprobs.copy())[1:]
    mask = torch.from_numpy(trajectory.loss_mask.copy())[1:]
    assert torch.allclose(found[mask], expected[mask], atol=1e-5), (found - expected)[mask].abs().max()


if __name__ == "__main__":
    main()
