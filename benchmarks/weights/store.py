"""Weights from the trainer to engines in other processes: through the store of a node, and through one joint group.

    python -m benchmarks.weights.store [--layers N] [--hidden N] [--vocabulary N] [--rounds N] [--quick] [--json F]

Two trainer ranks, tensor parallel 2, and two engines of one worker each, all processes of one machine, random bfloat16
weights of a Qwen3-like model. Two ways in turn, each from a common start, timed on the slowest process of its kind:

- store: the trainer's ranks write the version into the store and hash what they write; they are free again then. Each
  engine copies it from there and proves by the hashes what it holds.
- group: a transfer over one process group of both sides, as ``rollout.placement=separate`` has it. Trainer and engines
  are held until the last byte is there, and nothing is proved.

Sent: bytes through sockets. Written: bytes copied into memory that both sides map. A push through the store is whole
when the trainer has written and the engine has taken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.report import publish, table
from benchmarks.weights.sync import parse
from mega_rl import platform
from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_series
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard.deposit import Deposit, HashedWrite, summed
from mega_rl.bridge.reshard.execute import Transfer, write_into
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, Slice, indices
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.collectives import broadcast_object, gather_objects
from mega_rl.rollout.remote.weight_store import Store, take
from mega_rl.rollout.store_form import StoreForm

NUM_TRAINERS, NUM_ENGINES = 2, 2
WORLD_SIZE = NUM_TRAINERS + NUM_ENGINES
DTYPE = torch.bfloat16


def model(num_layers: int, hidden: int, vocabulary: int) -> ModelShape:
    return ModelShape(
        family="qwen3",
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_size=4 * hidden,
        num_heads=hidden // 64,
        num_kv_heads=max(4, hidden // 256),
        head_dim=64,
        vocab_size=vocabulary,
        tied=True,
        qkv_bias=False,
        qk_norm=True,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=4096,
    )


def parameters_of(slices: list[Slice], seed: int) -> dict[str, torch.Tensor]:
    """Random parameters as small as the slices allow."""
    sizes: dict[str, list[int]] = {}
    for s in slices:
        ends = [end for _, end in s.local_box]
        sizes[s.local_name] = [max(a, b) for a, b in zip(sizes.get(s.local_name, ends), ends, strict=True)]
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).to(DTYPE) for name, size in sizes.items()}


class Bench:
    """One process: a trainer's rank or an engine's worker."""

    def __init__(self, shape: ModelShape, bucket_bytes: int) -> None:
        self.rank = dist.get_rank()
        self.is_trainer = self.rank < NUM_TRAINERS
        layers = range(shape.num_layers)
        held = [megatron_series(shape, ModelChunk(layers, Shard(rank, NUM_TRAINERS))) for rank in range(2)]
        wanted = vllm_series(shape, 1, 0)
        self.form = StoreForm((tuple(wanted),), DTYPE, num_slots=2, salt=1)
        self.weights = parameters_of(slices_of(held[self.rank]), seed=0) if self.is_trainer else {}
        self.live = {} if self.is_trainer else parameters_of(slices_of(wanted), seed=1)
        start = time.perf_counter()
        self.deposit = Deposit(compile_plan([*held, []], [[], [], wanted]), self.rank) if self.is_trainer else None
        plan = compile_plan([*held, [], []], [[], [], *[wanted] * NUM_ENGINES])
        self.transfer = Transfer(plan, self.rank, WORLD_SIZE, None, bucket_bytes)
        self.plan_s = time.perf_counter() - start
        store = Store(self.form) if self.rank == 0 else None
        location = broadcast_object(store and store.location)
        self.store = store or Store(self.form, location)
        # By way, of every round: seconds, and CPU seconds.
        self.figures: dict[str, list[tuple[float, float]]] = {"put": [], "take": [], "group": []}
        self.bytes = {"written": 0, "sent": 0}

    def read(self, name: str, hf_name: str, hf_box: Box, box: Box) -> torch.Tensor:
        return self.weights[name][indices(box)]

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start, cpu_start = time.perf_counter(), time.process_time()
        yield
        self.figures[name].append((time.perf_counter() - start, time.process_time() - cpu_start))

    def through_store(self, version: int) -> None:
        dist.barrier()
        digest = {}
        if self.deposit is not None:
            with self.timed("put"):
                write = HashedWrite(write_into(self.store.parameters(0, version)), self.form.salt)
                self.bytes["written"] = self.deposit.run(self.read, write, DTYPE).bytes_local
                digest = write.digest()
        found, slot = summed(gather_objects(digest)), self.form.plan(0).slot
        stored = None
        if self.rank == 0:
            hashes = np.array([found[key] for key in slot.numbers], np.uint64)
            stored = self.store.seal(version, 2 * version + 2, [(np.zeros(0, np.uint64), hashes)])
        stored = broadcast_object(stored)
        if self.deposit is None:
            with self.timed("take"):
                take(self.store, 0, self.form.slot(version), stored.of(0), self.live)

    def through_group(self, version: int) -> None:
        dist.barrier()
        with self.timed("group"):
            self.bytes["sent"] = self.transfer.run(self.read, write_into(self.live), DTYPE).bytes_sent

    def clear(self) -> None:
        for tensor in self.live.values():
            tensor.zero_()


def worker(rank: int, arguments: argparse.Namespace, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/store", rank=rank, world_size=WORLD_SIZE)
    bench = Bench(model(arguments.layers, arguments.hidden, arguments.vocabulary), arguments.bucket_mib << 20)
    for version in range(arguments.rounds + 1):  # the first one is warm-up
        ways = (bench.through_store, bench.through_group)
        for way in ways if version % 2 else ways[::-1]:
            bench.clear()
            way(version)
    found = gather_objects((bench.figures, bench.bytes, bench.plan_s))
    rounds = {name: list(zip(*(f[name][1:] for f, _, _ in found if f[name]), strict=True)) for name in bench.figures}
    seconds = {name: [max(s for s, _ in parts) for parts in of_way] for name, of_way in rounds.items()}
    cpu_seconds = {name: [sum(s for _, s in parts) for parts in of_way] for name, of_way in rounds.items()}
    moved = {name: sum(b[name] for _, b, _ in found) for name in bench.bytes}
    if rank == 0:
        result = {"seconds": seconds, "cpu_seconds": cpu_seconds, "bytes": moved, "plan_s": found[0][2]}
        result["slot_bytes"] = sum(plan.slot.num_bytes for plan in bench.form.plans)
        (directory / "results.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        mp.start_processes(worker, (arguments, directory), nprocs=WORLD_SIZE, start_method="fork")
        results = json.loads((directory / "results.json").read_text())
    seconds = {name: statistics.median(runs) for name, runs in results["seconds"].items()}
    put, taken, group = (seconds[name] for name in ("put", "take", "group"))
    of_put, of_take, of_group = (statistics.median(results["cpu_seconds"][name]) for name in ("put", "take", "group"))
    header = ("way", "GB written", "GB sent", "trainer held, s", "engine held, s", "whole, s", "CPU seconds of all")
    written, sent = (results["bytes"][name] / 1e9 for name in ("written", "sent"))
    rows = [["store", written, 0.0, put, taken, put + taken, of_put + of_take]]
    rows.append(["group", 0.0, sent, group, group, group, of_group])
    size = results["slot_bytes"] / 1e9
    title = f"Weight store: {size:.2f} GB of bfloat16 to {NUM_ENGINES} engines, {os.cpu_count()} cores, median of "
    publish(title + str(arguments.rounds), table(header, rows), platform.current().name, results, arguments.json)


def main(argv: list[str] | None = None) -> None:
    platform.select("cpu")  # the exchange is gloo's
    compare(parse(argv, __doc__))


if __name__ == "__main__":
    main()
