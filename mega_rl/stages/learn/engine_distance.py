"""How far engines are from the trainer: by engine, and by how much older the weights are that sampled the tokens.

A token of the trainer's present weights is computed twice from the same numbers. Of a token of older weights the
trainer has only its present log-probability; how far that is follows from how fast the run learns, so it is measured by
what the steps before showed of tokens as old.
Letters: T packed tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.microbatch import Microbatch
from mega_rl.types import Sample, TrajectorySummary

HISTORY = 16  # steps that the distance of the next one is measured by
# Nats per token that tokens of older weights may be away in any case, since learning is slow at first, and where no
# step before had any: about twice what runs need that are well (benchmarks.asynchronous.gate_floors).
STALE_FLOOR, FIRST_SIGHT = 0.1, 1.0
SPREAD = 4.0  # the mean of N tokens may be 1 + SPREAD / sqrt(N) times as far as that of many
BY_STALENESS = "rollout/logprob_diff_of_staleness/"  # metrics, each with a number of steps


class Group(NamedTuple):
    """Tokens that are measured as one."""

    engine: int | None  # that sampled them; None: it is not known, or several did
    staleness: int  # steps that their weights are older than those that learn from them


class Distance(NamedTuple):
    """Of some tokens."""

    total: float  # nats, sum of |trainer - engine|; infinity if a log-probability is not a number
    num_tokens: int

    @property
    def mean(self) -> float:
        return self.total / self.num_tokens


Distances = Mapping[Group, Distance]
_NO_ENGINE = -1


def added(parts: Iterable[Distances], key: Callable[[Group], Group] = lambda group: group) -> dict[Group, Distance]:
    """Several as one; ``key`` may put groups together."""
    found: defaultdict[Group, list[Distance]] = defaultdict(list)
    for part in parts:
        for group, distance in part.items():
            found[key(group)].append(distance)
    return {
        group: Distance(math.fsum(one.total for one in own), sum(one.num_tokens for one in own))
        for group, own in found.items()
    }


def to_numbers(distances: Distances) -> list[float]:
    """For other ranks."""
    return [
        number
        for (engine, staleness), one in distances.items()
        for number in (_NO_ENGINE if engine is None else engine, staleness, *one)
    ]


def of_numbers(numbers: Sequence[float]) -> dict[Group, Distance]:
    """The inverse of ``to_numbers``."""
    parts = zip(numbers[::4], numbers[1::4], numbers[2::4], numbers[3::4], strict=True)
    return {
        Group(None if engine == _NO_ENGINE else int(engine), int(age)): Distance(total, int(num_tokens))
        for engine, age, total, num_tokens in parts
    }


def staleness_T(microbatch: Microbatch, samples: Sequence[Sample], version: int, keeps_cache: bool) -> Tensor:
    """[T] int64: steps that the weights behind each learnt token are older than ``version``; -1 on all other tokens.

    Args:
        samples: by the numbers of the micro-batch's sequences.
        keeps_cache: ``rollout.kv_on_update`` is keep: a token stands on keys and values of all weights that its
            response has had, so it counts as the first one.
    """
    learnt_T = (microbatch.loss_mask != 0).cpu()
    ages_T = torch.full(learnt_T.shape, -1, dtype=torch.int64)
    for number, (start, end) in zip(
        microbatch.sequence_indices, pairwise(microbatch.cu_seqlens.tolist()), strict=False
    ):  # there may be a tail
        ages_T[start:end][learnt_T[start:end]] = _ages(samples[number].summary, version, keeps_cache)
    return ages_T


def _ages(summary: TrajectorySummary, version: int, keeps_cache: bool) -> Tensor:
    if keeps_cache or len(summary.versions) == 1:
        return torch.tensor(version - summary.oldest_version)
    return torch.from_numpy(summary.staleness(version))


def distances(
    trainer_T: Tensor, engine_T: Tensor, microbatch: Microbatch, samples: Sequence[Sample], ages_T: Tensor
) -> dict[Group, Distance]:
    """Of the learnt tokens of a micro-batch; ``ages_T`` is of ``staleness_T``."""
    gap_T = (trainer_T.detach().cpu().double() - engine_T.detach().cpu().double()).abs().nan_to_num(nan=torch.inf)
    parts: list[dict[Group, Distance]] = []
    for number, (start, end) in zip(
        microbatch.sequence_indices, pairwise(microbatch.cu_seqlens.tolist()), strict=False
    ):
        engine, ages, gaps = samples[number].summary.engine, ages_T[start:end], gap_T[start:end]
        for age in ages[ages >= 0].unique().tolist():
            own = gaps[ages == age]
            parts.append({Group(engine, age): Distance(float(own.sum()), own.numel())})
    return added(parts)


class EngineHistory:
    """How far the engine was from the trainer in the steps before: what the next step is measured by.

    The distance that noise makes grows with its standard deviation, so an earlier step is taken in proportion where
    both have noise. A step without noise says nothing about one with it.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._steps: deque[tuple[float, float]] = deque(maxlen=HISTORY)  # (mean |trainer - engine|, sigma)

    def add(self, distance: float, sigma: float) -> None:
        if math.isfinite(distance):
            self._steps.append((distance, sigma))

    def allows(self, sigma: float) -> float | None:
        """The largest distance of a step with this noise, nats per token; None: no step before can be compared."""
        bounds = [
            distance * max(1.0, self._factor * (sigma / earlier if earlier else 1.0))
            for distance, earlier in self._steps
            if earlier or not sigma
        ]
        return median(bounds) if bounds else None


