"""The state of one rank as bytes: for the same rank of the same layout, with nothing of it gathered or described.

Weights that several data-parallel ranks hold alike are in the bytes of one of them, from which all get them back.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.files.torch_dist.columns import extract, restore
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.offload import PARTS
from mega_rl.megatron.optim.optimizer import chained, ensure_state
from mega_rl.megatron.optim.optimizer_state import KINDS, owned


def to_bytes(engine: MegatronEngine, progress: Mapping[str, Any]) -> bytes:
    """Optimizer, schedule and random state of this rank, its share of the weights, and the progress (plain values)."""
    engine.policy.refuse_replaced("a copy of the state")
    assert engine.offload.is_complete, "a copy needs weights and optimizer on the device"
    document, columns = extract(progress)
    state = {
        **_state(engine),
        "companions": {name: _state(companion) for name, companion in engine.companions.items()},
        "generators": dict(platform.current().rng_state()),
        "progress": json.dumps(document),
        "columns": {name: torch.from_numpy(column) for name, column in columns.items()},
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    for companion in engine.companions.values():
        companion.offload.to_host(*PARTS)
    return buffer.getvalue()


def _state(engine: MegatronEngine) -> dict[str, Any]:
    engine.offload.to_device()
    with engine.in_its_groups():
        engine.collect_weights()
        own = _weights(engine)
    ensure_state(engine.optimizer)
    return {
        "weights": {name: one.tensor for name, one in own.items() if one.is_kept},
        "optimizer": _optimizer_state(engine),
        "steps": _steps(engine),
        "lr_schedule": engine.lr_schedule.state_dict(),
        "skipped": engine.stepper.skipped.state_dict(),
    }


def from_bytes(engine: MegatronEngine, content: bytes) -> dict[str, Any]:
    """Put the state into an engine of the same layout and into its companions; returns the progress.

    Collective: every rank puts back what it kept of the same step.
    """
    state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    _restore(engine, state)
    for name, companion in engine.companions.items():
        _restore(companion, state["companions"][name])
        companion.offload.to_host(*PARTS)
    platform.current().set_rng_state(state["generators"])
    columns = {name: column.numpy() for name, column in state["columns"].items()}
    progress: dict[str, Any] = restore(json.loads(state["progress"]), columns)
    return progress


@torch.no_grad()
def _restore(engine: MegatronEngine, state: Mapping[str, Any]) -> None:
    engine.offload.to_device()
    ensure_state(engine.optimizer)
    with engine.in_its_groups():
        own = _weights(engine)
    assert {name for name, one in own.items() if one.is_kept} == state["weights"].keys(), "a copy of another layout"
    for name, one in own.items():
        if one.is_kept:
            one.tensor.copy_(state["weights"][name])
        if one.replicas is not None:
            dist.broadcast(one.tensor, group=one.replicas, group_src=one.keeper)
    for part, states, steps in zip(chained(engine.optimizer), state["optimizer"], state["steps"], strict=True):
        for name, parameter, _ in owned(part):
            part._set_main_param_and_optimizer_states(parameter, states[name])
        for group, step in zip(part.optimizer.param_groups, steps, strict=True):
            if step is not None:
                group["step"] = step
    engine.lr_schedule.load_state_dict(state["lr_schedule"])
    engine.stepper.skipped.load_state_dict(state["skipped"])


class _Weight(NamedTuple):
    """A tensor of the model, as it lies in memory."""

    tensor: Tensor
    replicas: dist.ProcessGroup | None = None  # ranks that hold the same; None: this one alone is asked for it
    keeper: int = 0  # of these ranks, in the group: whose bytes have it

    @property
    def is_kept(self) -> bool:
        """Whether it is in this rank's bytes."""
        return self.replicas is None or dist.get_rank(self.replicas) == self.keeper


def _weights(engine: MegatronEngine) -> dict[str, _Weight]:
    """Every tensor of the model that is not frozen; what is, model.path gives at any start."""
    found: dict[str, _Weight] = {}
    loads: dict[dist.ProcessGroup, list[int]] = {}  # bytes that each rank of a group keeps
    for number, chunk in enumerate(engine.policy.chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                found[f"model.{number}.{name}"] = _shared(parameter, loads)
        found |= {f"model.{number}.{name}": _Weight(tensor.detach()) for name, tensor in chunk.named_buffers()}
    found |= {f"frozen.{name}": _Weight(tensor.detach()) for name, tensor in engine.policy.frozen.items()}
    return found


def _shared(parameter: Tensor, loads: dict[dist.ProcessGroup, list[int]]) -> _Weight:
    """A trained weight, which the rank of its group keeps that has the least to keep so far: all find the same one."""
    if getattr(parameter, "allreduce", True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:  # of an expert
        group = parallel_state.get_expert_data_parallel_group()
    size = dist.get_world_size(group)
    if size == 1:
        return _Weight(parameter.detach())
    kept = loads.setdefault(group, [0] * size)
    keeper = kept.index(min(kept))
    kept[keeper] += parameter.nbytes
    return _Weight(parameter.detach(), group, keeper)


def _optimizer_state(engine: MegatronEngine) -> list[dict[str, dict[str, Tensor]]]:
    """Of every optimizer: name of a parameter -> kind -> what this rank owns of it."""
    return [
        {
            name: {kind: part._get_main_param_and_optimizer_states(parameter)[kind].detach() for kind in KINDS}
            for name, parameter, _ in owned(part)
        }
        for part in chained(engine.optimizer)
    ]


def _steps(engine: MegatronEngine) -> list[list[int | None]]:
    return [[group.get("step") for group in part.optimizer.param_groups] for part in chained(engine.optimizer)]
