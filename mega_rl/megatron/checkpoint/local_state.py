"""The state of one rank as bytes: for the same rank of the same layout, with nothing of it gathered or described."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.files.torch_dist.columns import extract, restore
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.offload import PARTS
from mega_rl.megatron.optim.optimizer import chained, ensure_state
from mega_rl.megatron.optim.optimizer_state import KINDS, owned


def to_bytes(engine: MegatronEngine, progress: Mapping[str, Any]) -> bytes:
    """Weights, optimizer, schedule and random state of this rank, and the progress (plain values)."""
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
    ensure_state(engine.optimizer)
    return {
        "weights": _weights(engine),
        "optimizer": _optimizer_state(engine),
        "steps": _steps(engine),
        "lr_schedule": engine.lr_schedule.state_dict(),
        "skipped": engine.stepper.skipped.state_dict(),
    }


def from_bytes(engine: MegatronEngine, content: bytes) -> dict[str, Any]:
    """Put the state into an engine of the same layout and into its companions; returns the progress."""
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
    own = _weights(engine)
    assert own.keys() == state["weights"].keys(), "a copy of another layout"
    for name, tensor in own.items():
        tensor.copy_(state["weights"][name])
    for part, states, steps in zip(chained(engine.optimizer), state["optimizer"], state["steps"], strict=True):
        for name, parameter, _ in owned(part):
            part._set_main_param_and_optimizer_states(parameter, states[name])
        for group, step in zip(part.optimizer.param_groups, steps, strict=True):
            if step is not None:
                group["step"] = step
    engine.lr_schedule.load_state_dict(state["lr_schedule"])
    engine.stepper.skipped.load_state_dict(state["skipped"])


def _weights(engine: MegatronEngine) -> dict[str, Tensor]:
    """Every tensor of the model that is not frozen, as it lies in memory; what is, model.path gives at any start."""
    found: dict[str, Tensor] = {}
    for number, chunk in enumerate(engine.policy.chunks):
        trained = [(name, parameter) for name, parameter in chunk.named_parameters() if parameter.requires_grad]
        named = [*trained, *chunk.named_buffers()]
        found |= {f"model.{number}.{name}": tensor.detach() for name, tensor in named}
    found |= {f"frozen.{name}": tensor.detach() for name, tensor in engine.policy.frozen.items()}
    return found


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
