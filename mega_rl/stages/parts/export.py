"""The trainer's weights out to a Hugging Face directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.bridge.files.huggingface import HFWriter
from mega_rl.bridge.mapping.tensors import full_series, hf_tensors
from mega_rl.bridge.reshard.execute import Transfer
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.slices import Box
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.model import DTYPES
from mega_rl.stages.parts.session import Session

MAX_SHARD_BYTES = 5 << 30  # of an exported safetensors file


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
