"""Tiny Hugging Face models with weights that make mistakes visible: norms and biases are not their trivial values."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from mega_rl.models.shape import ModelShape, parse_config
from tests.models import families
from tests.models.families import TRAINER

FAMILIES = tuple(TRAINER.own)


def vocab_size(family: str) -> int:
    size: int = TRAINER.text_keys(family)["vocab_size"]
    return size


def shape(family: str) -> ModelShape:
    return parse_config({**TRAINER.config(family), "text_config": text_config(family)}, family)


def text_config(family: str) -> dict[str, Any]:
    return {"num_hidden_layers": 4, **TRAINER.text_keys(family)}


def picture_tokens(family: str) -> dict[str, int]:
    """The tokens at the end of the vocabulary that mean pictures."""
    return families.picture_tokens(vocab_size(family))


def experts(family: str, num_layers: int = 4) -> tuple[int, int, int]:
    """Layers with experts, experts of a layer, experts of a token."""
    keys = TRAINER.text_keys(family)
    return num_layers, keys["num_experts"], keys["num_experts_per_tok"]


def make(family: str, num_layers: int = 4, seed: int = 0) -> transformers.PreTrainedModel:
    """A float32 model, the same for the same arguments in every process."""
    torch.manual_seed(seed)
    model = TRAINER.new_model(family, num_hidden_layers=num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)  # logits of order 1, so that an error of 1e-4 in them is a small one
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model.eval()
