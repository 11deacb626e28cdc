"""An engine without a model whose responses can be taken out and gone on with; a token follows from all before it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from mega_rl.rollout.engine import Request
from mega_rl.rollout.requests import joined, resumed
from mega_rl.types import Trajectory
from tests.pretended.samplers import Modelless
from tests.pretended.tokens import number

END = 0  # the token that ends a response


def next_token(before: Sequence[int], seed: int, version: int, odds: int) -> int:
    """Of a response of about ``odds`` tokens."""
    found = number(list(before), seed, version)
    return END if found % odds == 0 else 1 + found % 97


def logprob(before: Sequence[int], version: int) -> float:
    return -(number(list(before), version) % 1000 + 1) / 1000


def decoded(token_ids: Sequence[int]) -> str:
    return "".join(chr(32 + token) for token in token_ids)


@dataclass
class _UnderWay:
    request: Request
    asked: Request  # what is left of it
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def trajectory(self, finish_reason: str, version: int) -> Trajectory:
        text = decoded(self.token_ids[: len(self.token_ids) - (finish_reason == "stop")])
        asked, ids, logprobs = self.asked, self.token_ids, self.logprobs
        rest = Trajectory.single_turn(asked.prompt, asked.sample_index, ids, logprobs, text, finish_reason, version)
        return joined(self.request.tail, rest, decoded)


class TailingEngine(Modelless):
    """A ``ResumingSampler``: in every step each response gets a token with a chance of one half, in a random order."""

    def __init__(self, order: int, odds: int = 8) -> None:
        super().__init__()
        self.weight_version, self._order, self._odds = 0, order, odds
        self._chance = random.Random(order)
        self.submitted: list[tuple[int, int]] = []
        self.num_interrupts = 0

    def submit(self, requests: Sequence[Request]) -> None:
        if not self._under_way:  # as an engine's batches, which do not depend on those of earlier steps
            self._chance = random.Random(f"{self._order}|{self.weight_version}")
        for request in requests:
            assert request.tail is None or request.tail.num_sampled < request.max_tokens
            self._under_way.append(_UnderWay(request, resumed(request)))
            self.submitted.append((request.prompt.index, request.sample_index))

    def step(self) -> list[Trajectory]:
        ended = []
        for one in list(self._under_way):
            if self._chance.random() < 0.5:
                continue
            before = [*one.asked.prompt.token_ids, *one.token_ids]
            token = next_token(before, one.asked.seed, self.weight_version, self._odds)
            one.token_ids.append(token)
            one.logprobs.append(logprob(before, self.weight_version))
            if token == END or len(one.token_ids) == one.asked.max_tokens:
                ended.append(one.trajectory("stop" if token == END else "length", self.weight_version))
                self._under_way.remove(one)
        self._chance.shuffle(ended)
        return ended

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        assert not self._under_way
        self.submit(requests)
        found: list[Trajectory] = []
        while self._under_way:
            found += self.step()
        return sorted(found, key=lambda t: (t.prompt.index, t.sample_index))

    def interrupt(self) -> tuple[list[Trajectory], list[Request]]:
        taken, self._under_way = self._under_way, []
        self.num_interrupts += 1
        found = []
        for one in taken:
            tail = one.trajectory("abort", self.weight_version) if one.token_ids else one.request.tail
            found.append(Request(**{**one.request.__dict__, "tail": tail}))
        return [], found


def check_whole(trajectory: Trajectory, max_tokens: int) -> None:
    """Every token is the one that its version makes of those before it, and none is missing or doubled."""
    ids, num_prompt = trajectory.token_ids.tolist(), len(trajectory.prompt.token_ids)
    assert trajectory.loss_mask.tolist() == [place >= num_prompt for place in range(len(ids))]
    bounds = [*(span.start for span in trajectory.spans), len(ids)]
    assert all(a.version < b.version for a, b in pairwise(trajectory.spans))
    for span, (start, stop) in zip(trajectory.spans, pairwise(bounds), strict=True):
        for place in range(start, stop):
            assert trajectory.logprobs[place] == np.float32(logprob(ids[:place], span.version)), (place, trajectory)
    response = ids[num_prompt:]
    assert END not in response[:-1] and len(response) <= max_tokens
    assert trajectory.finish_reason == ("stop" if response[-1] == END else "length")
    assert trajectory.finish_reason == "stop" or len(response) == max_tokens
    assert trajectory.text == decoded(response[: len(response) - (trajectory.finish_reason == "stop")])
