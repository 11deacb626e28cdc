"""Seconds to compile the plan of a Qwen3-235B-A22B on many ranks, as each rank does it for its own use.

    python benchmarks/plan.py [--quick] [--json PATH]

"slices" describes what all ranks hold and want, "plan" intersects it, "buckets" expands one rank's own moves and cuts
them into exchanges of 512 MiB of bfloat16: the busiest rank's, the slowest.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import publish, table

from mega_rl.bridge.buckets import schedule
from mega_rl.bridge.engine_layout import vllm_series
from mega_rl.bridge.mixture import Mixture
from mega_rl.bridge.plan import compile_plan
from mega_rl.bridge.series import Series
from mega_rl.bridge.shape import ModelShape
from mega_rl.bridge.trainer_layout import megatron_series, padded_vocab_size

BUCKET_ELEMENTS = (512 << 20) // 2
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
            mine += megatron_series(
                shape,
                case.tensor,
                place % case.tensor,
                range(cuts[part], cuts[part + 1]),
                has_embedding=part == 0,
                has_output=part == parts - 1,
                padded_vocab_size=padded_vocab_size(shape.vocab_size, case.tensor),
                expert_parallel=case.expert,
                ep_rank=place // case.expert_tensor % case.expert,
                expert_tensor_parallel=case.expert_tensor,
                etp_rank=place % case.expert_tensor,
            )
        held.append(mine)
    return held


def engines(shape: ModelShape, case: Case, num_ranks: int) -> list[list[Series]]:
    size = case.engine_tensor
    return [vllm_series(shape, size, rank % size, case.engine_expert_parallel) for rank in range(num_ranks)]


def measure(case: Case, num_ranks: int) -> dict[str, float]:
    gc.collect()
    start = time.perf_counter()
    sources, destinations = trainer(QWEN3_235B_A22B, case, num_ranks), engines(QWEN3_235B_A22B, case, num_ranks)
    sliced = time.perf_counter()
    plan = compile_plan(sources, destinations)
    planned = time.perf_counter()
    traffic = plan.traffic - np.diag(plan.traffic.diagonal())
    busiest = int((traffic.sum(0) + traffic.sum(1)).argmax())
    mine = schedule(plan, busiest, CAPACITY)
    ready = time.perf_counter()
    moves = sum(1 for run in mine.copies for _ in run.moves())
    moves += sum(1 for bucket in mine.buckets() for side in (bucket.sends(), bucket.receives()) for _ in side)
    end = time.perf_counter()
    sent = traffic.sum(1)
    return {
        "runs": len(plan.runs),
        "moves": moves,
        "buckets": len(buckets),
        "balance": float(sent.max() / sent.mean()),
        "slices_s": sliced - start,
        "plan_s": planned - sliced,
        "buckets_s": end - ready,
        "total_s": end - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 ranks and two layouts")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    num_ranks, cases = (32, [Case(2, 2, 1, 4, 1, 8, on) for on in (False, True)]) if arguments.quick else (256, CASES)
    results = {str(case): measure(case, num_ranks) for case in cases}
    header = ["layout", "ranks", "runs of all", "moves of one", "buckets", "largest/mean sender"]
    header += ["slices s", "plan s", "buckets s", "total s"]
    rows = [[name, num_ranks, *figures.values()] for name, figures in results.items()]
    publish("Plan of Qwen3-235B-A22B", table(header, rows), "cpu", {"cases": results}, arguments.json)


if __name__ == "__main__":
    main()
