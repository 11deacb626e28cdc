"""Weights from the trainer's shards into the live engines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.mapping.live_check import difference
from mega_rl.bridge.mapping.tensors import full_series, hf_tensors, roles
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.outgoing.noise import AqnNoise, SyncNoise, noise_metrics
from mega_rl.bridge.outgoing.quantize import SimulatedQuantization
from mega_rl.bridge.reshard.execute import Ledger, Read, Transfer
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.reshard.proof import Inspect, Proof, colocated
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Box, indices
from mega_rl.errors import InputError
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.model import DTYPES
from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.rollout.engine import RolloutEngine
from mega_rl.rollout.remote.engines import RemoteEngines
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.rollout.vllm.versions import transposed_weight
from mega_rl.stages.parts.session import Session


class Sync(Protocol):
    """How the engines come to the actor's weights, and the trainer to the engines' memory."""

    def push(self, version: int, sigma: float, is_validation: bool = False) -> dict[str, float]: ...

    def end_sampling(self) -> None: ...


class Unsynced:
    """A ``Sync`` for an engine without weights, which only learns of their version."""

    def __init__(self, rollout: RolloutEngine) -> None:
        self._rollout = rollout

    def push(self, version: int, sigma: float, is_validation: bool = False) -> dict[str, float]:
        self._rollout.finish_update(version)
        return {}

    def end_sampling(self) -> None:
        """There is no memory to hand over."""


class WeightSync:
    """Pushes the actor's weights into the engines, with AQN noise and simulated quantisation where they are on.

    With ``rollout.weight_update=live`` each engine shard is written in place, every byte moved at most once; with
    ``reload`` the whole Hugging Face tensors pass through the engine's own loader; ``auto`` is live for engines whose
    parameters are exactly as the mapping of the model family says, and says why where they are not.
    """

    def __init__(self, session: Session, trainer: MegatronEngine, rollout: RolloutEngine, noise: AqnNoise) -> None:
        config, shape, world_size = session.config, session.shape, dist.get_world_size()
        self.trainer, self.rollout, self.noise = trainer, rollout, noise
        self.dtype = DTYPES[config.rollout.dtype or config.model.dtype]
        self.shapes = hf_tensors(shape)
        self.noisy_names = frozenset(noise.targets(roles(shape)) if config.aqn.enabled else ())
        size, engines = config.rollout.tensor_parallel_size, session.engine_layout
        sources = [trainer.series_of(rank) for rank in range(world_size)]
        four_bits = config.rollout.simulated_quantization
        self.quantization: SimulatedQuantization | None = None
        if four_bits is not None:
            held = [slices_of(series) for series in sources]
            self.quantization = SimulatedQuantization(
                four_bits, self.shapes, roles(shape), held, dist.get_rank(), session.device
            )
        if isinstance(rollout, RemoteEngines):
            workers = [worker % size for worker in range(rollout.num_workers)]
        else:
            workers = [engines.tensor_rank(rank) for rank in range(world_size)]
        wanted = [vllm_series(shape, size, tensor_rank) for tensor_rank in workers]
        self.is_live = self._choose_way(session, wanted)
        if not self.is_live:
            wanted = [full_series(shape)] * world_size
        start = time.perf_counter()
        bucket_bytes = config.bridge.bucket_bytes
        if isinstance(rollout, RemoteEngines):
            self.transfer = rollout.connect(sources, wanted, self.dtype, bucket_bytes, session.device)
        else:
            plan = compile_plan(sources, wanted)
            self.transfer = Transfer(plan, dist.get_rank(), world_size, None, bucket_bytes, session.device)
        self.plan_s = time.perf_counter() - start
        self.proof: Proof | None = None
        if self.is_live and config.bridge.verify != "off":
            held, needed = ([slices_of(series) for series in side] for side in (sources, wanted))
            is_sample = config.bridge.verify == "sample"
            self.proof = Proof(self.shapes, held, needed, size, is_sample, config.trainer.seed)
        self._pushed: tuple[int, bool] | None = None  # what the engines hold: version, for training

    def _choose_way(self, session: Session, wanted: Sequence[Sequence[Series]]) -> bool:
        """Whether updates are written in place; collective. ``wanted``: the layout of every engine worker.

        Raises:
            InputError: on every rank, where that is asked for, or needed, and the engine's parameters differ.
        """
        rollout, verify = session.config.rollout, session.config.bridge.verify
        if rollout.weight_update == "reload":
            return False

        def obstacle(parameters: Mapping[str, Tensor], series: Sequence[Series]) -> str | None:
            transposed = transposed_weight(parameters, session.device.type)
            return transposed or difference(parameters, slices_of(series), self.dtype)

        found: list[str | None]
        if isinstance(self.rollout, RemoteEngines):
            workers = zip(self.rollout.parameter_shapes(), wanted, strict=True)
            found = [obstacle(parameters, series) for parameters, series in workers]
        else:
            with together("matching the engine's parameters"):
                own = obstacle(self.rollout.parameters(), wanted[dist.get_rank()])
            found = gather_objects(own)
        reason = next((words for words in found if words is not None), None)
        if reason is None:
            return True
        if rollout.weight_update == "live":
            raise InputError(
                f"rollout.weight_update=live cannot write {reason}: set rollout.weight_update=reload, which goes "
                "through the engine's own loader"
            )
        if isinstance(self.rollout, RemoteEngines):
            raise InputError(f"rollout.placement=separate cannot write {reason}: set rollout.placement=colocated")
        if verify != "off":
            raise InputError(
                f"bridge.verify={verify} can prove only what is written in place, and rollout.weight_update=auto "
                f"cannot write {reason}: set bridge.verify=off to go through the engine's own loader, without a proof"
            )
        session.say(f"rollout.weight_update: weights go through the engine's own loader, as live cannot write {reason}")
        assert isinstance(self.rollout, VLLMEngine), self.rollout
        self.rollout.use_loader()
        return False

    def push(self, version: int, sigma: float, is_validation: bool = False) -> dict[str, float]:
        """Make the engines sample from the actor's present weights; collective.

        What ``memory.offload`` names leaves the device as soon as it is not needed, until ``end_sampling``.

        Args:
            version: number of finished steps; keys the noise.
            sigma: standard deviation of the noise; 0 for none.
            is_validation: for validation, which comes before the training on the same version, with the trained weights
                as they are: without simulated quantisation.

        Returns:
            Metrics of the sync.

        Raises:
            RuntimeError: the version is not newer than what the engines hold, the engines hold another one than was
                pushed last, or ``bridge.verify`` found a live weight that differs from the trainer's.
        """
        self.trainer.policy.refuse_replaced("a push")
        self._check_version(version, is_validation)
        noise = self.noise.for_sync(version, sigma)
        masters = self.trainer.master_weights(self.noisy_names) if sigma else {}

        def outgoing(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
            if hf_name in masters:
                clean = masters[hf_name][indices(hf_box)]
                return noise.apply(hf_name, clean, self.shapes[hf_name], hf_box, self.dtype)
            return self.trainer.policy.local(local_name, local_box).to(self.dtype)

        read: Read = outgoing
        if self.quantization is not None and not is_validation:
            read = self.quantization.reader(outgoing)
        self.trainer.offload.to_host("gradients", "optimizer")
        platform.current().empty_cache()  # a waking engine takes its memory from the device, not from torch's cache
        self.rollout.wake_up()
        self.rollout.begin_update()
        if self.is_live:
            ledger = self._write_in_place(read)
        else:
            self.rollout.load_hf_weights(self.transfer.stream(read, list(self.shapes), self.dtype))
            ledger = None
        self.rollout.finish_update(version)
        self._pushed = version, not is_validation
        metrics = self._metrics(ledger, noise)
        metrics |= self._verify(read, version)
        self.trainer.offload.to_host("weights")
        return metrics

    def end_sampling(self) -> None:
        """The engine's memory is the trainer's until the next ``push``."""
        self.rollout.sleep()
        self.trainer.offload.to_device()

    def _write_in_place(self, read: Read) -> Ledger:
        parameters = self.rollout.parameters()

        def write(local_name: str, hf_name: str, hf_box: Box, local_box: Box, piece: Tensor) -> None:
            parameters[local_name][indices(local_box)].copy_(piece)

        with torch.no_grad():
            return self.transfer.run(read, write, self.dtype)

    def _check_version(self, version: int, is_validation: bool) -> None:
        """Refuse to write an update twice, or an older one over a newer: something called out of turn."""
        held = self.rollout.weight_version
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
        start, rank = time.perf_counter(), dist.get_rank()
        if isinstance(self.rollout, RemoteEngines):
            inspect: Inspect = self.rollout.inspect
        else:
            inspect = colocated(self.rollout.parameters(), rank)
        with torch.no_grad():
            num_tensors = self.proof.check(read, rank, inspect, version)
        return {"bridge/verify_s": time.perf_counter() - start, "bridge/verified_tensors": float(num_tensors)}

    def _metrics(self, ledger: Ledger | None, noise: SyncNoise) -> dict[str, float]:
        parts = gather_objects((ledger, noise.records, self.plan_s))
        ledgers = [part for part, _, _ in parts if part is not None]
        metrics = ledger_metrics(ledgers) if ledgers else {}
        metrics["bridge/plan_s"] = max(seconds for _, _, seconds in parts)
        if noise.sigma:
            metrics |= noise_metrics((records for _, records, _ in parts), len(self.noisy_names))
        return metrics


def ledger_metrics(ledgers: Sequence[Ledger]) -> dict[str, float]:
    """The figures of one sync from the ledgers of all ranks."""
    sent = [ledger.bytes_sent for ledger in ledgers]
    moved = sum(ledger.bytes_local + ledger.bytes_sent for ledger in ledgers)
    seconds = max(ledger.seconds for ledger in ledgers)
    return {
        "bridge/bytes_local": float(sum(ledger.bytes_local for ledger in ledgers)),
        "bridge/bytes_sent": float(sum(sent)),
        "bridge/bytes_received": float(sum(ledger.bytes_received for ledger in ledgers)),
        "bridge/bytes_minimum": float(sum(ledger.bytes_minimum for ledger in ledgers)),
        "bridge/largest_sender": max(sent) * len(sent) / sum(sent) if sum(sent) else 1.0,
        "bridge/pack_s": max(ledger.pack_s for ledger in ledgers),
        "bridge/transfer_s": max(ledger.transfer_s for ledger in ledgers),
        "bridge/write_s": max(ledger.write_s for ledger in ledgers),
        "bridge/seconds": seconds,
        "bridge/gb_per_s": moved / 1e9 / max(seconds, 1e-9),
    }