class Histories:
    """One for every staleness.

    Args:
        factor: ``trainer.gates.engine_factor``.
        sigma_of: standard deviation of the noise on the weights of a version.
    """

    def __init__(self, factor: float, sigma_of: Callable[[int], float] = lambda version: 0.0) -> None:
        self.sigma_of = sigma_of
        self.fresh = EngineHistory(factor)  # of staleness 0
        self._factor = factor
        self._stale: dict[int, EngineHistory] = {}

    def add(self, version: int, staleness: int, distance: float) -> None:
        """What step ``version``, counted from 0, showed of tokens so old, at least 1."""
        history = self._stale.setdefault(staleness, EngineHistory(self._factor))
        history.add(distance, self.sigma_of(version - staleness))

    def allows(self, version: int, staleness: int) -> float:
        """The same of what it may show, nats per token; by tokens of another age where there were none of this one.

        Every step moves the weights about as far, so twice as old is at most twice as far.
        """
        known: dict[int, float] = {}
        for age, history in self._stale.items():
            if (past := history.allows(self.sigma_of(version - staleness))) is not None:
                known[age] = past
        if not known:
            return FIRST_SIGHT
        nearest = min(known, key=lambda age: (abs(age - staleness), age))
        return max(STALE_FLOOR, known[nearest] * max(1.0, staleness / nearest))


class TooFar(NamedTuple):
    """What engines may not be."""

    engine: int | None  # None: all together
    distance: Distance
    allowed: float  # nats per token

    @property
    def excess(self) -> float:
        return self.distance.mean / self.allowed if self.allowed else math.inf


def too_far(found: Distances, limits: Mapping[int, float]) -> list[TooFar]:
    """Engines whose tokens are further from the trainer than allowed, the furthest first; then all of them together.

    Args:
        limits: by staleness, nats per token; tokens of another staleness do not count.
    """
    counted = {group: distance for group, distance in found.items() if group.staleness in limits}
    known = {group.engine for group in counted}
    engines = [
        one
        for engine in known - {None}
        if (one := _beyond(engine, {g: d for g, d in counted.items() if g.engine == engine}, limits)) is not None
    ]
    stale = added([{g: d for g, d in counted.items() if g.staleness}], lambda group: Group(None, group.staleness))
    together = [one for g, d in stale.items() if (one := _beyond(None, {g: d}, limits)) is not None]
    return sorted(engines, key=lambda one: -one.excess) + sorted(together, key=lambda one: -one.excess)


def _beyond(engine: int | None, own: Distances, limits: Mapping[int, float]) -> TooFar | None:
    """Some tokens as one; few tokens may be further away by chance."""
    num_tokens = sum(distance.num_tokens for distance in own.values())
    total = math.fsum(distance.total for distance in own.values())
    limit = sum(limits[group.staleness] * distance.num_tokens for group, distance in own.items()) / num_tokens
    allowed = limit * (1 + SPREAD / math.sqrt(num_tokens))
    found = Distance(total, num_tokens)
    return None if found.mean <= allowed else TooFar(engine, found, allowed)


def staleness_figures(found: Distances) -> dict[str, float]:
    """Metrics of the tokens of every staleness, if some are older than the step."""
    merged = added([found], lambda group: Group(None, group.staleness))
    if not any(group.staleness for group in merged):
        return {}
    return {f"{BY_STALENESS}{group.staleness}": distance.mean for group, distance in sorted(merged.items())}
