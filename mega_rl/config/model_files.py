"""What the model directory must hold before anything heavy starts: config.json, a tokenizer, safetensors weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "intermediate_size",
    "max_position_embeddings",
)
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how the families call it
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the parallel layout and the lengths must fit."""

    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    intermediate_size: int | None  # channels of the MLP
    max_position_embeddings: int | None  # tokens
    num_experts: int | None = None  # of a layer; None: the model has none


def inspect_model(path: str, has_files: bool = True) -> tuple[list[str], ModelShape | None]:
    """Problems of the directory ``model.path``, and the model's sizes where its config.json states them.

    Args:
        has_files: tokenizer and weights must be there too.
    """
    directory = Path(path)
    if not directory.is_dir():
        reason = "is a file" if directory.exists() else "does not exist"
        return [f"model.path is {path!r}, which {reason}: give a Hugging Face model directory"], None
    problems = []
    if has_files and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES)
        problems.append(f"model.path {path!r} has no tokenizer: put one of {names} there")
    if has_files and not any(directory.glob("*.safetensors")):
        problems.append(f"model.path {path!r} has no *.safetensors weights: save the model in that format")
    file = directory / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [*problems, f"model.path {path!r} has no config.json: give a Hugging Face model directory"], None
    except OSError as error:
        return [*problems, f"{file} (of model.path) cannot be read ({error.strerror}): make it readable"], None
    except ValueError as error:  # bad JSON or bad UTF-8
        return [*problems, f"{file} (of model.path) is not valid JSON ({error}): copy the model again"], None
    if not isinstance(values, dict):
        return [*problems, f"{file} (of model.path) is not a JSON object: copy the model again"], None
    found, shape = _read_shape(file, values)
    return [*problems, *found], shape


def _read_shape(file: Path, values: dict[str, Any]) -> tuple[list[str], ModelShape | None]:
    problems = []
    architectures = values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if not any(name in SUPPORTED_ARCHITECTURES for name in names):
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        problems.append(f"{file} (of model.path) has architectures {architectures!r}: choose a model of {supported}")
    sizes: dict[str, int | None] = {}
    for key in SIZES:
        value = values.get(key)
        if value is None and key == "num_key_value_heads":
            value = values.get("num_attention_heads")  # Hugging Face's default: no grouping
        needed = key in ("num_attention_heads", "num_hidden_layers")
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not good and (needed or value is not None):
            problems.append(f"{file} (of model.path) has {key} {value!r}: it must be >= 1, so copy the model again")
        sizes[key] = value if good else None
    heads, groups, layers = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["num_hidden_layers"]
    if heads is None or groups is None or layers is None:
        return problems, None
    experts = next((values[key] for key in NUM_EXPERTS if isinstance(values.get(key), int)), None)
    ffn, positions = sizes["intermediate_size"], sizes["max_position_embeddings"]
    return problems, ModelShape(heads, groups, layers, ffn, positions, experts)
