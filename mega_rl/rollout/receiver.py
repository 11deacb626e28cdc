"""The receiving end of a weight sync between processes: what an engine worker does, without a line of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mega_rl.bridge.execute import Transfer
from mega_rl.bridge.plan import Layout, compile_plan
from mega_rl.bridge.slices import Box, indices
from mega_rl.rollout.joint_group import MeetingPoint, join_group


@dataclass(frozen=True)
class Link:
    """What a worker must know to receive: the trainer compiles the same plan from the same layouts."""

    point: MeetingPoint
    rank: int  # of this worker in the joint group
    sources: Layout  # [ranks of the joint group]; the workers' are empty
    destinations: Layout  # [ranks of the joint group]; the trainer ranks' are empty
    dtype: torch.dtype  # of the engine's parameters
    bucket_bytes: int

    def transfer(self, group: torch.distributed.ProcessGroup, device: torch.device) -> Transfer:
        """This rank's part in the plan over the joint group."""
        plan = compile_plan(self.sources, self.destinations)
        return Transfer(plan, self.rank, self.point.world_size, group, self.bucket_bytes, device)


class Receiver:
    """The methods that vLLM calls in a weight-transfer engine, of every version that is covered.

    vLLM's own base class, which ``weight_transfer.py`` mixes in behind this one, stores ``model`` in its constructor:
    ``(config, parallel_config, model)`` in 0.23, ``(config, vllm_config, device, model)`` from 0.28 on. Weights are
    written in place, so that nothing is left for a start and a finish to do; 0.23 does not ask for them.
    """

    model: torch.nn.Module
    _link: Link | None = None
    _transfer: Transfer | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the trainer's ranks; blocks until all of them have come. ``init_info.link`` is a ``Link``."""
        assert self._transfer is None, "the group is joined once: rebuilding it exhausts an accelerator's resources"
        self._link = init_info.link
        device = next(self.model.parameters()).device
        self._transfer = self._link.transfer(join_group(self._link.point, self._link.rank), device)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the parameters stay live."""

    @torch.no_grad()
    def receive_weights(self, update_info: Any, load_weights: Callable[..., None] | None = None) -> None:
        """One sync into the live fused parameters; ``load_weights`` is what 0.23 passes besides, for whole tensors."""
        assert self._link is not None and self._transfer is not None, "weights before the group was joined"
        parameters = {name: parameter.data for name, parameter in self.model.named_parameters()}

        def write(local_name: str, hf_name: str, hf_box: Box, local_box: Box, piece: torch.Tensor) -> None:
            parameters[local_name][indices(local_box)].copy_(piece)

        self._transfer.run(_read_nothing, write, self._link.dtype)

    def finish_weight_update(self) -> None:
        """Nothing to pack; the engine around the worker forgets its cached prefixes."""

    def shutdown(self) -> None:
        """The group goes with the process."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """0.23 asks every class for it; the trainer sends by the plan instead."""
        raise AssertionError("weights are sent shard to shard, never as a stream of whole tensors")


def _read_nothing(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
    raise AssertionError(f"a worker is no source, and the plan makes it send {hf_name}")
