"""Which activations are not kept for the backward pass but computed again."""

from __future__ import annotations

from typing import Any

from mega_rl.config.schema.sections import MemoryConfig
from mega_rl.errors import InputError
from mega_rl.models.fit import RECOMPUTABLE, recompute_problems
from mega_rl.models.shape import ModelShape


def recompute_settings(memory: MemoryConfig, shape: ModelShape) -> dict[str, Any]:
    """Megatron's own keys for ``memory.recompute``.

    Raises:
        InputError: a named module that this model does not have; one beside the policy may be of another family.
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
    for problem in recompute_problems(shape, memory.recompute_modules, None):
        raise InputError(problem)
    usual = [name for name in ("mlp", "moe") if RECOMPUTABLE[name](shape)]
    return {"recompute_granularity": "selective", "recompute_modules": list(memory.recompute_modules or usual)}
