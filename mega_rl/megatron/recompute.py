"""Which activations are not kept for the backward pass but computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mega_rl.config.schema import MemoryConfig
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape

# The values of memory.recompute_modules -> whether a model has such modules.
MODULES: dict[str, Callable[[ModelShape], bool]] = {
    "core_attn": lambda shape: True,
    "mlp": lambda shape: any(not shape.has_experts(layer) for layer in range(shape.num_layers)),
    "moe": lambda shape: shape.mixture is not None,
    "shared_experts": lambda shape: shape.mixture is not None and shape.mixture.shared_ffn_size > 0,
}


def recompute_settings(memory: MemoryConfig, shape: ModelShape) -> dict[str, Any]:
    """Megatron's own keys for ``memory.recompute``.

    Raises:
        InputError: a named module that this model does not have, which Megatron would pass over in silence.
    """
    assert memory.recompute != "auto", "the session has asked the plan"
    if memory.recompute == "none":
        return {}
    if memory.recompute == "full":
        layers = memory.recompute_num_layers
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform" if layers is None else "block",
            "recompute_num_layers": layers or 1,
        }
    present = [name for name, is_present in MODULES.items() if is_present(shape)]
    modules = memory.recompute_modules or [name for name in ("mlp", "moe") if name in present]
    for name in modules:
        if name not in present:
            raise InputError(
                f"memory.recompute_modules has {name!r}, which this model does not have: choose of {', '.join(present)}"
            )
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}
