"""What it costs to have a whole fleet load one version: bytes of the arguments of all loads, and processor seconds.

    python -m benchmarks.weights.fleet_load [--quick] [--json F]

Shapes only: the memory of the store is taken and never filled, and there is neither Ray nor an engine. Counted is what
the trainer's rank 0 does for a version: it puts the hashes of its tensors into the store, and tells each worker of each
engine what to load. Beside it, once for each worker of an engine: the form of the store, and what follows from it.
"""

from __future__ import annotations

import argparse
import pickle
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import publish, table
from benchmarks.weights.plan import QWEN3_235B_A22B
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.models.shape import ModelShape
from mega_rl.rollout.remote import weight_store
from mega_rl.rollout.remote.weight_store import Store, StoreForm

MIXTURE = QWEN3_235B_A22B.mixture
assert MIXTURE is not None
QWEN3_30B_A3B = replace(
    QWEN3_235B_A22B,
    num_layers=48,
    hidden_size=2048,
    ffn_size=6144,
    num_heads=32,
    mixture=replace(MIXTURE, layers=frozenset(range(48)), ffn_size=768),
)


@dataclass(frozen=True)
class Case:
    name: str
    shape: ModelShape
    num_engines: int
    engine_size: int


CASES = (
    Case("30B-A3B, 64 engines x TP 4", QWEN3_30B_A3B, 64, 4),
    Case("235B-A22B, 16 engines x TP 8", QWEN3_235B_A22B, 16, 8),
)
QUICK = Case("4 layers of 30B-A3B, 4 engines x TP 2", replace(QWEN3_30B_A3B, num_layers=4), 4, 2)


def measured(case: Case) -> dict[str, float]:
    workers = tuple(tuple(vllm_series(case.shape, case.engine_size, rank)) for rank in range(case.engine_size))
    form = StoreForm(workers, torch.bfloat16, num_slots=3, salt=1)
    store = Store(form)
    form_bytes = len(pickle.dumps(store.form))
    start = time.process_time()
    pickle.loads(pickle.dumps(form)).plan(0)
    plan_s = time.process_time() - start
    generator = np.random.default_rng(1)
    counts = [[len(part.numbers) for part in plan.parts] for plan in form.plans]
    hashes = [tuple(generator.integers(0, 1 << 63, count, np.uint64) for count in of_parts) for of_parts in counts]
    start, told = time.process_time(), list[int]()
    stored = store.seal(1, 2, hashes)
    for _ in range(case.num_engines):
        for rank in range(case.engine_size):
            told.append(len(pickle.dumps((store.location_of(1), stored.of(rank)))))
    seconds = time.process_time() - start
    store.close()
    return {
        "workers": len(told),
        "tensors": sum(map(sum, counts)),
        "form_bytes": form_bytes,
        "plan_s": plan_s,
        "bytes": max(told),
        "seconds": seconds,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args(argv)
    weight_store.available_bytes = lambda: 1 << 60  # nothing is written, so no host needs it
    header = ("fleet", "workers", "tensors of an engine", "form, kB", "its plan, CPU s", "load, bytes", "all, CPU s")
    found = {case.name: measured(case) for case in ((QUICK,) if arguments.quick else CASES)}
    rows = [
        [name, one["workers"], one["tensors"], one["form_bytes"] / 1e3, one["plan_s"], one["bytes"], one["seconds"]]
        for name, one in found.items()
    ]
    publish("Loads of one version by a fleet", table(header, rows), "cpu", found, arguments.json)


if __name__ == "__main__":
    main()
