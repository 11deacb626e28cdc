"""Attention of one layer shared by context-parallel ranks: bytes that a rank receives, and seconds, of each method.

    torchrun --nproc-per-node 2 -m benchmarks.training.context [--tokens 16384] [--quick] [--json PATH]

One sequence, float32, over gloo; forward and backward pass. What ``parallel.context_method`` names is measured side by
side, round by round in turns; medians of wall time of the slowest rank. The outputs of both are compared too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType

import mega_rl.megatron as megatron  # before Megatron-core, which it prepares
from benchmarks.report import publish, table
from mega_rl.megatron.layers.attention import PackedAttention, packed_sequences

METHODS = ("gather", "ulysses")
CASES = [(8, 8, 64), (8, 2, 64)]  # query heads, key/value heads, width of a head
ROUNDS = 3
HEADER = ["heads", "key/value heads", "method", "MB received", "seconds", "largest difference"]


def received_bytes(method: str, num_tokens: int, heads: int, kv_heads: int, width: int, num_ranks: int) -> int:
    """Of one rank, in the forward pass and as many in the backward pass, of float32 numbers."""
    own = num_tokens // num_ranks
    per_token = 2 * kv_heads * (num_ranks - 1) if method == "gather" else 2 * (heads + kv_heads) / num_ranks
    return int(2 * own * per_token * width * 4 * (1 if method == "gather" else num_ranks - 1))


def run(attention: Any, tensors: list[torch.Tensor], packing: Any) -> tuple[float, torch.Tensor]:
    dist.barrier()
    start = time.perf_counter()
    output = attention(*tensors, packed_seq_params=packing)
    output.sum().backward()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), output.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, one round")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    assert megatron is not None
    num_tokens, rounds = (1024, 1) if options.quick else (options.tokens, ROUNDS)
    dist.init_process_group("gloo")
    group, num_ranks = dist.group.WORLD, dist.get_world_size()
    rows, results = [], []
    for heads, kv_heads, width in CASES:
        config = SimpleNamespace(kv_channels=width, attention_dropout=0.0)
        attention = PackedAttention(config, 1, AttnMaskType.causal, "self")  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(dist.get_rank())
        tensors = [
            torch.randn(num_tokens // num_ranks, n, width, generator=generator, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        ]
        packings = {method: packed_sequences([num_tokens], group, torch.device("cpu"), method) for method in METHODS}
        found = [{method: run(attention, tensors, packings[method]) for method in METHODS} for _ in range(rounds)]
        for method in METHODS:
            seconds = statistics.median(one[method][0] for one in found)
            difference = float((found[0][method][1] - found[0][METHODS[0]][1]).abs().max())
            received = received_bytes(method, num_tokens, heads, kv_heads, width, num_ranks) / 1e6
            rows.append([heads, kv_heads, method, received, seconds, f"{difference:.1e}"])
            results.append(dict(zip(HEADER, [heads, kv_heads, method, received, seconds, difference], strict=True)))
    if dist.get_rank() == 0:
        title = f"Attention of {num_tokens} tokens over {num_ranks} ranks"
        publish(title, table(HEADER, rows), "cpu", {"cases": results}, options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
