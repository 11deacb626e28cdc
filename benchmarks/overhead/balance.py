"""Seconds to lay out a step's sequences over ranks and micro-batches, and how far from the bounds it ends.

    python -m benchmarks.overhead.balance [--quick] [--json PATH]

Two bounds: no schedule's largest rank costs less than the mean, and none has fewer micro-batches than there are
sequences of more than half of one, or than all tokens fill, both rounded up to equally many a rank. Saturated batches,
whose responses mostly reach their limit, are the hard ones. Every rank does it before each optimizer step. Medians of
processor time over the rounds.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from pathlib import Path

from benchmarks.report import publish, table
from mega_rl.parallel.schedule import balance

ROUNDS = 3
CAP = 16384  # tokens of a micro-batch
SLOPE = 1 / 65536  # a 7B model's: attention costs as much as the matrix products at 65,536 tokens
CASES = [(8192, 2, 0.52), (8192, 8, 0.52), (8192, 64, 0.52), (8192, 8, 0.02), (8192, 64, 0.02)]
HEADER = ["sequences", "shortest / cap", "ranks", "seconds", "largest rank / mean", "micro-batches / bound"]


def measure(num_sequences: int, num_ranks: int, shortest: float, rounds: int) -> list[float]:
    generator = random.Random(0)
    lengths = [int(CAP * generator.uniform(shortest, 1.0)) for _ in range(num_sequences)]
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        plan = balance(lengths, num_ranks, CAP, attention_slope=SLOPE)
        seconds.append(time.process_time() - start)
    costs = [sum(lengths[i] * (1 + SLOPE * lengths[i]) for part in rank for i in part) for rank in plan]
    fewest = math.ceil(max(sum(2 * length > CAP for length in lengths), sum(lengths) / CAP) / num_ranks)
    return [
        statistics.median(seconds),
        max(costs) * num_ranks / sum(costs),
        len(plan[0]) / fewest,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the sequences, one round")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    rows, results = [], []
    for count, num_ranks, shortest in CASES:
        count = count // 16 if options.quick else count
        figures = measure(count, num_ranks, shortest, 1 if options.quick else ROUNDS)
        rows.append([count, shortest, num_ranks, figures[0], *(f"{ratio:.4f}" for ratio in figures[1:])])
        results.append(dict(zip(HEADER, [count, shortest, num_ranks, *figures], strict=True)))
    publish("Sequences to ranks and micro-batches", table(HEADER, rows), "cpu", {"cases": results}, options.json)


if __name__ == "__main__":
    main()
