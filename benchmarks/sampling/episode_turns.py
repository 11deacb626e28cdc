"""Episodes of several turns with a service that answers late: every turn on its own against a barrier after each turn.

A tiny model on vLLM samples 64 episodes of three turns; the environment answers after a delay that is drawn for each
turn from an exponential distribution. With the barrier, no turn begins before all episodes have their replies, which
is what a loop over turns does. Both ways alternate, the prefix cache is emptied before each; their tokens must be the
same. Shown are the medians of the seconds, and the share of prompt tokens that the prefix cache had.

Where TRL is installed, GRPOTrainer samples as many episodes with the same service as its ``environment_factory``: the
same model, prompts, delays and tokens of a turn, each turn read as a call of the tool. It generates with transformers,
as it does on a CPU, and waits for no service after the last turn. ``benchmarks/against_trl/preference.py`` says how to
make an environment beside ours that has TRL; run the script there, with PYTHONPATH=$PWD.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.against_trl.peer import settings
from benchmarks.report import publish, table
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.data.tokens.replies import ReplyTokens
from mega_rl.data.tokens.tokenizer import render_prompt
from mega_rl.environments.episode import EpisodeLimits
from mega_rl.environments.protocol import End, Reply, Turn
from mega_rl.rollout.episodes.episode_tokens import EpisodePlan
from mega_rl.rollout.episodes.episodes import EpisodeSampler
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.synthetic.arithmetic import bpe_tokenizer
from mega_rl.synthetic.products import TOOLS_TEMPLATE, WORDS
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from mega_rl.types import Prompt, Trajectory

OWN, BARRIER, PEER = "no barrier", "barrier", "TRL, environment_factory"
BLOCK = 32  # tokens of the prefix cache
SAMPLES = 8  # of a prompt
TURNS = 3
SHARES = ("cached", "cached_later")


class Service:
    """Counts characters, after a delay that follows from what it was asked."""

    def __init__(self, prompt: Prompt, sample_index: int, mean_s: float) -> None:
        self._mean_s = mean_s

    async def step(self, turn: Turn) -> Reply | End:
        counts = await counted(turn.text, self._mean_s)
        return End(1.0) if turn.number == TURNS - 1 else Reply([{"role": "tool", "content": counts}])


async def counted(text: str, mean_s: float) -> str:
    await asyncio.sleep(min(5 * mean_s, random.Random(text).expovariate(1 / mean_s)))
    return f"{sum(map(ord, text))} {len(text)}"


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
        if find_spec("trl") is not None:
            found[PEER] = peer(Path(directory), arguments)
    header = ["", "seconds (median)", "of ours", "tokens sampled", "prompt tokens cached", "of later turns'"]
    ratios = {name: of.get("ratio", of["seconds"] / found[OWN]["seconds"]) for name, of in found.items()}
    rows = [
        [name, of["seconds"], ratios[name], of["tokens"], *(f"{of[key]:.0%}" if key in of else "-" for key in SHARES)]
        for name, of in found.items()
    ]
    title = f"{arguments.episodes} episodes of {TURNS} turns, mean delay {arguments.mean_s:g} s"
    publish(title, table(header, rows), "cpu", {**found, "ratios": ratios}, arguments.json)


def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds and cached shares of both ways, by their names."""
    tokenizer = bpe_tokenizer(WORDS, 400, TOOLS_TEMPLATE)
    write_tiny_model(directory / "model", TinyModelSpec(max_positions=4096), tokenizer)
    rollout = RolloutConfig(kv_cache_bytes=1 << 28, vllm={"block_size": BLOCK, "max_num_seqs": 64})
    engine = VLLMEngine(directory / "model", rollout, max_model_len=2048, device_type="cpu", dtype="float32")
    prompts = []
    for index in range(arguments.episodes // SAMPLES):
        text, ids = render_prompt(tokenizer, question(index))
        prompts.append(Prompt(index, tuple(ids), text, "", "products"))
    requests = make_requests(prompts, n=SAMPLES, step=0, seed=1, max_tokens=1024, temperature=1.0)
    plan = EpisodePlan(
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
    seconds: dict[str, list[float]] = {BARRIER: [], OWN: []}
    shares: dict[str, tuple[float, float]] = {}
    tokens: list[list[list[int]]] = []
    longest = max(len(prompt.token_ids) for prompt in prompts)
    for _ in range(arguments.repeats):
        for name, kind in ((BARRIER, WithBarrier), (OWN, EpisodeSampler)):
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
    ratio = statistics.median(slow / fast for slow, fast in zip(seconds[BARRIER], seconds[OWN], strict=True))
    return {
        name: {
            "seconds": statistics.median(of),
            "ratio": ratio if name == BARRIER else 1.0,  # of pairs: the machine may be slower in one round
            "tokens": sum(int(trajectory.loss_mask.sum()) for trajectory in found),
            "cached": shares[name][0],
            "cached_later": shares[name][1],
        }
        for name, of in seconds.items()
    }


def question(index: int) -> str:
    return f"{index}*{index + 7}=? " * 12


def peer(directory: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds in which TRL samples the episodes, once; its training step is not among them."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    mean_s = arguments.mean_s

    class TheirService:
        def reset(self, **row: Any) -> None:
            pass

        async def count(self, text: str) -> str:
            """Count characters.

            Args:
                text: what is counted.
            """
            return await counted(text, mean_s)

        def get_reward(self) -> float:
            return 1.0

    def parse(tokenizer: Any, ids: list[int], **context: Any) -> dict[str, Any]:
        call = {"name": "count", "arguments": {"text": tokenizer.decode(ids)}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}

    grpo_trainer.parse_response = parse  # every turn is a call: a model of random weights writes none
    tokenizer = bpe_tokenizer(WORDS, 400, TOOLS_TEMPLATE)
    tokenizer.response_template = {}  # TRL wants one, for the parser that is not used
    chosen = settings(
        GRPOConfig,
        directory,
        arguments.episodes,
        1e-6,
        (0.9, 0.999),
        0.0,
        num_generations=SAMPLES,
        max_completion_length=1024,
        max_tool_calling_iterations=TURNS - 1,
        temperature=1.0,
    )
    rows = [{"prompt": [{"role": "user", "content": question(i)}]} for i in range(arguments.episodes // SAMPLES)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory / "model"),
        args=chosen,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=TheirService,
    )
    trainer.generation_config.max_new_tokens = arguments.turn_tokens
    trainer.model.train()
    own_generate, measured = trainer._generate, dict[str, float]()

    def generate(prompts: list[Any]) -> Any:
        began = time.perf_counter()
        found = own_generate(prompts)
        measured["seconds"] = time.perf_counter() - began
        measured["tokens"] = sum(map(sum, found[2]))  # the mask of what the model wrote
        return found

    trainer._generate = generate
    trainer._generate_and_score_completions([row for row in rows for _ in range(SAMPLES)])
    return measured


def _share(pairs: list[tuple[int, int]]) -> float:
    return sum(hit for hit, _ in pairs) / max(1, sum(asked for _, asked in pairs))


if __name__ == "__main__":
    main()
