"""Seconds of the three matrix products of a linear layer in float32: ``platform.operators.products`` against torch.mm.

Layers of a tiny, a small and a 0.5B model, as many rows as a decoding step and a micro-batch have. The two ways take
turns, each figure is a median of rounds. On a processor of Intel, or without AVX-512, both are the same.

Letters: T rows (tokens), D inputs, F outputs of a layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import publish, table
from mega_rl.platform.operators import products

LAYERS = ((192, 1024), (512, 192), (1024, 4096), (896, 9728))  # D, F
ROWS = (8, 64, 2048)
REPEATED_FLOPS = 2e9  # of one round


def ways(x_TD: Tensor, weight_FD: Tensor, grad_TF: Tensor) -> dict[str, tuple[Callable[[], Tensor], ...]]:
    """Ours and torch's, by the name of the product."""
    return {
        "outputs": (lambda: products.outputs(x_TD, weight_FD), lambda: x_TD @ weight_FD.t()),
        "input gradient": (lambda: products.input_gradient(grad_TF, weight_FD), lambda: grad_TF @ weight_FD),
        "weight gradient": (lambda: products.weight_gradient(grad_TF, x_TD), lambda: grad_TF.t() @ x_TD),
    }


def seconds(product: Callable[[], Tensor], repeats: int) -> float:
    begun = time.perf_counter()
    for _ in range(repeats):
        product()
    return (time.perf_counter() - begun) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="default: 1")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one round: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rounds = 1 if arguments.quick else arguments.rounds
    rows: list[list[object]] = []
    for D, F in LAYERS:
        for T in ROWS:
            repeats = 1 if arguments.quick else max(1, int(REPEATED_FLOPS / (2 * T * D * F)))
            for name, pair in ways(torch.randn(T, D), torch.randn(F, D), torch.randn(T, F)).items():
                taken = [[seconds(product, repeats) for product in pair] for _ in range(rounds + 1)][1:]
                own, plain = (2 * T * D * F / statistics.median(one) / 1e9 for one in zip(*taken, strict=True))
                ratio = statistics.median(second / first for first, second in taken)
                rows.append([f"{name}, T {T:,}, D {D}, F {F:,}", plain, own, ratio])
    results = {str(name): {"torch": plain, "mega_rl": own, "ratio": ratio} for name, plain, own, ratio in rows}
    results["onednn"] = products.is_onednn_faster()
    header = ["product", "torch.mm, GFLOP/s", "mega_rl, GFLOP/s", "ratio of times"]
    publish("Matrix products in float32", table(header, rows), "cpu", results, arguments.json)


if __name__ == "__main__":
    main()
