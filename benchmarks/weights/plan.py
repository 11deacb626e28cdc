"""Seconds to plan the weight sync of a Qwen3-235B-A22B on many ranks, as each rank does it for its own use.

    python -m benchmarks.weights.plan [--quick] [--json PATH]

Before its first sync a rank needs three things: "slices", what all ranks hold and want; "plan", their intersection;
"schedule", its own part in exchanges of the default ``bridge.bucket_bytes`` of bfloat16. "Expansion" is what every
sync spends in all on making this rank's moves, one exchange at a time. The rank is the busiest, the slowest.
Medians of the rounds: the clock's seconds, and the processor's, which other programs on the machine hardly change.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import publish, table
from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_series
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard.buckets import schedule
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.series import Series
from mega_rl.config.schema.sampling import BridgeConfig
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape

CAPACITY = BridgeConfig().bucket_bytes // (2 * 2)  # elements of bfloat16; one of two exchanges that are under way
ROUNDS = 3
QWEN3_235B_A22B = ModelShape(
    family="qwen3_moe",
    num_layers=94,
    hidden_size=4096,
    ffn_size=12288,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    max_position_embeddings=40960,
    mixture=Mixture(
        layers=frozenset(range(94)),
        num_experts=128,
        experts_per_token=8,
        ffn_size=1536,
        normalize_weights=True,
    ),
)


@dataclass(frozen=True)
class Case:
    """Sizes of the trainer's and the engine's axes."""

    tensor: int
    pipeline: int
    chunks: int  # per rank; more than 1: interleaved pipeline
    expert: int
    expert_tensor: int
    engine_tensor: int
    engine_expert_parallel: bool

    def __str__(self) -> str:
        chunks = f" VPP{self.chunks}" if self.chunks > 1 else ""
        trainer = f"TP{self.tensor} PP{self.pipeline}{chunks} EP{self.expert} ETP{self.expert_tensor}"
        return f"{trainer} -> TP{self.engine_tensor}{' EP' if self.engine_expert_parallel else ''}"


CASES = [
    Case(4, 8, 1, 8, 1, 8, False),
    Case(4, 8, 1, 8, 1, 8, True),
    Case(4, 8, 1, 8, 1, 16, False),
    Case(4, 8, 1, 8, 1, 16, True),
    Case(4, 8, 2, 8, 1, 8, False),
    Case(4, 8, 2, 8, 1, 16, True),
    Case(4, 4, 1, 16, 4, 8, False),
]


def trainer(shape: ModelShape, case: Case, num_ranks: int) -> list[list[Series]]:
    """What every rank holds; stages may differ by a layer, for 94 has few divisors."""
    per_stage, parts = num_ranks // case.pipeline, case.pipeline * case.chunks
    cuts = [i * shape.num_layers // parts for i in range(parts + 1)]
    held: list[list[Series]] = []
    for rank in range(num_ranks):
        stage, place = divmod(rank, per_stage)
        mine: list[Series] = []
        for part in range(stage, parts, case.pipeline):
            chunk = ModelChunk(
                range(cuts[part], cuts[part + 1]),
                Shard(place % case.tensor, case.tensor),
                has_embedding=part == 0,
                has_output=part == parts - 1,
                experts=Shard(place // case.expert_tensor % case.expert, case.expert),
                expert_tensor=Shard(place % case.expert_tensor, case.expert_tensor),
            )
            mine += megatron_series(shape, chunk)
        held.append(mine)
    return held


def engines(shape: ModelShape, case: Case, num_ranks: int) -> list[list[Series]]:
    size = case.engine_tensor
    return [vllm_series(shape, size, rank % size, case.engine_expert_parallel) for rank in range(num_ranks)]


class Watch:
    """Seconds since the last look: of the clock, and of this process's processor."""

    def __init__(self) -> None:
        self._last = time.perf_counter(), time.process_time()

    def look(self) -> tuple[float, float]:
        before, self._last = self._last, (time.perf_counter(), time.process_time())
        return self._last[0] - before[0], self._last[1] - before[1]


def measure(case: Case, num_ranks: int) -> dict[str, float]:
    watch = Watch()
    sources, destinations = trainer(QWEN3_235B_A22B, case, num_ranks), engines(QWEN3_235B_A22B, case, num_ranks)
    slices = watch.look()
    plan = compile_plan(sources, destinations)
    planned = watch.look()
    traffic = plan.traffic - np.diag(plan.traffic.diagonal())
    busiest = int((traffic.sum(0) + traffic.sum(1)).argmax())
    mine = schedule(plan, busiest, CAPACITY)
    scheduled = watch.look()
    num_moves = sum(1 for run in mine.copies for _ in run.moves())
    num_moves += sum(1 for bucket in mine.buckets() for side in (bucket.sends(), bucket.receives()) for _ in side)
    expanded = watch.look()
    sent = traffic.sum(1)
    return {
        "runs": sum(len(flow.shares) for flow in plan.flows),
        "moves": num_moves,
        "buckets": mine.num_buckets,
        "balance": float(sent.max() / sent.mean()),
        "slices_s": slices[0],
        "plan_s": planned[0],
        "schedule_s": scheduled[0],
        "total_s": slices[0] + planned[0] + scheduled[0],
        "total_cpu_s": slices[1] + planned[1] + scheduled[1],
        "expansion_s": expanded[0],
        "expansion_cpu_s": expanded[1],
    }


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 ranks, two layouts, one round")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    num_ranks, num_rounds, cases = 256, ROUNDS, CASES
    if arguments.quick:
        num_ranks, num_rounds, cases = 32, 1, [Case(2, 2, 1, 4, 1, 8, on) for on in (False, True)]
    results = {str(case): median([measure(case, num_ranks) for _ in range(num_rounds)]) for case in cases}
    header = ["layout", "ranks", "runs of all", "moves of one", "exchanges", "largest/mean sender"]
    header += ["slices s", "plan s", "schedule s", "before the first sync s", "of them CPU s"]
    header += ["expansion in a sync s", "of them CPU s"]
    rows = [[name, num_ranks, *figures.values()] for name, figures in results.items()]
    print(f"Load of the machine at the end: {os.getloadavg()[0]:.0f} programs on {os.cpu_count()} cores.\n")
    publish("Plan of Qwen3-235B-A22B", table(header, rows), "cpu", {"cases": results}, arguments.json)


if __name__ == "__main__":
    main()
