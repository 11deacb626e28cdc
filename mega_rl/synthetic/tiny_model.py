"""Small Hugging Face model directories with random weights, for the quickstart and for tests."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from mega_rl.errors import InputError
from mega_rl.types import DTYPES

SEEING = "qwen2_5_vl"
FAMILIES = ("qwen2", "qwen3", "llama", SEEING)  # by transformers' names of model types
PATCH_PIXELS, MERGE = 4, 2  # a token of a picture stands for 8 x 8 pixels
SEEING_DEVIATION = 0.05  # of its random weights: with less, hundreds of steps go by before it sees anything
TOWER: dict[str, Any] = {  # what makes embeddings of pictures in a model of the family SEEING
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": PATCH_PIXELS,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [0],
}
PICTURE_TOKENS = {  # what config.json calls the special tokens that stand around and for a picture
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


@dataclass(frozen=True)
class TinyModelSpec:
    """The shape of the model; the defaults give about 0.8 million parameters beside the embedding."""

    family: str = "qwen2"  # one of FAMILIES
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn: int = 384
    tied: bool = True  # the output head shares the embedding
    max_positions: int = 2048  # tokens
    dtype: str = "float32"  # float32 | bfloat16
    seed: int = 0


def write_tiny_model(
    out: Path, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerFast, overwrite: bool = False
) -> Path:
    """Writes config, generation config, safetensors and tokenizer, and for a model that sees its image processor.

    The vocabulary is the tokenizer's, unpadded. The directory appears whole or not at all.

    Args:
        out: the new directory.
        overwrite: replace a directory that is there already.

    Raises:
        InputError: a shape that does not divide, an unknown family or dtype, or ``out`` exists.
    """
    config = tiny_config(spec, tokenizer)
    if out.exists() and not overwrite:
        raise InputError(f"--out {out} exists already; remove it, choose another or pass --overwrite")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        kind = AutoModelForImageTextToText if spec.family == SEEING else AutoModelForCausalLM
        model = kind.from_config(config, dtype=DTYPES[spec.dtype])
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id
    )
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if spec.family == SEEING:
            _write_processors(temporary)
        if out.exists():
            shutil.rmtree(out)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def tiny_config(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """The Hugging Face configuration of the spec."""
    if spec.family not in FAMILIES:
        raise InputError(f"--family is {spec.family!r}; choose one of {', '.join(FAMILIES)}")
    if spec.dtype not in DTYPES:
        raise InputError(f"--dtype is {spec.dtype!r}; choose one of {', '.join(DTYPES)}")
    for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn", "max_positions"):
        if getattr(spec, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(spec, name)}; give at least 1")
    if spec.hidden_size % spec.num_heads or spec.hidden_size // spec.num_heads % 2:
        raise InputError(
            f"--num-heads {spec.num_heads} does not divide --hidden-size {spec.hidden_size} into heads of even width"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise InputError(f"--num-kv-heads {spec.num_kv_heads} does not divide --num-heads {spec.num_heads}")
    keys = {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.hidden_size // spec.num_heads,  # Qwen3's default is 128 whatever the width
        "max_position_embeddings": spec.max_positions,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if spec.family == SEEING:
        return _seeing_config(keys, spec, tokenizer)
    return AutoConfig.for_model(spec.family, tie_word_embeddings=spec.tied, **keys)


def _seeing_config(keys: dict[str, Any], spec: TinyModelSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in PICTURE_TOKENS.items()}
    if None in ids.values() or tokenizer.unk_token_id in ids.values():
        raise InputError(f"--family {SEEING} needs the special tokens of pictures: choose --tokenizer shapes")
    channels = keys["head_dim"] // 2
    sections = [channels - 2 * (3 * channels // 8), 3 * channels // 8, 3 * channels // 8]  # of time, height and width
    deviation = {"initializer_range": SEEING_DEVIATION}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    return AutoConfig.for_model(
        SEEING,
        text_config={**keys, **deviation, "rope_parameters": rope, "tie_word_embeddings": spec.tied},
        vision_config={**TOWER, **deviation, "out_hidden_size": spec.hidden_size},
        tie_word_embeddings=spec.tied,
        **deviation,
        **ids,
    )


def _write_processors(directory: Path) -> None:
    """By the names that the hub's directories have; engines read that of videos too."""
    token = (PATCH_PIXELS * MERGE) ** 2  # pixels
    common = {
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": PATCH_PIXELS,
        "temporal_patch_size": TOWER["temporal_patch_size"],
        "merge_size": MERGE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 4 * token, "longest_edge": 64 * token},
    }
    image = {**common, "image_processor_type": "Qwen2VLImageProcessor"}
    video = {**common, "video_processor_type": "Qwen2VLVideoProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(image, indent=2))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))
