"""Rollout engines in other processes, seen from the trainer's ranks as one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.reshard.execute import Ledger, Read, Transfer, Write
from mega_rl.bridge.reshard.plan import Layout, compile_plan
from mega_rl.errors import InputError
from mega_rl.parallel.collectives import broadcast_object, together
from mega_rl.parallel.joint_group import join_group, open_meeting
from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.placement import Fleet
from mega_rl.rollout.remote.receiver import Link
from mega_rl.rollout.replicas import split_requests
from mega_rl.rollout.requests import check_length
from mega_rl.types import Trajectory


class RemoteEngines:
    """A ``RolloutEngine`` whose every method is collective over the trainer's ranks; rank 0 talks to the engines.

    A failure of one engine is raised on every rank. The engines have devices of their own, so they do not sleep.
    """

    def __init__(self, spec: EngineSpec, num_engines: int) -> None:
        self._max_model_len = spec.max_model_len
        self._version = 0
        self._fleet: Fleet | None = None  # on rank 0 alone
        self._num_unfinished = 0
        self._loads = [0] * num_engines  # unfinished requests of every engine; counted on rank 0 alone
        self._advancing: dict[int, list[Any]] = {}  # engine -> calls that wait for its next responses; on rank 0 alone
        self._under_way: list[Any] = []  # what the workers are doing during a transfer; on rank 0 alone
        with together("starting the rollout engines"):
            if dist.get_rank() == 0:
                self._fleet = Fleet(spec, num_engines)
        self.num_workers = num_engines * spec.rollout.tensor_parallel_size

    @property
    def weight_version(self) -> int:
        return self._version

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check_length(request, self._max_model_len)

    @property
    def num_unfinished(self) -> int:
        return self._num_unfinished

    def submit(self, requests: Sequence[Request]) -> None:
        self.check(requests)
        self._num_unfinished += len(requests)
        with together("submitting requests"):
            if self._fleet is not None:
                for _, group in groupby(requests, key=lambda request: request.prompt.index):
                    part = list(group)
                    engine = min(range(len(self._loads)), key=self._loads.__getitem__)
                    self._loads[engine] += len(part)
                    self._fleet.submit_to(engine, "submit", part)

    def step(self) -> list[Trajectory]:
        """What the first engine ends that ends anything; the others sample on meanwhile."""
        trajectories: list[Trajectory] = []
        with together("sampling"):
            if self._fleet is not None and self._num_unfinished:
                for engine, load in enumerate(self._loads):
                    if load and engine not in self._advancing:
                        self._advancing[engine] = self._fleet.submit_to(engine, "advance")
                engine = self._fleet.first_done(self._advancing)
                calls, first_worker = self._advancing.pop(engine), engine * self._fleet.engine_size
                trajectories = self._fleet.results(calls, "sampling", first_worker=first_worker)[0]
                self._loads[engine] -= len(trajectories)
        trajectories = broadcast_object(trajectories)
        self._num_unfinished -= len(trajectories)
        return trajectories

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        self.check(requests)
        trajectories: list[Trajectory] = []
        with together("sampling"):
            if self._fleet is not None:
                size = self._fleet.engine_size
                parts = split_requests(requests, self._fleet.num_engines)
                arguments = [(parts[worker // size],) for worker in range(self.num_workers)]
                answers = self._fleet.call("generate", arguments, "sampling")
                trajectories = [trajectory for answer in answers[::size] for trajectory in answer]
        return broadcast_object(trajectories)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Empty: no parameter of these engines lies in this process."""
        return {}

    def inspect(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What ``function(live parameters, *arguments[worker])`` returns in every worker; the same on every rank."""
        answers: list[Any] = []
        with together("inspecting the rollout engines"):
            if self._fleet is not None:
                calls = [(function, *of_worker) for of_worker in arguments]
                answers = self._fleet.call("inspect", calls, "inspected")
        return broadcast_object(answers)

    def parameter_shapes(self) -> list[dict[str, torch.Tensor]]:
        """The parameters of every worker, as tensors on the meta device."""
        return self.inspect(_without_contents, self._same())

    def connect(
        self,
        sources: Layout,
        wanted: Layout,
        dtype: torch.dtype,
        bucket_bytes: int,
        device: torch.device,
    ) -> Transfer:
        """Join trainer ranks and engine workers in one group, for all syncs to come.

        Args:
            sources: what every trainer rank holds.
            wanted: what every tensor-parallel worker of an engine wants; the same for every engine.
            dtype: of the engines' parameters.
            device: of this rank.

        Returns:
            This rank's part in the plan from the trainer ranks, numbered first, to the workers. It is run between
            ``begin_update`` and ``finish_update``.
        """
        here, rank, num_trainers = platform.current(), dist.get_rank(), dist.get_world_size()
        world_size = num_trainers + self.num_workers
        held: Layout = [*sources, *([] for _ in range(self.num_workers))]
        of_workers = [wanted[worker % len(wanted)] for worker in range(self.num_workers)]
        destinations: Layout = [*([] for _ in range(num_trainers)), *of_workers]
        point = store = None
        with together("opening the group of trainer and engines"):
            if self._fleet is not None:
                point, store = open_meeting(self._fleet.host, here.backend, world_size)
        point = broadcast_object(point)
        joining = []
        if self._fleet is not None:
            links = [
                (Link(point, num_trainers + worker, held, destinations, dtype, bucket_bytes),)
                for worker in range(self.num_workers)
            ]
            joining = self._fleet.submit("connect", links)
        group = join_group(point, rank, store)
        with together("joining trainer and engines"):
            if self._fleet is not None:
                self._fleet.results(joining, "joining the trainer")
        plan = compile_plan(held, destinations)
        return _WatchedTransfer(self, plan, rank, world_size, group, bucket_bytes, device)

    def begin_update(self) -> None:
        """Make the workers wait for the transfer, which the trainer's ranks must run next."""
        with together("receiving weights"):
            if self._fleet is not None:
                self._fleet.call("process_id", self._same(), "receiving weights")  # before anyone waits for a dead one
                self._under_way = self._fleet.submit("receive", self._same())

    def load_hf_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise InputError("rollout.placement=separate takes weights shard to shard: set rollout.weight_update=live.")

    def finish_update(self, version: int) -> None:
        with together("finishing the weight update"):
            if self._fleet is not None:
                self._fleet.results(self._under_way, "receiving weights")
                self._under_way = []
                self._fleet.call("finish_update", [(version,)] * self.num_workers, "finishing the weight update")
        self._version = version

    def raise_death(self) -> None:
        """RuntimeError that names the engine where one has died; returns where none is known to have, or not here."""
        if self._fleet is not None:
            self._fleet.raise_death("exchanging weights")

    def sleep(self) -> None:
        """Nothing: the memory of these engines is nobody else's."""

    def wake_up(self) -> None:
        """Nothing, as ``sleep``."""

    def _same(self) -> list[tuple[()]]:
        """The arguments of a call that takes none, for every worker."""
        return [()] * self.num_workers


def _without_contents(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}


class _WatchedTransfer(Transfer):
    """A transfer to engines whose death is said in words, where the collective only says that a connection broke."""

    def __init__(self, engines: RemoteEngines, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._engines = engines

    def run(self, read: Read, write: Write, dtype: torch.dtype) -> Ledger:
        try:
            return super().run(read, write, dtype)
        except RuntimeError as error:
            self._engines.raise_death()
            raise RuntimeError(f"the weights could not be sent to the rollout engines: {error}") from error
