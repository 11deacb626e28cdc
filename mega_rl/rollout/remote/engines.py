"""Rollout engines in other processes, seen from the trainer's ranks as one sampler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch.distributed as dist

from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import broadcast_object, together, told_numbers
from mega_rl.rollout.engine import Ended, Request
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.placement import EngineGroup
from mega_rl.rollout.requests import check_length
from mega_rl.types import Trajectory

MAX_STEPS = 64  # of an engine between two words of it: so long the other ranks wait in a collective
GATHERED_S = 0.5  # what the engines end in this time, rank 0 tells the other ranks at once


class RemoteEngines:
    """A ``Sampler`` whose every method is collective over the trainer's ranks; rank 0 talks to the engines.

    Rank 0 gets the trajectories, and the others the requests that they answer. A failure of one engine is raised on
    every rank. The weights come through a ``RemoteSink``, which sets
    ``weight_version``.
    """

    def __init__(self, spec: EngineSpec, num_engines: int, picture_set: PictureSet | None = None) -> None:
        """``picture_set``: has the pictures of prompts, whose encoded bytes go with the requests; None: no pictures."""
        self._picture_set = picture_set
        self._max_model_len = spec.max_model_len
        self.collective_timeout_s = spec.collective_timeout_s
        self.weight_version = 0
        self._fleet: EngineGroup | None = None  # on rank 0 only
        self._under_way: dict[tuple[int, int], Request] = {}  # (prompt, sample) -> request without a response yet
        self._loads = [0] * num_engines  # unfinished requests of every engine; counted on rank 0 only
        self._homes: dict[tuple[int, int], int] = {}  # (prompt, sample) -> its engine; on rank 0 only
        self._submitted: dict[int, list[list[Any]]] = {}  # engine -> calls that gave it requests; on rank 0 only
        self._advancing: dict[int, list[Any]] = {}  # engine -> calls that wait for its next responses; on rank 0 only
        with together("starting the rollout engines"):
            if dist.get_rank() == 0:
                self._fleet = EngineGroup(spec, num_engines)
        self.engine_size = spec.rollout.tensor_parallel_size
        self.num_workers = num_engines * self.engine_size

    @property
    def fleet(self) -> EngineGroup | None:
        """The engines' processes, on rank 0 only."""
        return self._fleet

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check_length(request, self._max_model_len)

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def submit(self, requests: Sequence[Request]) -> None:
        self.check(requests)
        if not self._under_way and not any(request.turn for request in requests):
            self._homes.clear()  # of the step before
        self._under_way |= {(request.prompt.index, request.sample_index): request for request in requests}
        with together("submitting requests"):
            if self._fleet is not None:
                for (_, home), group in groupby(requests, key=self._prompt_and_home):
                    part = list(group)
                    engine = min(range(len(self._loads)), key=self._loads.__getitem__) if home is None else home
                    self._loads[engine] += len(part)
                    self._homes |= {(request.prompt.index, request.sample_index): engine for request in part}
                    calls = self._fleet.submit_to(engine, "submit", part, *self._shown(self._fleet, part))
                    self._submitted.setdefault(engine, []).append(calls)

    def _shown(self, fleet: EngineGroup, requests: Sequence[Request]) -> list[Any]:
        """The pictures of requests, as an argument of a call; none if the prompts have none."""
        if self._picture_set is None:
            return []
        found = self._picture_set.encoded(request.prompt for request in requests)
        return [fleet.shared(found)] if found else []

    def _prompt_and_home(self, request: Request) -> tuple[int, int | None]:
        """The engine is the one that sampled the turn before; None: any engine may take the request."""
        key = request.prompt.index, request.sample_index
        return request.prompt.index, self._homes.get(key) if request.turn else None

    def step(self) -> Sequence[Ended]:
        """What the engines have ended until ``GATHERED_S`` after the first of them answered, or until nothing is left.

        All of them sample on meanwhile. So the other ranks are told a few times a second, however many engines there
        are and however many responses end.
        """
        trajectories: list[Trajectory] = []
        with together("sampling"):
            if self._fleet is not None and self._under_way:
                trajectories = self._gathered(self._fleet)
        return self._told(trajectories)

    def _gathered(self, fleet: EngineGroup) -> list[Trajectory]:
        """On rank 0 only."""
        found: list[Trajectory] = []
        until: float | None = None  # an engine answers
        while any(self._loads):
            for engine, load in enumerate(self._loads):
                if load and engine not in self._advancing:
                    self._advancing[engine] = fleet.submit_to(engine, "advance", MAX_STEPS)
            done = fleet.first_done(self._advancing, None if until is None else max(0.0, until - time.monotonic()))
            if done is None:
                break
            found += self._advanced(fleet, done)
            until = time.monotonic() + GATHERED_S if until is None else until
        return found

    def _advanced(self, fleet: EngineGroup, engine: int) -> list[Trajectory]:
        """What an engine that was asked to advance has ended; on rank 0 only."""
        calls, first_worker = self._advancing.pop(engine), engine * fleet.engine_size
        for taken in self._submitted.pop(engine, []):  # which have ended before
            fleet.results(taken, "taking requests", first_worker=first_worker)
        ended: list[Trajectory] = fleet.results(calls, "sampling", first_worker=first_worker)[0]
        HEART.mark()
        self._loads[engine] -= len(ended)
        return [self._named(trajectory, engine) for trajectory in ended]

    def _named(self, trajectory: Trajectory, engine: int) -> Trajectory:
        """With the engine that sampled it, if it was one alone."""
        request = self._under_way[trajectory.prompt.index, trajectory.sample_index]
        return trajectory if request.tail is not None else replace(trajectory, engine=engine)

    def _told(self, trajectories: list[Trajectory]) -> Sequence[Ended]:
        """What rank 0 has got, and on the others the requests that it answers. Collective."""
        own = [number for t in trajectories for number in (t.prompt.index, t.sample_index)]
        numbers = [int(number) for number in told_numbers(own)]
        answered = [self._under_way.pop(key) for key in zip(numbers[::2], numbers[1::2], strict=True)]
        return answered if self._fleet is None else trajectories

    def interrupt(self) -> tuple[Sequence[Ended], Sequence[Request]]:
        """As of ``ResumingSampler``; an engine stops where the call to advance ends that it has."""
        trajectories: list[Trajectory] = []
        stopped: dict[tuple[int, int], Request] = {}
        with together("stopping the rollout engines"):
            if (fleet := self._fleet) is not None:
                for engine in sorted(self._advancing):
                    trajectories += self._advanced(fleet, engine)
                busy = [engine for engine, load in enumerate(self._loads) if load]
                asked = {engine: fleet.submit_to(engine, "interrupt") for engine in busy}
                for engine, calls in asked.items():
                    for taken in self._submitted.pop(engine, []):
                        fleet.results(taken, "taking requests", first_worker=engine * fleet.engine_size)
                    found = fleet.results(calls, "stopping", first_worker=engine * fleet.engine_size)[0]
                    stopped |= {(request.prompt.index, request.sample_index): request for request in found}
                    self._loads[engine] = 0
        ended = self._told(trajectories)
        rest = list(self._under_way)
        assert self._fleet is None or stopped.keys() == set(rest), "an engine has lost a response"
        requests = [stopped.get(key, self._under_way.pop(key)) for key in rest]
        return ended, requests

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        """As of ``Probed``, on rank 0; nothing on the others."""
        found: list[dict[int, float]] = []
        with together("probing the rollout engines"):
            if self._fleet is not None:
                calls = [(prompt_ids, temperature, with_adapter)] * self.num_workers
                answers = self._fleet.call("first_logprobs", calls, "answering a probe")
                found = [of_engine for answer in answers[:: self.engine_size] for of_engine in answer]
        return found

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """As ``Sampler.generate``; unlike after ``step`` every rank has the trajectories, so it is for few of them."""
        assert not self._under_way, "generation while other responses are under way"
        self.submit(requests)
        found: dict[tuple[int, int], Trajectory] = {}
        while self._under_way:
            ended = self.step()
            found |= {(t.prompt.index, t.sample_index): t for t in ended if isinstance(t, Trajectory)}
        found = broadcast_object(found)
        return [found[request.prompt.index, request.sample_index] for request in requests]
