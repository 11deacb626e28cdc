"""Attention of 16,384 tokens shared by two ranks, and its gradients, against one call that sees all; each method."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

import mega_rl.megatron as megatron  # before Megatron-core, which it prepares
from mega_rl.megatron.layers.attention import PackedAttention, packed_sequences
from mega_rl.parallel.zigzag import zigzag_positions

LENGTHS = [16384, 8]
HEADS, KV_HEADS, WIDTH = 2, 2, 8


def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One sequence after the other: [T, H * D]."""
    parts = zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True)
    turned = ([x.transpose(0, 1)[None] for x in part] for part in parts)
    outputs = [F.scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1) for part in turned]
    return torch.cat(outputs).flatten(1)


def main() -> None:
    assert megatron is not None
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(LENGTHS), n, WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS)]
    whole = [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]
    factors = torch.randn(sum(LENGTHS), HEADS * WIDTH, generator=generator)
    expected = reference(*whole)
    (expected * factors).sum().backward()
    own = zigzag_positions(LENGTHS, num_ranks, rank)
    settings = SimpleNamespace(kv_channels=WIDTH, attention_dropout=0.0)
    attention = PackedAttention(settings, 1, AttnMaskType.causal, "self")  # type: ignore[arg-type]
    for method in ("gather", "ulysses"):
        parts = [x.detach()[own].requires_grad_() for x in whole]
        packing = packed_sequences(LENGTHS, dist.group.WORLD, torch.device("cpu"), method)  # type: ignore[arg-type]
        output = attention(*parts, packed_seq_params=packing)
        (output * factors[own]).sum().backward()
        pairs = [(output.detach(), expected.detach()[own])]
        pairs += [(part.grad, x.grad[own]) for part, x in zip(parts, whole, strict=True)]  # type: ignore[index]
        errors = " ".join(f"{float((a - b).abs().max() / b.abs().max()):.2e}" for a, b in pairs)
        print(f"ERRORS {method} {rank} {errors}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
