"""Which activations are not kept for the backward pass but computed again."""

from __future__ import annotations

from typing import Any

from mega_rl.config.schema import MemoryConfig
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape


def recompute_settings(memory: MemoryConfig, shape: ModelShape) -> dict[str, Any]:
    """Megatron's own keys for ``memory.recompute``.

    Raises:
        InputError: a named module that this model does not have, which Megatron would pass over in silence.
    """
    if memory.recompute == "none":
        return {}
    if memory.recompute == "full":
        layers = memory.recompute_num_layers
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform" if layers is None else "block",
            "recompute_num_layers": layers or 1,
        }
    present = _modules(shape)
    modules = memory.recompute_modules or [name for name in ("mlp", "moe") if name in present]
    for name in modules:
        if name not in present:
            raise InputError(
                f"memory.recompute_modules has {name!r}, which this model does not have: choose of {', '.join(present)}"
            )
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def _modules(shape: ModelShape) -> list[str]:
    has_dense = any(not shape.has_experts(layer) for layer in range(shape.num_layers))
    found = {
        "core_attn": True,
        "mlp": has_dense,
        "moe": shape.mixture is not None,
        "shared_experts": shape.mixture is not None and shape.mixture.shared_ffn_size > 0,
    }
    return [name for name, is_present in found.items() if is_present]
