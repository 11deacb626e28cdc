"""An engine without a model: what it samples follows from the tokens that it is given and the seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from mega_rl.rollout.engine import Request
from mega_rl.types import Trajectory

LETTERS = [*range(35, 90)]  # of a byte-level vocabulary behind three special tokens


class Modelless:
    """What a ``ProbedSampler`` without a model has whatever it samples."""

    def __init__(self) -> None:
        self._under_way: list[Any] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def check(self, requests: Sequence[Request]) -> None:
        """Everything fits."""

    def first_logprobs(self, prompt_ids: Sequence[int], temperature: float) -> list[dict[int, float]]:
        return []


class ScriptedEngine(Modelless):
    """A ``ProbedSampler`` that ends what is under way in a random order, at most ``pace`` in a step."""

    weight_version = 7

    def __init__(self, tokenizer: PreTrainedTokenizerFast, order: int = 0, pace: int = 3) -> None:
        super().__init__()
        self.tokenizer, self.order, self.pace = tokenizer, random.Random(order), pace
        self.requests: list[Request] = []  # all that were submitted
        self.num_idle_steps = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self._under_way += requests

    def step(self) -> list[Trajectory]:
        self.num_idle_steps += not self._under_way
        self.order.shuffle(self._under_way)
        ended, self._under_way = self._under_way[: self.pace], self._under_way[self.pace :]
        return [self.answer(request) for request in ended]

    def abandon(self) -> None:
        self._under_way = []

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Trajectory:
        key = f"{request.seed}|{request.prompt.token_ids}"
        chance = random.Random(hashlib.blake2b(key.encode(), digest_size=8).digest())
        ids = [chance.choice(LETTERS) for _ in range(chance.randint(1, 12))] + [self.tokenizer.eos_token_id]
        kept = ids[: request.max_tokens]
        return Trajectory.single_turn(
            request.prompt,
            request.sample_index,
            kept,
            [-chance.random() - 0.01 for _ in kept],
            self.tokenizer.decode(kept, skip_special_tokens=True),
            "stop" if len(kept) == len(ids) else "length",
            self.weight_version,
        )
