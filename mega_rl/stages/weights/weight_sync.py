"""Weights from the trainer's shards into the engines that sample."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.bridge.outgoing.transform import Outgoing, Transform, fold
from mega_rl.bridge.reshard.execute import Read, TransferCount
from mega_rl.bridge.reshard.plan import Layout
from mega_rl.bridge.reshard.proof import Proof
from mega_rl.bridge.slices import Box
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.parallel.collectives import reduced
from mega_rl.rollout.collect.replay import ReplayEngine
from mega_rl.rollout.sinks import WeightSink

_COUNTED = tuple(one.name for one in fields(TransferCount))
TRANSFER_METRICS = (
    *("bridge/bytes_local", "bridge/bytes_sent", "bridge/bytes_received", "bridge/bytes_minimum"),
    *("bridge/largest_sender", "bridge/pack_s", "bridge/transfer_s", "bridge/write_s"),
    *("bridge/seconds", "bridge/gb_per_s"),
)


@dataclass(frozen=True)
class Pushed:
    """What the engines sample from after a push."""

    version: int  # of the weights: the number of finished steps
    sigma: float  # standard deviation of the noise on them; 0.0: none
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the sync


class Sync(Protocol):
    """Gives the engines the weights of a version, and the trainer the memory that both share."""

    def push(self, version: int, is_validation: bool = False) -> Pushed:
        """Make the engines sample from the weights of ``version``; collective.

        Where engines fetch their weights, a version is pushed for training as soon as they may sample with it, which
        may be before its step; to push it again then does nothing, and returns what the first push did.

        Args:
            version: number of finished steps; keys the noise.
            is_validation: push exact weights, without noise or other outgoing transforms. May be followed by a training
                push of the same version.
        """

    def end_sampling(self) -> None:
        """Give the device memory to the trainer until the next ``push``."""


class RecordedSync:
    """A ``Sync`` for recorded rollouts: nothing is sent, they were sampled with the same version and noise.

    Args:
        records: answers with the rollouts of one step, and is told which; None: those of a fleet are asked for by step.
    """

    def __init__(self, records: ReplayEngine | None, noise: AqnNoise) -> None:
        self._records, self._noise = records, noise

    def push(self, version: int, is_validation: bool = False) -> Pushed:
        assert not is_validation, "records hold no validation"
        if self._records is not None:
            self._records.turn_to(version)
        return Pushed(version, self._noise.sigma(version))

    def end_sampling(self) -> None:
        """Do nothing: no memory was taken."""


class WeightSync:
    """Pushes the actor's weights into a sink, changed by the outgoing transforms.

    Args:
        trainer: the actor.
        sources: what every trainer rank holds.
        sink: where the weights go; connected here.
        transforms: what changes the weights that training samples from, in this order.
        dtype: what the engines hold.
        proof: checks every sync; None: unchecked.
        model: what makes the model's weights of what the trainer holds (adapters are merged): first, and for validation
            too.
    """

    def __init__(
        self,
        trainer: MegatronEngine,
        sources: Layout,
        sink: WeightSink,
        transforms: Sequence[Transform],
        dtype: torch.dtype,
        proof: Proof | None,
        model: Sequence[Transform] = (),
    ) -> None:
        self.trainer, self.sink, self.transforms, self.dtype, self.proof = trainer, sink, transforms, dtype, proof
        self.model = model
        start = time.perf_counter()
        sink.connect(sources)
        self.plan_s = time.perf_counter() - start
        self._pushed: tuple[int, bool] | None = None  # (version that the engines hold, whether it is for training)
        self._for_training: Pushed | None = None  # the last one

    def push(self, version: int, is_validation: bool = False) -> Pushed:
        """As ``Sync.push``, with the actor's present weights.

        What ``memory.offload`` names leaves the device as soon as it is not needed, until ``end_sampling``: the
        engines' weights take the place of gradients and optimizer, their cache that of the trainer's weights.

        Raises:
            RuntimeError: the version is not newer than what the engines hold, the engines hold another version than was
                pushed last, or ``bridge.verify`` found a live weight that differs from the trainer's.
        """
        last = self._for_training
        if self.sink.keeps_versions and not is_validation and last is not None and last.version == version:
            return last
        self.trainer.policy.refuse_replaced("a push")
        self._check_version(version, is_validation)
        outgoing = fold([*self.model, *(() if is_validation else self.transforms)], self._read, version)
        self.trainer.offload.to_host("gradients", "optimizer")
        platform.current().empty_cache()  # a waking engine takes its memory from the device, not from torch's cache
        transfer_count = self.sink.update(outgoing.read, version, is_validation)
        self._pushed = version, not is_validation
        metrics = self._metrics(transfer_count, outgoing)
        metrics |= self._verify(outgoing.read, version)
        self.trainer.offload.to_host("weights")
        platform.current().empty_cache()
        self.sink.begin_sampling()
        pushed = Pushed(version, outgoing.sigma, metrics)
        if not is_validation:
            self._for_training = pushed
        return pushed

    def end_sampling(self) -> None:
        self.sink.make_room()
        self.trainer.offload.to_device()

    def _read(self, local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
        return self.trainer.policy.local(local_name, local_box).to(self.dtype)

    def _check_version(self, version: int, is_validation: bool) -> None:
        """Refuse to write an update twice, or an older one over a newer: something called out of turn."""
        held = self.sink.weight_version
        if self._pushed is None:
            return
        if held != self._pushed[0]:
            raise RuntimeError(f"the engine holds weight version {held}, but the last sync pushed {self._pushed[0]}")
        if (version, not is_validation) <= self._pushed:
            use = "validation" if is_validation else "training"
            raise RuntimeError(f"a sync of weight version {version} for {use}, but the engine holds version {held}")

    def _verify(self, read: Read, version: int) -> dict[str, float]:
        if self.proof is None:
            return {}
        assert self.sink.inspect is not None, "a proof of weights that nobody can look at"
        start = time.perf_counter()
        with torch.no_grad():
            num_tensors = self.proof.check(read, self.sink.inspect, version)
        return {"bridge/verify_s": time.perf_counter() - start, "bridge/verified_tensors": float(num_tensors)}

    def _metrics(self, transfer_count: TransferCount | None, outgoing: Outgoing) -> dict[str, float]:
        """Of all ranks, on every rank. Collective."""
        return sync_metrics(transfer_count, self.plan_s) | outgoing.metrics()


def sync_metrics(transfer_count: TransferCount | None, plan_s: float) -> dict[str, float]:
    """The figures of one sync from this rank's transfer count and those of all others. Collective."""
    own = [0.0] * len(_COUNTED) if transfer_count is None else [float(getattr(transfer_count, n)) for n in _COUNTED]

    def of_ranks(rows: list[list[float]]) -> list[float]:
        transfer_counts = [TransferCount(**dict(zip(_COUNTED, row[2:], strict=True))) for row in rows if row[0]]  # type: ignore[arg-type]
        figures = transfer_metrics(transfer_counts) if transfer_counts else dict.fromkeys(TRANSFER_METRICS, 0.0)
        return [float(bool(transfer_counts)), max(row[1] for row in rows), *figures.values()]

    row = [float(transfer_count is not None), plan_s, *own]
    is_counted, slowest, *figures = reduced(row, of_ranks, 2 + len(TRANSFER_METRICS))
    found = dict(zip(TRANSFER_METRICS, figures, strict=True)) if is_counted else {}
    return found | {"bridge/plan_s": slowest}


def transfer_metrics(transfer_counts: Sequence[TransferCount]) -> dict[str, float]:
    """The figures of one sync from the transfer counts of all ranks."""
    sent = [transfer_count.bytes_sent for transfer_count in transfer_counts]
    moved = sum(transfer_count.bytes_local + transfer_count.bytes_sent for transfer_count in transfer_counts)
    seconds = max(transfer_count.seconds for transfer_count in transfer_counts)
    figures = (
        float(sum(transfer_count.bytes_local for transfer_count in transfer_counts)),
        float(sum(sent)),
        float(sum(transfer_count.bytes_received for transfer_count in transfer_counts)),
        float(sum(transfer_count.bytes_minimum for transfer_count in transfer_counts)),
        max(sent) * len(sent) / sum(sent) if sum(sent) else 1.0,
        max(transfer_count.pack_s for transfer_count in transfer_counts),
        max(transfer_count.transfer_s for transfer_count in transfer_counts),
        max(transfer_count.write_s for transfer_count in transfer_counts),
        seconds,
        moved / 1e9 / max(seconds, 1e-9),
    )
    return dict(zip(TRANSFER_METRICS, figures, strict=True))
