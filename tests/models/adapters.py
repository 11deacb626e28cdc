"""Adapter directories as PEFT writes them, made for tests without PEFT, and what they are by the formula."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mega_rl.bridge.mapping.tensors import hf_tensors, roles
from mega_rl.models.shape import ModelShape

RANK, ALPHA = 4, 8.0
Pairs = dict[str, tuple[Tensor, Tensor]]  # weight -> A [r, columns], B [rows, r]


def pairs(shape: ModelShape, rank: int = RANK, seed: int = 0, size: float = 0.05) -> Pairs:
    """Random factors of every linear layer, B not zero."""
    generator, sizes = torch.Generator().manual_seed(seed), hf_tensors(shape)
    found = {}
    for name, role in roles(shape).items():
        if role == "linear":
            rows, columns = sizes[name]
            a = torch.randn(rank, columns, generator=generator) / columns**0.5
            found[name] = (a, torch.randn(rows, rank, generator=generator) * size)
    return found


def names(weight: str) -> tuple[str, str]:
    module = "base_model.model." + weight.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def state(factors: Pairs) -> dict[str, Tensor]:
    """The tensors of a file, one pair for every projection of every expert."""
    return {name: t for weight, pair in factors.items() for name, t in zip(names(weight), pair, strict=True)}


def fused_state(factors: Pairs, shape: ModelShape) -> dict[str, Tensor]:
    """The same adapter as PEFT 0.21 has it with transformers 5: one pair for all experts of a layer.

    Written down as PEFT's own conversion does it (block_diag, permute, flatten), not as it is read.
    """
    assert shape.mixture is not None
    found = state({weight: pair for weight, pair in factors.items() if ".experts." not in weight})
    for layer in sorted(shape.mixture.layers):
        experts = f"{shape.decoder}.layers.{layer}.mlp.experts"

        def each(part: str, experts: str = experts) -> list[tuple[Tensor, Tensor]]:
            return [factors[f"{experts}.{e}.{part}_proj.weight"] for e in range(shape.mixture.num_experts)]

        gate, up, down = each("gate"), each("up"), each("down")
        a = torch.stack([torch.cat([g[0], u[0]]) for g, u in zip(gate, up, strict=True)])  # E, 2r, hidden
        b = torch.stack([torch.block_diag(g[1], u[1]) for g, u in zip(gate, up, strict=True)])  # E, 2 ffn, 2r
        inner, outer = f"base_model.model.{experts}.base_layer", f"base_model.model.{experts}"
        found[f"{inner}.lora_A.weight"] = a.flatten(0, 1).contiguous()
        found[f"{inner}.lora_B.weight"] = b.permute(2, 0, 1).flatten(0, 1).T.contiguous()
        found[f"{outer}.lora_A.weight"] = torch.stack([d[0] for d in down]).flatten(0, 1).contiguous()
        stacked = torch.stack([d[1] for d in down])  # E, hidden, r
        found[f"{outer}.lora_B.weight"] = stacked.permute(2, 0, 1).flatten(0, 1).T.contiguous()
    return found


def save(directory: Path, tensors: Mapping[str, Tensor], base: str | Path | None = None, **changes: Any) -> Path:
    """An adapter directory with these tensors; ``changes`` of its adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
        **changes,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
