"""Weights from the trainer's shards into the live engines, and out to a Hugging Face directory."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.engine_layout import vllm_series
from mega_rl.bridge.execute import Ledger, Read, Transfer
from mega_rl.bridge.families import full_series, hf_tensors, roles
from mega_rl.bridge.huggingface import HFWriter
from mega_rl.bridge.plan import compile_plan
from mega_rl.bridge.proof import Inspect, Proof, colocated
from mega_rl.bridge.quantize import SimulatedQuantization
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, Slice, indices, num_elements
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.model import DTYPES
from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.rollout.engine import RolloutEngine
from mega_rl.rollout.noise import AqnNoise, SyncNoise, noise_metrics
from mega_rl.rollout.remote_engines import RemoteEngines
from mega_rl.stages.session import Session
from mega_rl.types import InputError

MAX_SHARD_BYTES = 5 << 30  # of an exported safetensors file


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
    ``reload`` the whole Hugging Face tensors pass through the engine's own loader.
    """

    def __init__(self, session: Session, trainer: MegatronEngine, rollout: RolloutEngine, noise: AqnNoise) -> None:
        config, shape, world_size = session.config, session.shape, dist.get_world_size()
        self.trainer, self.rollout, self.noise = trainer, rollout, noise
        self.dtype = DTYPES[config.rollout.dtype or config.model.dtype]
        self.is_live = config.rollout.weight_update == "live"
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
            wanted = [vllm_series(shape, size, worker % size) for worker in range(rollout.num_workers)]
            for parameters, series in zip(rollout.parameter_shapes(), wanted, strict=True):
                check_engine_parameters(parameters, slices_of(series), self.dtype)
        elif self.is_live:
            wanted = [vllm_series(shape, size, engines.tensor_rank(rank)) for rank in range(world_size)]
            with together("matching the engine's parameters"):
                check_engine_parameters(rollout.parameters(), slices_of(wanted[dist.get_rank()]), self.dtype)
        else:
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


def check_engine_parameters(parameters: Mapping[str, Tensor], slices: Sequence[Slice], dtype: torch.dtype) -> None:
    """Refuse to write in place what the mapping does not describe exactly: it would stay stale, or hold garbage.

    Raises:
        InputError: an engine parameter that no slice covers, one that is not there, or one of another dtype.
    """
    covered: dict[str, int] = defaultdict(int)
    for piece in slices:
        covered[piece.local_name] += num_elements(piece.local_box)
    mend = "set rollout.weight_update=reload, which goes through the engine's own loader"
    for name in sorted(set(parameters) | set(covered)):
        # The engine pads the vocabulary, so that a rank's rows may hold no token at all.
        is_vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if name not in parameters or (name not in covered and not is_vocabulary):
            where = "the engine" if name not in parameters else "the mapping of this model family"
            raise InputError(f"rollout.weight_update=live cannot write {name}, which {where} does not have: {mend}")
        tensor = parameters[name]
        if tensor.dtype != dtype:
            raise InputError(
                f"rollout.weight_update=live cannot write {name}, which the engine holds as {tensor.dtype}: {mend}"
            )
        if covered[name] != tensor.numel() and not is_vocabulary:
            raise InputError(
                f"rollout.weight_update=live cannot write {name}: the engine has {tensor.numel()} elements and the "
                f"mapping {covered[name]}: {mend}"
            )


def export_huggingface(session: Session, trainer: MegatronEngine) -> Path:
    """Write the actor's weights as a Hugging Face directory that transformers and vLLM load; collective.

    An export that an earlier run of the same output directory left is replaced.
    """
    trainer.policy.refuse_replaced("an export")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sources = [trainer.series_of(r) for r in range(world_size)]
    plan = compile_plan(sources, [full_series(session.shape) if r == 0 else [] for r in range(world_size)])
    bucket_bytes = session.config.bridge.bucket_bytes
    transfer = Transfer(plan, rank, world_size, None, bucket_bytes, session.device)
    dtype = DTYPES[session.config.model.dtype]

    def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
        return trainer.policy.local(local_name, local_box).to(dtype)

    stream = transfer.stream(read, list(hf_tensors(session.shape)), dtype)
    try:
        if rank == 0:
            _write_export(session, stream, dtype)
    finally:
        for _ in stream:  # every rank must come to the end of the stream, or the others would wait for it
            pass
    return session.export_dir


def _write_export(session: Session, stream: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Write the whole directory beside an earlier export, then put it in its place."""
    final = session.export_dir
    fresh, replaced = final.with_name(f".{final.name}.new"), final.with_name(f".{final.name}.replaced")
    for leftover in (fresh, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    with HFWriter(fresh, session.shape, dtype, MAX_SHARD_BYTES, source_dir=session.config.model.path) as writer:
        for name, tensor in stream:
            writer.write(name, tensor)
    if final.exists():
        final.rename(replaced)
    fresh.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
