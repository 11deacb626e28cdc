"""The receiving end of a weight sync between processes: what an engine worker does, without a line of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mega_rl import platform
from mega_rl.bridge.reshard.execute import Transfer, write_into
from mega_rl.bridge.reshard.plan import Layout, compile_plan
from mega_rl.bridge.series import Series
from mega_rl.bridge.slices import Box
from mega_rl.parallel.joint_group import MeetingPoint, join_group
from mega_rl.rollout.transfers import Transfers


@dataclass(frozen=True)
class Link:
    """What a worker must know to receive: the trainer compiles the same plan from the same layouts."""

    point: MeetingPoint
    rank: int  # of this worker in the joint group
    sources: Layout  # [ranks of the joint group]; the workers' are empty
    destinations: Sequence[Sequence[Series]]  # [ranks of the joint group]; the trainer ranks' are empty
    dtype: torch.dtype  # of the engine's parameters
    bucket_bytes: int
    changing: frozenset[str] | None = None  # as in ``SentWeights``

    def transfers(self, group: torch.distributed.ProcessGroup, device: torch.device) -> Transfers:
        """This rank's part in the plans over the joint group."""
        synchronize = platform.current().synchronize

        def part(destinations: Layout) -> Transfer:
            plan = compile_plan(self.sources, destinations)
            return Transfer(plan, self.rank, self.point.world_size, group, self.bucket_bytes, device, synchronize)

        return Transfers(self.destinations, self.changing, part)


class Receiver:
    """One worker's end of every sync into its live fused parameters."""

    def __init__(self, link: Link, parameters: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Join the trainer's ranks; blocks until all of them have joined.

        Args:
            parameters: returns the worker's live parameters, by the engine's names.
        """
        self._link, self._parameters = link, parameters
        device = next(iter(parameters().values())).device
        self._transfers = link.transfers(join_group(link.point, link.rank), device)

    @torch.no_grad()
    def receive(self) -> None:
        """Take one sync; the trainer's ranks run their part of it at the same time."""
        self._transfers.next().run(_read_nothing, write_into(self._parameters()), self._link.dtype)


def _read_nothing(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
    raise AssertionError(f"a worker is no source, and the plan makes it send {hf_name}")
