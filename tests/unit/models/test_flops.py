"""What a token costs, against transformers' own parameters and torch's count of operations."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mega_rl.models.flops import attention_slope, matmul_weights
from mega_rl.models.shape import parse_config
from tests import families


@pytest.mark.parametrize("name", families.CONTRACT.own)
def test_weights_that_multiply_a_token_are_those_of_the_model(name: str) -> None:
    model = families.CONTRACT.new_model(name)
    config = families.CONTRACT.config(name)
    expected = 0
    for weight, tensor in model.named_parameters():
        if tensor.dim() < 2 or "embed_tokens" in weight:
            continue
        share = 1.0
        if ".experts." in weight:  # a token passes some of a layer's experts
            share = config["num_experts_per_tok"] / config.get("num_experts", config.get("n_routed_experts", 0))
        expected += round(tensor.numel() * share)
    if config["tie_word_embeddings"]:
        expected += config["vocab_size"] * config["hidden_size"]
    assert matmul_weights(parse_config(config, name)) == expected


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3_whole_queries"])
def test_attention_costs_as_much_as_the_products_at_the_length_that_the_slope_says(name: str) -> None:
    """What grows with the square of the length, by torch's count, which has all keys and not the causal half."""
    shape = parse_config(families.CONTRACT.config(name), name)
    model = families.CONTRACT.new_model(name, attn_implementation="eager")

    def flops(tokens: int) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.arange(tokens)[None])
        return counter.get_total_flops()

    squared = (flops(96) - 2 * flops(48)) / (96**2 - 2 * 48**2)
    assert squared / 2 == pytest.approx(attention_slope(shape) * 2 * matmul_weights(shape), rel=1e-6)
