"""The trainer's weights out to a Hugging Face directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.bridge.files.huggingface import HFWriter, value_changes
from mega_rl.bridge.mapping.tensors import full_series, hf_tensors
from mega_rl.bridge.reshard.execute import Transfer
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.config.schema.stage import ADAPTER, exports_adapter
from mega_rl.data.tokens.tokenizer import padding_token
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.models.shape import ModelShape
from mega_rl.observe.heartbeat import HEART
from mega_rl.stages.run.job import Job
from mega_rl.stages.weights.adapters import export_adapter, local_reader, lora_merge

MAX_SHARD_BYTES = 5 << 30  # of an exported safetensors file


def export_huggingface(
    trainer: MegatronEngine,
    target: Path,
    source_dir: str | Path,
    bucket_bytes: int,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write the actor's weights as a Hugging Face directory that transformers and vLLM load; collective.

    Adapters are merged into what is written, box by box, and nowhere else. They are written by themselves too, beside
    it as ``ADAPTER``, if they and ``source_dir`` are the whole model.

    Args:
        target: the directory to write; what an earlier run left there is replaced.
        source_dir: the model that training started from, whose other files (tokenizer, ...) are copied.
        bucket_bytes: extra memory per rank that the transfer to rank 0 may take.
        changes: keys of config.json that are not those of ``source_dir``.
    """
    policy, dtype = trainer.policy, trainer.policy.spec.dtype
    policy.refuse_replaced("an export")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sources = [trainer.series_of(r) for r in range(world_size)]
    plan = compile_plan(sources, [full_series(policy.shape) if r == 0 else [] for r in range(world_size)])
    transfer = Transfer(plan, rank, world_size, None, bucket_bytes, policy.device)

    read = local_reader(policy, dtype)
    if policy.plan.adapters.ranks:
        read = lora_merge(policy, dtype, bucket_bytes).for_sync(read, version=0).read
    stream = transfer.stream(read, list(hf_tensors(policy.shape)), dtype)
    try:
        if rank == 0:
            _write(stream, policy.shape, dtype, target, source_dir, changes)
    finally:
        for _ in stream:  # every rank must come to the end of the stream, or the others would wait for it
            pass
    if exports_adapter(policy.spec.tuning):
        export_adapter(policy, target.with_name(ADAPTER), source_dir, bucket_bytes)


def export_trained(job: Job, trainer: MegatronEngine) -> None:
    """What ``checkpoint.export_hf`` asks for at the end of a run. Collective."""
    config, shape = job.config, trainer.policy.shape
    if not config.checkpoint.export_hf:
        return
    is_of_values = shape.head == "value"
    changes = value_changes(shape, padding_token(job.tokenizer, shape.vocab_size)) if is_of_values else None
    with HEART.during("export"):
        export_huggingface(trainer, job.export_dir, config.model.path, config.bridge.bucket_bytes, changes)


def _write(
    stream: Iterator[tuple[str, Tensor]],
    shape: ModelShape,
    dtype: torch.dtype,
    final: Path,
    source_dir: str | Path,
    changes: Mapping[str, Any] | None,
) -> None:
    """Write the whole directory beside an earlier export, then put it in its place."""
    fresh, replaced = final.with_name(f".{final.name}.new"), final.with_name(f".{final.name}.replaced")
    for leftover in (fresh, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    with HFWriter(fresh, shape, dtype, MAX_SHARD_BYTES, source_dir=source_dir, changes=changes) as writer:
        for name, tensor in stream:
            writer.write(name, tensor)
    if final.exists():
        final.rename(replaced)
    fresh.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
