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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import publish, table
from benchmarks.weights.plan import QWEN3_235B_A22B
from mega_rl.bridge.mapping.adapter import adapter_tensors
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.tuning import AdapterPlan
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.fleet.relay import NODE_SLOTS
from mega_rl.models.shape import ModelShape
from mega_rl.rollout.remote import weight_store
from mega_rl.rollout.remote.fleet.store_sink import form_of
from mega_rl.rollout.remote.weight_store import Store
from mega_rl.rollout.sinks import SentWeights
from mega_rl.rollout.store_form import StoreForm

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

LLAMA_70B = ModelShape(
    family="llama",
    num_layers=80,
    hidden_size=8192,
    ffn_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
    norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_position_embeddings=131072,
)


NUM_SLOTS = 3  # versions on the trainer's node: rollout.max_staleness 1


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


def moved(way: str, names: Sequence[str] | None) -> list[Any]:
    """What a version of 70B moves, once the first is there: to a node, and to an engine's worker of TP 8.

    Args:
        names: projections with adapters of rank 16; None: all weights are trained.
    """
    weights = hf_tensors(LLAMA_70B)
    plan = AdapterPlan({name: 16 for name in weights if name.split(".")[-2] in (names or ())})
    changing = None if names is None else frozenset(plan.ranks)
    slots, merged = (plan if way == name else None for name in ("slots", "factors"))
    if slots is not None:
        changing = frozenset(adapter_tensors(LLAMA_70B, slots))
    sent = SentWeights(LLAMA_70B, torch.bfloat16, 1 << 28, torch.device("cpu"), changing, slots, merged=merged)
    form = form_of(sent, 8, num_slots=NUM_SLOTS, salt=1, has_validation=False)
    parts = [(plan.fixed.num_bytes, plan.slot.num_bytes) for plan in form.plans]
    fixed, slot = (sum(of_part) / 1e9 for of_part in zip(*parts, strict=True))
    first = form.plan(0)
    frozen = sum(2 * prod(first.fixed.places[name].size) for name in first.merges) / 1e9
    return [fixed + slot, slot, parts[0][1] / 1e9 + frozen, fixed + NUM_SLOTS * slot, fixed + NODE_SLOTS * slot]


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
    if not arguments.quick:
        attention, every = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
        ways = {
            "all weights": moved("all", None),
            "adapters of all layers, merged by the trainer": moved("sums", attention + every),
            "adapters of all layers, merged by engines": moved("factors", attention + every),
            "adapters of attention, merged by the trainer": moved("sums", attention),
            "adapters of attention, merged by engines": moved("factors", attention),
            "adapters of all layers, in slots": moved("slots", attention + every),
            "adapters of attention, in slots": moved("slots", attention),
        }
        memory = (f"memory of the trainer's node, {NUM_SLOTS} versions", "of another")
        titles = ("70B, TP 8", "first version", "later ones, to a node", "copied by a worker", *memory)
        print("GB of bfloat16\n\n" + table(titles, [[name, *figures] for name, figures in ways.items()]) + "\n")
    publish("Loads of one version by a fleet", table(header, rows), "cpu", found, arguments.json)


if __name__ == "__main__":
    main()
