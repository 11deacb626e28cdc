"""Samplers without a model: what they have in common, and those that need no more than to say what they answer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from mega_rl.rollout.engine import Request
from mega_rl.types import Trajectory
from tests.pretended.tokens import Response, first_logprobs

LETTERS = [*range(35, 90)]  # of a byte-level vocabulary behind three special tokens
Weights = Callable[[int], object]  # version -> what tells its weights from others


class Modelless:
    """A ``ProbedSampler`` that answers all that is under way in one step, each request with one token."""

    weight_version = 0

    def __init__(self) -> None:
        self.requests: list[Request] = []  # all that were submitted
        self._under_way: list[Any] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def check(self, requests: Sequence[Request]) -> None:
        """Everything fits."""

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self._under_way += requests

    def step(self) -> list[Trajectory]:
        ended, self._under_way = self._under_way, []
        return self.generate(ended)

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Trajectory:
        return answered(request, [1], [0.0], "", self.weight_version)

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        return [first_logprobs(self.weight_version if with_adapter else None, prompt_ids, temperature)]

    def abandon(self) -> None:
        self._under_way = []


def answered(request: Request, ids: list[int], logprobs: list[float], text: str, version: int) -> Trajectory:
    return Trajectory.single_turn(request.prompt, request.sample_index, ids, logprobs, text, "stop", version)


class Unordered(Modelless):
    """Ends what is under way in a random order, at most ``pace`` in a step."""

    def __init__(self, order: int, pace: int) -> None:
        super().__init__()
        self.order, self.pace = random.Random(order), pace

    def step(self) -> list[Trajectory]:
        self.order.shuffle(self._under_way)
        ended, self._under_way = self._under_way[: self.pace], self._under_way[self.pace :]
        return self.generate(ended)


class ScriptedEngine(Unordered):
    """What it samples follows from the tokens that it is given and the seed."""

    weight_version = 7
    num_slots = 256  # as of an engine of a fleet

    def __init__(self, tokenizer: PreTrainedTokenizerFast, order: int = 0, pace: int = 3) -> None:
        super().__init__(order, pace)
        self.tokenizer, self.num_idle_steps = tokenizer, 0

    def step(self) -> list[Trajectory]:
        self.num_idle_steps += not self._under_way
        return super().step()

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


class PretendedSampler(Modelless):
    """The tokens of the engines of a fleet, all at once."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._weights = weights

    def answer(self, request: Request) -> Trajectory:
        version = self.weight_version
        return Response(request, version).to_its_end(version, self._weights(version))
