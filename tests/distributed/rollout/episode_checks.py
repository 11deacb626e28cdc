"""Episodes on a started engine: the same whatever the tools' speed, as Hugging Face computes them, prefix cached."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from mega_rl.data.tokens.replies import ReplyTokens
from mega_rl.data.tokens.tokenizer import encode, load_tokenizer
from mega_rl.environments.episode import EpisodeLimits
from mega_rl.environments.protocol import End, Reply, Turn
from mega_rl.rollout.engine import Request
from mega_rl.rollout.episodes.episode_tokens import EpisodePlan
from mega_rl.rollout.episodes.episodes import EpisodeSampler
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.types import ASSISTANT, Prompt, Trajectory

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BLOCK = 128  # tokens of vLLM's prefix cache on a CPU


class Echo:
    """Says how long a turn was; ends after the third."""

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.pause = 0.0

    async def step(self, turn: Turn) -> Reply | End:
        await asyncio.sleep(self.pause)
        if turn.number == 2:
            return End(float(len(turn.text)))
        return Reply([{"role": "tool", "content": f"{len(turn.text)} characters"}])


class SlowEcho(Echo):
    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.pause = prompt.index * 0.03 + sample_index * 0.02


def episodes(
    engine: VLLMEngine, model: PreTrainedModel, path: Any, ranks: Any = None, number: int = 0, num_engines: int = 1
) -> None:
    """Three turns over two blocks of the prefix cache, on all ranks of the engine; a line tells their tokens.

    Args:
        ranks: process group of the engine's ranks, if it has several.
        number: of this engine, which has every ``num_engines``-th episode.
    """
    tokenizer = load_tokenizer(str(path))
    tokenizer.chat_template = TEMPLATE
    texts = [f"user: {str(index) * (BLOCK + 20 * index)}<eos>assistant: " for index in range(2)]
    prompts = [Prompt(index, tuple(encode(tokenizer, text)), text, "", "t") for index, text in enumerate(texts)]
    requests = make_requests(prompts, n=2, step=0, seed=5, max_tokens=160, temperature=1.0)[number::num_engines]
    first, cached = collected(engine, tokenizer, Echo, requests, ranks)
    again, _ = collected(engine, tokenizer, SlowEcho, requests, ranks)
    for one, other in zip(first, again, strict=True):  # a batch of another size rounds log-probabilities otherwise
        assert one.token_ids.tolist() == other.token_ids.tolist(), "the speed of tools changes tokens"
        assert (one.turns, one.text, one.episode) == (other.turns, other.text, other.episode)
        assert abs(one.logprobs - other.logprobs).max() < 1e-4
    for trajectory in first:
        assert len(trajectory.turns) == 6 and trajectory.episode is not None
        equals_model(trajectory, model)
    # in the order in which they end: of the first engine step on, every later turn finds the blocks of the one before
    assert len(cached) == 3 * len(requests)
    later = [(hit, asked) for hit, asked in cached if asked > max(len(prompt.token_ids) for prompt in prompts)]
    assert later and all(hit >= (asked - 40) // BLOCK * BLOCK for hit, asked in later), cached
    if ranks is None or dist.get_rank(ranks) == 0:
        tokens = {f"{one.prompt.index}/{one.sample_index}": one.token_ids.tolist() for one in first}
        os.write(sys.stdout.fileno(), f"EPISODES {json.dumps(tokens)}\n".encode())  # at once, as other ranks write too


def collected(
    engine: VLLMEngine, tokenizer: Any, make: type[Echo], requests: list[Request], ranks: Any
) -> tuple[list[Trajectory], list[tuple[int, int]]]:
    """The episodes, and of every turn how many tokens of its prompt were cached, and how many it had."""
    plan = EpisodePlan(make, ReplyTokens(tokenizer, roles=["tool"]), tokenizer, EpisodeLimits(step_timeout_s=120.0), 12)
    cached: list[tuple[int, int]] = []
    llm = engine._llm.llm_engine
    own_step = llm.step

    def step() -> Any:
        outputs = own_step()
        cached.extend((o.num_cached_tokens or 0, len(o.prompt_token_ids)) for o in outputs if o.finished)
        return outputs

    llm.step = step
    sampler = EpisodeSampler(engine, plan, ranks is None or dist.get_rank(ranks) == 0, ranks)
    try:
        return sampler.generate(requests), cached
    finally:
        llm.step = own_step
        sampler.close()


@torch.no_grad()
def equals_model(trajectory: Trajectory, model: PreTrainedModel) -> None:
    """The engine's log-probabilities of all turns are those of one pass over the whole conversation."""
    ids = torch.from_numpy(trajectory.token_ids.copy()).long()
    logprobs = model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    mask = torch.from_numpy(trajectory.loss_mask.copy())[1:]
    difference = (logprobs - torch.from_numpy(trajectory.logprobs.copy())[1:])[mask].abs().max().item()
    assert difference < 1e-4, difference
    sampled = [turn for turn in trajectory.turns if turn.role == ASSISTANT]
    assert int(mask.sum()) == sum(turn.stop - turn.start for turn in sampled)
