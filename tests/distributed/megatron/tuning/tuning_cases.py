"""What tuned engines are tested with; no heavy imports, so a test can name it.

The checkpoint of a variant's first case is resumed by the others of the same variant, at their own layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.models.layouts import Case

# Name -> the keys of ``tuning``.
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "adapter": {"rank": 4, "alpha": 8.0, "expert_rank": 2}},
    "lora_dense": {"method": "lora", "adapter": {"rank": 4, "alpha": 8.0}},
    # a part of each fused layer, scaled by the root of the rank, and norms and embedding beside
    "lora_part": {
        "method": "lora",
        "also_train": ["input_layernorm.weight", "embed_tokens"],
        "adapter": {
            "rank": 3,
            "alpha": 2.0,
            "rslora": True,
            "targets": ["q_proj", "v_proj", "up_proj", "down_proj"],
            "exclude": ["*.layers.1.mlp.*"],
        },
    },
    "lora_dropout": {
        "method": "lora",
        "adapter": {"rank": 4, "alpha": 8.0, "dropout": 0.4, "exclude": ["*.layers.1.*.q_proj"]},
    },
    "lora_dropout_shared": {
        "method": "lora",
        "adapter": {"rank": 4, "alpha": 8.0, "dropout": 0.4, "targets": ["*.self_attn.*", "*.shared_experts.*"]},
    },
    "last": {"method": "freeze", "train_layers": 1},
    "first": {"method": "freeze", "train_layers": -1, "train_modules": "mlp", "also_train": ["norm.weight"]},
}


@dataclass(frozen=True)
class TuningCase:
    case: Case
    family: str
    variant: str
    recompute: str = "none"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        extra = f"_{self.recompute}" if self.recompute != "none" else ""
        return f"{self.family}-{self.variant}-{self.case.name}{extra}{'_bf16' if self.dtype != 'float32' else ''}"


TWO = (
    TuningCase(Case(2, tensor=2, sequence=True), "qwen2", "lora_dense"),
    TuningCase(Case(2, tensor=2), "qwen2", "lora_dense", recompute="full"),
    TuningCase(Case(2, pipeline=2), "qwen2", "lora_dense"),
    TuningCase(Case(2, pipeline=2, virtual_pipeline=2), "qwen2", "lora_dense"),
    TuningCase(Case(2, context=2), "qwen2", "lora_dense"),
    TuningCase(Case(2, overlap=True), "qwen2", "lora_dense", recompute="full"),
    TuningCase(Case(2, tensor=2, sequence=True), "qwen2", "lora_part", recompute="selective"),
    TuningCase(Case(2, pipeline=2), "qwen2", "lora_part"),
    TuningCase(Case(2, pipeline=2, virtual_pipeline=2), "qwen3", "lora_dropout", recompute="full"),
    TuningCase(Case(2, tensor=2), "qwen3", "lora_dropout"),
    TuningCase(Case(2, context=2), "qwen3", "lora_dropout"),
    TuningCase(Case(2, tensor=2, sequence=True), "deepseek_v3", "lora_dropout_shared", recompute="full"),
    TuningCase(Case(2, expert_tensor=2), "qwen3_moe", "lora"),
    TuningCase(Case(2, expert=2), "qwen3_moe", "lora", recompute="full"),
    TuningCase(Case(2, tensor=2, sequence=True), "qwen3_moe", "lora", recompute="full"),
    TuningCase(Case(2, context=2), "qwen3_moe", "lora"),
    TuningCase(Case(2, overlap=True), "qwen3_moe", "lora"),
    TuningCase(Case(2, tensor=2, sequence=True, expert=2, expert_tensor=1), "deepseek_v3", "lora"),
    TuningCase(Case(2, tensor=2, sequence=True), "qwen3_moe", "lora", dtype="bfloat16"),
    TuningCase(Case(2, pipeline=2), "qwen3", "last", recompute="full"),
    TuningCase(Case(2, tensor=2, sequence=True), "qwen3", "last"),
    TuningCase(Case(2, pipeline=2), "qwen3", "first", recompute="full"),
    TuningCase(Case(2, overlap=True), "qwen3", "first", recompute="full"),
)
FOUR = (
    TuningCase(Case(4, tensor=2, sequence=True, pipeline=2), "qwen2", "lora_dense"),
    TuningCase(Case(4, tensor=2, context=2), "qwen2", "lora_dense"),
    TuningCase(Case(4, pipeline=2, virtual_pipeline=2, expert=2, overlap=True), "qwen3_moe", "lora"),
    TuningCase(Case(4, tensor=2, sequence=True, pipeline=2, expert=2, expert_tensor=1), "qwen3_moe", "lora"),
    TuningCase(Case(4, tensor=2, sequence=True, context=2, expert=2, expert_tensor=2), "qwen3_moe", "lora"),
)
