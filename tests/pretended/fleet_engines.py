"""Engines of a fleet that sample in no time: what comes next of what they do is drawn, deaths included."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mega_rl.fleet import events
from mega_rl.fleet.executor import Requests, Whereabouts
from mega_rl.rollout.collect.handed_trajectories import OwnerAddress, hand_over
from mega_rl.rollout.partial import PartialResponse
from mega_rl.types import HandedTrajectory
from tests.pretended.samplers import Weights
from tests.pretended.tokens import Response


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
        self,
        requests: Requests,
        weights: Weights,
        is_pinned: bool,
        seed: int = 0,
        death: int = 0,
        room: int = 0,
    ) -> None:
        """``room``: for so many engines more."""
        self.owners: Sequence[OwnerAddress] = ()  # to whom responses are handed
        self.num_handed: Counter[int] = Counter()  # by owner
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
                engine.under_way[decision.attempt, sample] = Response.of(
                    request, decision.key.step, prefix and prefix.trajectory()
                )

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
                told = hand_over(found, self.owners, response.step, attempt, sample)
                if isinstance(told, HandedTrajectory):
                    self.num_handed[told.summary.owner] += 1
                self._said.append(events.Answered(name, engine.life, attempt, sample, oldest, told))
            elif not self._is_pinned:
                so_far = PartialResponse.of(response.trajectory(""))
                self._said.append(events.Advanced(name, engine.life, attempt, sample, so_far))

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
