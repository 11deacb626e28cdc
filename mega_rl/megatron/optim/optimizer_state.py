"""The optimizer's state in a checkpoint: every rank writes what it owns, nothing is gathered, and any layout reads it.

Data-parallel ranks divide the flat elements of each local parameter among them. What a rank owns of one is a few boxes
of the global tensor, and the checkpoint holds these as chunks of ``optimizer.state.<kind>.<tensor>``. Megatron's own
form ("fully_reshardable") has the same tensors in chunks of whole local parameters, for which it gathers all state on
all data-parallel ranks; either form is read here, and by Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mega_rl.bridge.slices import extents, flat_range, whole_box

KINDS = ("param", "exp_avg", "exp_avg_sq")  # float32 weights and Adam's two moments

State = dict[str, dict[str, dict[str, Any]]]  # parameter -> kind -> piece -> ShardedTensor, or the tensor that was read


def install(optimizer: DistributedOptimizer) -> None:
    """Let an optimizer describe and load its state in this form, where Megatron asks it for "fully_reshardable"."""
    optimizer.sharded_param_state_fully_reshardable = partial(_describe, optimizer)
    optimizer.load_parameter_state_from_fully_reshardable = partial(_load, optimizer)


@dataclass(frozen=True)
class _Piece:
    """Elements of a parameter that are one after the other in its flat order, and a box of a global tensor."""

    tensor: ShardedTensor  # of which they are a box
    start: int  # of the parameter's flat elements
    end: int
    shape: tuple[int, ...]  # of the box, prepended axes included
    offset: tuple[int, ...]  # of the box in the global tensor


def _pieces(described: ShardedTensor | ShardedTensorFactory, start: int, end: int) -> Iterator[_Piece]:
    """What the flat range from ``start`` to ``end`` of a local parameter is of global tensors."""
    if isinstance(described, ShardedTensorFactory):
        # Its parts are views of what it is given; one without memory tells where each begins.
        whole = torch.empty(described.data.shape, dtype=described.data.dtype, device="meta")
        parts = described.build_fn(described.key, whole, described.replica_id, None)
        tensors = [part for part in nested_values(parts) if isinstance(part, ShardedTensor)]
        places = [(part, int(part.data.storage_offset())) for part in tensors]
        assert all(part.data.is_contiguous() for part in tensors), f"{described.key} is not cut along its first axis"
    else:
        places = [(described, 0)]
    for part, at in places:
        low, high = max(start, at), min(end, at + part.data.numel())
        for box in flat_range(whole_box(part.local_shape), low - at, high - at) if low < high else ():
            size = torch.Size(extents(box)).numel()
            front = (1,) * part.prepend_axis_num
            offset = (*((0,) * part.prepend_axis_num), *(begin for begin, _ in box))
            yield _Piece(
                part,
                low,
                low + size,
                front + extents(box),
                tuple(a + b for a, b in zip(part.global_offset, offset, strict=True)),
            )
            low += size


def _describe(
    optimizer: DistributedOptimizer, model: dict[str, Any], is_loading: bool, metadata: Mapping[str, Any]
) -> State:
    model, _ = extract_sharded_tensors_and_factories(model)
    described = {base.data: base for base in nested_values(model)}
    state: State = {}
    for name, parameter, (start, end) in owned(optimizer):
        base = described[parameter]
        own = optimizer._get_main_param_and_optimizer_states(parameter)
        # The last number says which data-parallel copy this is; there is one of what a rank owns.
        replica = (*base.replica_id[:2], optimizer.distributed_optimizer_instance_id)
        pieces = list(_pieces(base, start, end))
        state[name] = {
            kind: {
                str(number): ShardedTensor(
                    key=f"optimizer.state.{kind}.{piece.tensor.key}",
                    data=None
                    if is_loading
                    else own[kind].detach()[piece.start - start : piece.end - start].view(piece.shape),
                    dtype=torch.float32 if is_loading else own[kind].dtype,
                    local_shape=piece.shape,
                    global_shape=piece.tensor.global_shape,
                    global_offset=piece.offset,
                    axis_fragmentations=None,  # no regular grid
                    replica_id=replica,
                    allow_shape_mismatch=piece.tensor.allow_shape_mismatch,
                )
                for number, piece in enumerate(pieces)
            }
            for kind in KINDS
        }
    return state


@torch.no_grad()
def _load(optimizer: DistributedOptimizer, state: State) -> None:
    for name, parameter, _ in owned(optimizer):
        read = {
            kind: torch.cat([pieces[str(number)].flatten() for number in range(len(pieces))])
            for kind, pieces in state[name].items()
        }
        optimizer._set_main_param_and_optimizer_states(parameter, read)


def owned(optimizer: DistributedOptimizer) -> Iterator[tuple[str, torch.nn.Parameter, tuple[int, int]]]:
    """A name within the optimizer, the parameter, and the flat range of it whose state is on this rank."""
    for number, (buffer, maps) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        for buckets in maps.values():
            spans: dict[Tensor, Any] = {p: span for bucket in buckets for p, span in bucket["param_map"].items()}
            for index, parameter in enumerate(buffer.param_index_map):
                if parameter in spans and (span := spans[parameter]["param"]).start < span.end:
                    yield f"{number}.{index}", parameter, (span.start, span.end)
