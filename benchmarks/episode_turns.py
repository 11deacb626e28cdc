"""Episodes of several turns with a service that answers late: every turn on its own against a barrier after each turn.

A tiny model on vLLM samples 64 episodes of three turns; the environment answers after a delay that is drawn for each
turn from an exponential distribution. With the barrier, no turn begins before all episodes have their replies, which
is what a loop over turns does. Both ways alternate, the prefix cache is emptied before each; their tokens must be the
same. Shown are the medians of the seconds, and the share of prompt tokens that the prefix cache had.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from report import publish, table

from mega_rl.config.schema import RolloutConfig
from mega_rl.data.products import TOOLS_TEMPLATE, WORDS
from mega_rl.data.replies import ReplyTokens
from mega_rl.data.synthetic import bpe_tokenizer
from mega_rl.data.tiny_model import TinyModelSpec, write_tiny_model
from mega_rl.data.tokenizer import render_prompt
from mega_rl.environments.episode import EpisodeLimits
from mega_rl.environments.protocol import End, Reply, Turn
from mega_rl.rollout.episode_tokens import Plan
from mega_rl.rollout.episodes import EpisodeSampler
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.types import Prompt, Trajectory

BLOCK = 32  # tokens of the prefix cache
SAMPLES = 8  # of a prompt
TURNS = 3


class Service:
    """Counts characters, after a delay that follows from what it was asked."""

    def __init__(self, prompt: Prompt, sample_index: int, mean_s: float) -> None:
        self._mean_s = mean_s

    async def step(self, turn: Turn) -> Reply | End:
        await asyncio.sleep(min(5 * self._mean_s, random.Random(str(turn.token_ids)).expovariate(1 / self._mean_s)))
        if turn.number == TURNS - 1:
            return End(1.0)
        return Reply([{"role": "tool", "content": f"{sum(map(ord, turn.text))} {len(turn.text)}"}])


class WithBarrier(EpisodeSampler):
    """Every turn waits for all replies."""

    def _told(self) -> list[Any]:
        if self._engine.num_unfinished:
            return []
        return [self._events.get() for _ in self._with_environment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--mean-s", type=float, default=0.8, help="of a delay")
    parser.add_argument("--turn-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.episodes, arguments.mean_s, arguments.repeats = 8, 0.1, 1
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), arguments)
    rows = [[name, of["seconds"], of["cached"], of["cached_later"]] for name, of in found.items()]
    ratio = found["barrier"]["seconds"] / found["no barrier"]["seconds"]
    text = table(["", "seconds (median)", "share of prompt tokens cached", "of later turns'"], rows)
    title = f"{arguments.episodes} episodes of {TURNS} turns, delay {arguments.mean_s:g} s: {ratio:.2f} times as fast"
    publish(title, text, "cpu", {**found, "ratio": ratio}, arguments.json)


def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds and cached shares of both ways, by their names."""
    tokenizer = bpe_tokenizer(WORDS, 400, TOOLS_TEMPLATE)
    write_tiny_model(directory / "model", TinyModelSpec(max_positions=4096), tokenizer)
    rollout = RolloutConfig(kv_cache_bytes=1 << 28, vllm={"block_size": BLOCK, "max_num_seqs": 64})
    engine = VLLMEngine(directory / "model", rollout, max_model_len=2048, device_type="cpu", dtype="float32")
    prompts = []
    for index in range(arguments.episodes // SAMPLES):
        text, ids = render_prompt(tokenizer, f"{index}*{index + 7}=? " * 12)
        prompts.append(Prompt(index, tuple(ids), text, "", "products"))
    requests = make_requests(prompts, n=SAMPLES, step=0, seed=1, max_tokens=1024, temperature=1.0)
    plan = Plan(
        lambda prompt, sample: Service(prompt, sample, arguments.mean_s),
        ReplyTokens(tokenizer, roles=["tool"]),
        tokenizer,
        EpisodeLimits(max_turns=TURNS),
        max_turn_tokens=arguments.turn_tokens,
        workers=arguments.episodes,
    )
    cached: list[tuple[int, int]] = []
    llm: Any = engine._llm
    own_step = llm.llm_engine.step

    def step() -> Any:
        outputs = own_step()
        cached.extend((o.num_cached_tokens or 0, len(o.prompt_token_ids)) for o in outputs if o.finished)
        return outputs

    llm.llm_engine.step = step
    seconds: dict[str, list[float]] = {"barrier": [], "no barrier": []}
    shares: dict[str, tuple[float, float]] = {}
    tokens: list[list[list[int]]] = []
    longest = max(len(prompt.token_ids) for prompt in prompts)
    for _ in range(arguments.repeats):
        for name, kind in (("barrier", WithBarrier), ("no barrier", EpisodeSampler)):
            llm.reset_prefix_cache()
            cached.clear()
            sampler = kind(engine, plan)
            began = time.perf_counter()
            found: list[Trajectory] = sampler.generate(requests)
            seconds[name].append(time.perf_counter() - began)
            sampler.close()
            tokens.append([trajectory.token_ids.tolist() for trajectory in found])
            later = [pair for pair in cached if pair[1] > longest]
            shares[name] = _share(cached), _share(later)
    assert all(one == tokens[0] for one in tokens), "the tokens of both ways differ"
    return {
        name: {"seconds": statistics.median(of), "cached": shares[name][0], "cached_later": shares[name][1]}
        for name, of in seconds.items()
    }


def _share(pairs: list[tuple[int, int]]) -> float:
    return sum(hit for hit, _ in pairs) / max(1, sum(asked for _, asked in pairs))


if __name__ == "__main__":
    main()
