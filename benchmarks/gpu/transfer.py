"""Slices of ``run.py`` that move weights: into an engine's buffers, to the host and back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, cut, free, negative_loglikelihood, random_batch, timed
from mega_rl import platform
from mega_rl.bridge.mapping.megatron import rank_series
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard.execute import Transfer, write_into
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, Slice, extents, indices
from mega_rl.config.schema.sections import MemoryConfig
from mega_rl.megatron.offload import TrainerOffload
from mega_rl.models.shape import ModelShape


def buffers(slices: Sequence[Slice], device: torch.device) -> dict[str, Tensor]:
    """Parameters as large as the slices ask for."""
    sizes: dict[str, list[int]] = {}
    for piece in slices:
        ends = [end for _, end in piece.local_box]
        sizes[piece.local_name] = [max(a, b) for a, b in zip(sizes.get(piece.local_name, ends), ends, strict=True)]
    return {name: torch.empty(size, dtype=torch.bfloat16, device=device) for name, size in sizes.items()}


def sync(bench: Bench) -> None:
    """The trainer's weights into buffers of the engine's layout, against copying as many bytes."""
    here = platform.current()
    for name in ("1.5B", "mixture"):
        shape = bench.model(name)
        held, wanted = rank_series(shape, bench.layout, 0), vllm_series(shape, 1, 0)
        weights, engine = (buffers(slices_of(series), bench.device) for series in (held, wanted))
        for tensor in weights.values():
            tensor.normal_()
        transfer = Transfer(compile_plan([held], [wanted]), 0, 1, None, 1 << 28, bench.device, here.synchronize)
        write = write_into(engine)

        def read(local_name: str, hf_name: str, hf_box: Box, box: Box, held: Any = weights) -> Tensor:
            return held[local_name][indices(box)]

        def push(transfer: Transfer = transfer, read: Any = read, write: Any = write) -> None:
            transfer.run(read, write, torch.bfloat16)

        def copy(engine: dict[str, Tensor] = engine, source: Any = None) -> None:
            for local_name, tensor in engine.items():
                tensor.copy_(source[local_name])

        sync_s = bench.seconds(push)
        check_sync(shape, slices_of(held), weights, slices_of(wanted), engine)
        num_bytes = sum(2 * tensor.numel() for tensor in engine.values())
        source = {local_name: torch.empty_like(tensor).fill_(1) for local_name, tensor in engine.items()}
        copy_s = bench.seconds(lambda source=source, copy=copy: copy(source=source))
        bench.row(model=name, bytes=num_bytes, sync=num_bytes / sync_s / 1e9, copy=num_bytes / copy_s / 1e9)
        del weights, engine, source, transfer, write, read, push, copy
        free()


def check_sync(
    shape: ModelShape, held: list[Slice], weights: dict[str, Tensor], wanted: list[Slice], engine: dict[str, Tensor]
) -> None:
    """Every tensor put together from both sides is the same."""

    def assembled(pieces: Sequence[Slice], local: dict[str, Tensor], size: tuple[int, ...]) -> Tensor:
        whole = torch.full(size, float("nan"), dtype=torch.bfloat16, device=next(iter(local.values())).device)
        for piece in pieces:
            whole[indices(piece.hf_box)] = local[piece.local_name][indices(piece.local_box)].view(extents(piece.hf_box))
        return whole

    sides: list[dict[str, list[Slice]]] = [{}, {}]
    for side, pieces in zip(sides, (held, wanted), strict=True):
        for piece in pieces:
            side.setdefault(piece.hf_name, []).append(piece)
    for name, size in hf_tensors(shape).items():
        own, other = assembled(sides[0][name], weights, size), assembled(sides[1][name], engine, size)
        assert torch.equal(own, other), f"{name} differs after the sync"


def offload(bench: Bench) -> None:
    """Weights and optimizer state to the host and back, beside one large copy of pinned memory."""
    shape = bench.model("1.5B")
    engine = bench.engine(cut(shape, min(8, shape.num_layers)), "bfloat16", "none")
    batch = random_batch(shape, [64], seed=0)
    engine.forward_backward([batch], negative_loglikelihood(64))
    engine.optimizer_step()  # Adam makes its moments with the first step
    settings = MemoryConfig(offload=["weights", "optimizer"])
    parts = TrainerOffload(settings, engine.wrapped, engine.optimizer, is_active=True)
    on_device = torch.empty(1 << (20 if bench.quick else 30), dtype=torch.uint8, device=bench.device)
    on_host = torch.empty(on_device.shape, dtype=torch.uint8, pin_memory=platform.current().has_own_memory)
    out_s = bench.seconds(lambda: on_host.copy_(on_device, non_blocking=True))
    in_s = bench.seconds(lambda: on_device.copy_(on_host, non_blocking=True))
    for part, tensors in (("weights", parts._weights), ("optimizer", parts._optimizer_tensors)):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}
        num_bytes = sum(storages.values())
        times: dict[str, list[float]] = {"out": [], "back": []}
        for _ in range(3):
            times["out"].append(timed(lambda part=part: parts.to_host(part)))
            times["back"].append(timed(lambda part=part: parts.to_device(part)))
        rates = {name: num_bytes / min(found) / 1e9 for name, found in times.items()}
        copies = {"copy_out": on_device.numel() / out_s / 1e9, "copy_in": on_device.numel() / in_s / 1e9}
        bench.row(part=part, bytes=num_bytes, **rates, **copies)
