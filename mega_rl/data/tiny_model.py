"""Small Hugging Face model directories with random weights, for the quickstart and for tests."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from mega_rl.errors import InputError
from mega_rl.types import DTYPES

FAMILIES = ("qwen2", "qwen3", "llama")  # by transformers' names of model types


@dataclass(frozen=True)
class TinyModelSpec:
    """The shape of the model; the defaults give about 0.8 million parameters beside the embedding."""

    family: str = "qwen2"  # qwen2 | qwen3 | llama
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
    """Writes config, generation config, safetensors and tokenizer; the vocabulary is the tokenizer's, unpadded.

    The directory appears whole or not at all.

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
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[spec.dtype])
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id
    )
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
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
    return AutoConfig.for_model(
        spec.family,
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.hidden_size // spec.num_heads,  # Qwen3's default is 128 whatever the width
        tie_word_embeddings=spec.tied,
        max_position_embeddings=spec.max_positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
