"""Weights into rollout engines in other processes, over one group of trainer ranks and engine workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.mapping.live_check import difference
from mega_rl.bridge.reshard.execute import Read, Transfer, TransferCount
from mega_rl.bridge.reshard.plan import Layout, compile_plan
from mega_rl.bridge.reshard.proof import LoadProof
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Box
from mega_rl.errors import InputError
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import broadcast_object, together
from mega_rl.parallel.joint_group import join_group, open_meeting
from mega_rl.rollout.receiver import Link
from mega_rl.rollout.remote.engines import RemoteEngines
from mega_rl.rollout.sinks import SentWeights, refused_live
from mega_rl.rollout.transfers import Transfers


class RemoteSink:
    """A ``WeightSink``: every worker writes what it receives into its live parameters.

    A failure of one engine is raised on every rank.
    """

    keeps_versions = False

    def __init__(self, engines: RemoteEngines, weights: SentWeights) -> None:
        self._engines, self._weights = engines, weights
        self._transfers: Transfers | None = None
        self._under_way: list[Any] = []  # what the workers are doing during a transfer; on rank 0 only

    @property
    def weight_version(self) -> int:
        return self._engines.weight_version

    def inspect(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
        """What ``function(live parameters, *arguments[worker])`` returns in every worker; all of it on rank 0."""
        answers: list[Any] = []
        with together("inspecting the rollout engines"):
            if self._engines.fleet is not None:
                calls = [(function, *of_worker) for of_worker in arguments]
                answers = self._engines.fleet.call("inspect", calls, "inspected")
        return dict(enumerate(answers))

    def layout(self) -> list[list[Series]]:
        size = self._engines.engine_size
        return [self._weights.worker_layout(size, worker % size) for worker in range(self._engines.num_workers)]

    def obstacle(self, load: LoadProof) -> str | None:
        """What cannot be written in any worker, in words that follow "cannot write"; None if all can be. Collective."""
        shapes, layout, dtype = self.inspect(_without_contents, self._same()), self.layout(), self._weights.dtype
        with together("matching the engines' parameters"):
            found = (difference(parameters, slices_of(layout[worker]), dtype) for worker, parameters in shapes.items())
            own = next((words for words in found if words), None)
        words: str | None = broadcast_object(own)
        return words or load.difference(self.inspect, self._engines.num_workers)

    def connect(self, sources: Layout) -> None:
        """Join trainer ranks and engine workers in one group, the trainer's first, and plan all syncs to come."""
        here, rank, num_trainers = platform.current(), dist.get_rank(), dist.get_world_size()
        wanted, weights, fleet = self.layout(), self._weights, self._engines.fleet
        world_size = num_trainers + len(wanted)
        held: Layout = [*sources, *([] for _ in wanted)]
        destinations: list[list[Series]] = [*([] for _ in range(num_trainers)), *wanted]
        settings = weights.dtype, weights.bucket_bytes, weights.changing
        point = store = None
        with together("opening the group of trainer and engines"):
            if fleet is not None:
                point, store = open_meeting(fleet.host, here.backend, world_size, self._engines.collective_timeout_s)
        point = broadcast_object(point)
        joining = []
        if fleet is not None:
            links = [
                (Link(point, num_trainers + worker, held, destinations, *settings),) for worker in range(len(wanted))
            ]
            joining = fleet.submit("connect", links)
        group = join_group(point, rank, store)
        with together("joining trainer and engines"):
            if fleet is not None:
                fleet.results(joining, "joining the trainer")

        def part(destinations: Layout) -> Transfer:
            plan = compile_plan(held, destinations)
            return Transfer(plan, rank, world_size, group, weights.bucket_bytes, weights.device, here.synchronize)

        self._transfers = Transfers(destinations, weights.changing, part)

    def update(self, read: Read, version: int, is_validation: bool = False) -> TransferCount:
        self._begin()
        with torch.no_grad():
            transfer_count = self._send(read)
        self._finish(version)
        return transfer_count

    def begin_sampling(self) -> None:
        """Do nothing: these engines are awake."""

    def make_room(self) -> None:
        """Do nothing: these engines have devices of their own."""

    def _begin(self) -> None:
        """Make the workers wait for the transfer, which the trainer's ranks must run next."""
        with together("receiving weights"):
            if (fleet := self._engines.fleet) is not None:
                fleet.call("process_id", self._same(), "receiving weights")  # finds a dead worker before ranks wait
                self._under_way = fleet.submit("receive", self._same())

    def _send(self, read: Read) -> TransferCount:
        """Run this rank's part of the transfer.

        The collective only says that a connection broke, so the error names the worker whose process is gone.
        """
        assert self._transfers is not None, "an update before connect"
        try:
            with HEART.waiting("the rollout engines, taking weights", is_for_ranks=False):
                return self._transfers.next().run(read, _write_nothing, self._weights.dtype)
        except RuntimeError as error:
            if self._engines.fleet is not None:
                self._engines.fleet.raise_death("exchanging weights")
            raise RuntimeError(f"the weights could not be sent to the rollout engines: {error}") from error

    def _finish(self, version: int) -> None:
        with together("finishing the weight update"):
            if (fleet := self._engines.fleet) is not None:
                fleet.results(self._under_way, "receiving weights")
                self._under_way = []
                fleet.call("finish_update", [(version,)] * self._engines.num_workers, "finishing the weight update")
        self._engines.weight_version = version

    def _same(self) -> list[tuple[()]]:
        """The arguments of a call that takes none, for every worker."""
        return [()] * self._engines.num_workers


def remote_layout(weights: SentWeights, engine_size: int, num_workers: int) -> list[list[Series]]:
    """What every worker of engines in other processes loads, [worker] -> its series."""
    return [weights.loaded_layout(engine_size, worker % engine_size) for worker in range(num_workers)]


def remote_sink(engines: RemoteEngines, weights: SentWeights, load: LoadProof, weight_update: str) -> RemoteSink:
    """The only sink for engines in other processes; collective.

    Args:
        load: compares what the engines have loaded.
        weight_update: ``rollout.weight_update``: live or auto.

    Raises:
        InputError: on every rank, if the engines' parameters differ from the model family's mapping.
    """
    sink = RemoteSink(engines, weights)
    reason = sink.obstacle(load)
    if reason is None:
        return sink
    if weight_update == "live":
        raise refused_live(reason)
    raise InputError(f"rollout.placement=separate cannot write {reason}: set rollout.placement=colocated")


def _without_contents(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}


def _write_nothing(local_name: str, hf_name: str, hf_box: Box, local_box: Box, piece: torch.Tensor) -> None:
    raise AssertionError(f"a trainer rank was sent {hf_name}")
