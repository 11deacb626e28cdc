"""Engines of a fleet that sample in no time: what comes next of what they do is drawn, deaths included.

A token is a hash of its response's seed, its place and the weights that sample it, so that runs have the same tokens
only if every token was sampled with the same weights for the same response.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mega_rl.fleet import events
from mega_rl.fleet.executor import Requests, Whereabouts
from mega_rl.rollout.engine import Request
from mega_rl.types import (
    ASSISTANT,
    PROMPT,
    Span,
    Trajectory,
    TurnSpan,
)

FIRST_ID = 4  # of ten tokens of any model
Weights = Callable[[int], object]  # version -> what tells its weights from others


def number(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def length(request: Request) -> int:
    return 2 + number(request.seed, "length") % (request.max_tokens - 1)


@dataclass
class Response:
    """A response under way."""

    request: Request
    step: int  # that learns from it
    tokens: list[tuple[int, float, int]] = field(default_factory=list)  # id, log-probability, version

    def may_advance(self, version: int, is_pinned: bool) -> bool:  # is_pinned: or nothing newer will come
        """Unpinned ones wait for the last weights that they may have before their last token, so all are mixed."""
        return is_pinned or version >= self.step or len(self.tokens) < length(self.request) - 1

    @property
    def has_ended(self) -> bool:
        return len(self.tokens) == length(self.request)

    def advance(self, version: int, weights: object) -> None:
        found = number(self.request.seed, len(self.tokens), weights)
        self.tokens.append((FIRST_ID + found % 10, -2.0 - found % 97 / 97, version))

    def trajectory(self, finish_reason: str = "stop") -> Trajectory:
        """All tokens so far; of an ended response with its text, ten digits by the tokens."""
        ids, logprobs, versions = zip(*self.tokens, strict=True)
        text = "".join(str(token - FIRST_ID) for token in ids) if self.has_ended else ""
        prompt = self.request.prompt
        whole = Trajectory.single_turn(prompt, self.request.sample_index, ids, logprobs, text, finish_reason, 0)
        start = len(prompt.token_ids)
        changes = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
        return replace(whole, spans=tuple(Span(start + i, versions[i]) for i in changes))

    @classmethod
    def of(cls, request: Request, step: int, prefix: Trajectory | None) -> Response:
        if prefix is None:
            return cls(request, step)
        start = len(request.prompt.token_ids)
        assert prefix.turns == (TurnSpan(PROMPT, 0, start), TurnSpan(ASSISTANT, start, len(prefix.token_ids)))
        versions = np.repeat(*np.array(prefix.summary().versions).T).tolist()
        pairs = zip(prefix.sampled_ids.tolist(), prefix.sampled_logprobs.tolist(), versions, strict=True)
        return cls(request, step, list(pairs))


@dataclass
class Engine:
    life: int
    version: int = -1
    loading: int | None = None
    under_way: dict[tuple[int, int], Response] = field(default_factory=dict)  # (attempt, sample)


class PretendedExecutor:
    """A ``FleetExecutor``; ``death``: how likely one of its engines dies, of 1,000 times it is asked for events."""

    num_survivors = 0  # as of ``RayExecutor``

    def __init__(
        self, requests: Requests, weights: Weights, is_pinned: bool, seed: int = 0, death: int = 0, room: int = 0
    ) -> None:
        """``room``: for so many engines more."""
        self._requests, self._weights, self._is_pinned, self._death = requests, weights, is_pinned, death
        self.is_validating = False  # from then on responses end without newer weights, for which the trainer may wait
        self._random = random.Random(seed)
        self._engines: dict[int, Engine] = {}
        self._said: list[events.Event] = []
        self.num_deaths = self.num_issued = self.num_released = 0
        self.room = room
        self._reserved: set[int] = set()
        self.is_closed = False

    def carry(self, decision: events.Start | events.Kill | events.Release | events.Load | events.Issue) -> None:
        if isinstance(decision, events.Release):
            self.num_released += 1
            self.room += 1
            self._reserved.discard(decision.engine)
            return
        if isinstance(decision, events.Start):
            self._engines[decision.engine] = Engine(decision.life)
            self._said.append(events.Started(decision.engine, decision.life))
            return
        engine = self._engines.get(decision.engine)
        if engine is None or engine.life != decision.life:
            return
        if isinstance(decision, events.Kill):
            del self._engines[decision.engine]
        elif isinstance(decision, events.Load):
            engine.loading = decision.version
        else:
            self.num_issued += len(decision.samples)
            made = self._requests(decision.key, decision.samples)
            for sample, request, prefix in zip(decision.samples, made, decision.prefixes, strict=True):
                engine.under_way[decision.attempt, sample] = Response.of(request, decision.key.step, prefix)

    def events(self, wait_s: float) -> list[events.Event]:
        if self._engines and self._random.randrange(1000) < self._death:
            name = self._random.choice(sorted(self._engines))
            self._said.append(events.Died(name, self._engines.pop(name).life, "it was killed"))
            self.num_deaths += 1
        for name, engine in self._engines.items():
            if self._random.random() < 0.5:
                self._step(name, engine)
        said, self._said = self._said, []
        if not said:
            time.sleep(min(wait_s, 0.001))
        return said

    def _step(self, name: int, engine: Engine) -> None:
        if engine.loading is not None and (not engine.under_way or self._random.random() < 0.5):
            is_pinned = self._is_pinned or any(response.step < 0 for response in engine.under_way.values())
            assert not (is_pinned and engine.under_way), "weights change under a pinned ticket"
            assert engine.loading >= 0 or not engine.under_way, "training goes on with the weights of validation"
            engine.version, engine.loading = engine.loading, None
            self._said.append(events.Loaded(name, engine.life, engine.version))
        for (attempt, sample), response in list(engine.under_way.items()):
            if self._random.random() < 0.5:
                continue
            if not response.has_ended:
                if not response.may_advance(engine.version, self._is_pinned or self.is_validating):
                    continue
                response.advance(engine.version, self._weights(engine.version))
            if response.has_ended:
                del engine.under_way[attempt, sample]
                found = response.trajectory()
                oldest = found.spans[0].version
                self._said.append(events.Answered(name, engine.life, attempt, sample, oldest, found))
            elif not self._is_pinned:
                self._said.append(events.Advanced(name, engine.life, attempt, sample, response.trajectory("")))

    def has_begun(self, step: int) -> bool:
        """Whether an engine has tokens of a response of this step; called by any thread."""
        under_way = [
            response for engine in list(self._engines.values()) for response in list(engine.under_way.values())
        ]
        return any(response.step == step and response.tokens for response in under_way)

    def reserve(self, engine: int) -> None:
        self.room -= 1
        if self.room >= 0:
            self._reserved.add(engine)

    def has_room(self, engine: int) -> bool:
        return engine in self._reserved

    def free(self) -> str:
        return f"there is room for {self.room} engines"

    def whereabouts(self) -> dict[int, Whereabouts]:
        return {name: Whereabouts("here", (1000 + name,)) for name in self._engines}

    def close(self) -> None:
        self._engines.clear()
        self.is_closed = True


class PretendedSampler:
    """A ``Sampler`` of the same tokens, all at once."""

    def __init__(self, weights: Weights) -> None:
        self.weight_version, self._weights = 0, weights
        self._under_way: list[Request] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def check(self, requests: Sequence[Request]) -> None:
        pass

    def submit(self, requests: Sequence[Request]) -> None:
        self._under_way += requests

    def step(self) -> list[Trajectory]:
        requests, self._under_way = self._under_way, []
        return self.generate(requests)

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        responses = [Response(request, self.weight_version) for request in requests]
        for response in responses:
            while not response.has_ended:
                response.advance(self.weight_version, self._weights(self.weight_version))
        return [response.trajectory() for response in responses]

    def first_logprobs(self, prompt_ids: Sequence[int], temperature: float) -> list[dict[int, float]]:
        return []
