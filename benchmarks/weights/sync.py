"""Weights from trainer shards into engine parameters: the bridge against the usual way and against a plain copy.

Four processes, gloo, random bfloat16 weights of a Qwen3-like model. The ways, in turn, each timed on the slowest rank:

- mega_rl: the plan carried out by ``mega_rl.bridge.reshard.execute.Transfer``.
- gather: the usual way. Each Hugging Face tensor is gathered over the tensor-parallel ranks, broadcast over the
  pipeline, and goes through the ``load_weights`` of vLLM's own model.
- copy: each rank copies the bytes that its engine parameters need from memory that has been written to, whole
  parameters at a time: what the memory of this machine can do.

All write into the same parameters, those of a live model of vLLM's classes (``vllm_model.py``). After mega_rl and
gather every weight is proved (``mega_rl.bridge.reshard.proof``); the proof of mega_rl is timed. Memory is the peak
resident set of the largest rank above what it held before the way began. CPU time is the sum over the ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.report import publish, table
from benchmarks.weights.vllm_model import VLLMModel, write_config
from mega_rl import platform
from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_slices
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_series, vllm_slices
from mega_rl.bridge.reshard.execute import Transfer
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.reshard.proof import Proof, colocated
from mega_rl.bridge.slices import Box, Slice, indices
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.collectives import broadcast_object, gather_objects

WORLD_SIZE = 4
DTYPE = torch.bfloat16
WAYS = ("mega_rl", "gather", "copy")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    tp: int
    pp: int
    engine_tp: int

    @property
    def name(self) -> str:
        copies = WORLD_SIZE // (self.tp * self.pp)
        return f"TP{self.tp} PP{self.pp} DP{copies} -> {WORLD_SIZE // self.engine_tp} x TP{self.engine_tp}"


CASES = (Case(2, 2, 2), Case(2, 1, 2), Case(4, 1, 1))


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


def parameters_of(slices: list[Slice], seed: int) -> Tensors:
    """Parameters as small as the slices allow; a piece depends on its tensor and place alone."""
    sizes: dict[str, list[int]] = {}
    for s in slices:
        ends = [end for _, end in s.local_box]
        sizes[s.local_name] = [max(a, b) for a, b in zip(sizes.get(s.local_name, ends), ends, strict=True)]
    local = {name: torch.zeros(size, dtype=DTYPE) for name, size in sizes.items()}
    for s in slices:
        key = hash((seed, *(n for ends in s.hf_box for n in ends), *s.hf_name.encode())) % (1 << 60)
        piece = local[s.local_name][indices(s.local_box)]
        piece.copy_(torch.randn(piece.shape, generator=torch.Generator().manual_seed(key)))
    return local


class Bench:
    """One case on one rank."""

    def __init__(self, shape: ModelShape, case: Case, bucket_bytes: int, model_dir: Path) -> None:
        self.rank, self.case = dist.get_rank(), case
        self.sizes = hf_tensors(shape)
        per_stage = shape.num_layers // case.pp
        self.sources = [self._trainer(shape, rank, per_stage) for rank in range(WORLD_SIZE)]
        self.wanted = [vllm_slices(shape, case.engine_tp, rank % case.engine_tp) for rank in range(WORLD_SIZE)]
        self.weights = parameters_of(self.sources[self.rank], seed=0)
        self.model = VLLMModel(model_dir, case.engine_tp, self.rank, broadcast_object(uuid.uuid4().hex[:12]))
        self.engine = self.model.parameters
        self.copy_from = {name: torch.randn_like(tensor) for name, tensor in self.engine.items()}
        start = time.perf_counter()
        plan = compile_plan(self.sources, self.wanted)
        self.transfer = Transfer(plan, self.rank, WORLD_SIZE, None, bucket_bytes)
        self.plan_s = time.perf_counter() - start
        engine = [vllm_series(shape, case.engine_tp, rank) for rank in range(case.engine_tp)]
        self.proof = Proof(self.sizes, self.sources[self.rank], engine, WORLD_SIZE, is_sample=False, seed=0)
        model_size = case.tp * case.pp
        self.replica = self.rank // model_size * model_size  # first rank of this copy of the model
        self.groups = {}
        for start_rank in range(0, WORLD_SIZE, model_size):
            stages = [range(start_rank + p * case.tp, start_rank + (p + 1) * case.tp) for p in range(case.pp)]
            for ranks in [*stages, *zip(*stages, strict=True)]:
                if tuple(ranks) not in self.groups:
                    self.groups[tuple(ranks)] = dist.new_group(list(ranks))

    def _trainer(self, shape: ModelShape, rank: int, per_stage: int) -> list[Slice]:
        stage, tensor = rank % (self.case.tp * self.case.pp) // self.case.tp, rank % self.case.tp
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        is_first, is_last = stage == 0, stage == self.case.pp - 1
        return megatron_slices(shape, ModelChunk(layers, Shard(tensor, self.case.tp), is_first, is_last))

    def read(self, name: str, hf_name: str, hf_box: Box, box: Box) -> torch.Tensor:
        return self.weights[name][indices(box)]

    def write(self, name: str, hf_name: str, hf_box: Box, box: Box, piece: torch.Tensor) -> None:
        self.engine[name][indices(box)].copy_(piece)

    def mega_rl(self) -> None:
        self.transfer_count = self.transfer.run(self.read, self.write, DTYPE)

    def copy(self) -> None:
        for name, tensor in self.engine.items():
            tensor.copy_(self.copy_from[name])

    def gather(self) -> None:
        self.model.load_weights(self._whole_tensors())

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        stage_of, places = self._places()
        tp, model_size = self.case.tp, self.case.tp * self.case.pp
        stage = (self.rank - self.replica) // tp
        for name, size in self.sizes.items():
            full = torch.empty(size, dtype=DTYPE)
            owner = self.replica + stage_of[name] * tp
            if stage == stage_of[name]:
                self._assemble(full, name, places, owner)
            if self.case.pp > 1:
                peers = tuple(range(self.replica + self.rank % tp, self.replica + model_size, tp))
                dist.broadcast(full, owner + self.rank % tp, group=self.groups[peers])
            yield name, full

    def _places(self) -> tuple[dict[str, int], dict[tuple[int, str], list[Slice]]]:
        """The first pipeline stage that holds each tensor, and the slices of each rank and tensor."""
        stage_of: dict[str, int] = {}
        places: dict[tuple[int, str], list[Slice]] = defaultdict(list)
        for rank in range(self.replica, self.replica + self.case.tp * self.case.pp):
            for piece in self.sources[rank]:
                stage_of.setdefault(piece.hf_name, (rank - self.replica) // self.case.tp)
                places[rank, piece.hf_name].append(piece)
        return stage_of, places

    def _assemble(self, full: torch.Tensor, name: str, places: dict[tuple[int, str], list[Slice]], owner: int) -> None:
        members = tuple(range(owner, owner + self.case.tp))
        mine = places[self.rank, name]
        if all(piece.hf_box == tuple((0, n) for n in full.shape) for piece in mine):  # replicated
            full.copy_(self.weights[mine[0].local_name][indices(mine[0].local_box)])
            return
        counts = [sum(full[indices(p.hf_box)].numel() for p in places[rank, name]) for rank in members]
        flat = torch.zeros(max(counts), dtype=DTYPE)
        own = torch.cat([self.weights[p.local_name][indices(p.local_box)].reshape(-1) for p in mine])
        flat[: own.numel()] = own
        shards = [torch.empty_like(flat) for _ in members]
        dist.all_gather(shards, flat, group=self.groups[members])
        for rank, shard in zip(members, shards, strict=True):
            start = 0
            for p in places[rank, name]:
                target = full[indices(p.hf_box)]
                target.copy_(shard[start : start + target.numel()].view(target.shape))
                start += target.numel()

    def timed(self, way: Callable[[], None]) -> tuple[float, float, int]:
        """Seconds of the slowest rank, CPU seconds of all of them, and extra memory of the largest, bytes."""
        for tensor in self.engine.values():
            tensor.zero_()
        here = platform.current()
        here.reset_peak_memory()
        before = psutil.Process().memory_info().rss
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        way()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        extra = max(0, here.memory().host_peak_bytes - before)
        slowest, of_all, largest = zip(*gather_objects((seconds, cpu_seconds, extra)), strict=True)
        return max(slowest), sum(of_all), max(largest)


def measure(arguments: argparse.Namespace, model_dir: Path) -> list[dict[str, object]]:
    """All cases on this rank; the same result on every rank."""
    shape = model(arguments.layers, arguments.hidden, arguments.vocabulary)
    results: list[dict[str, object]] = []
    for case in CASES[: 2 if arguments.quick else None]:
        bench = Bench(shape, case, arguments.bucket_mib << 20, model_dir)
        found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
        proof_s = []
        for number in range(arguments.rounds + 1):  # the first one is warm-up
            for way in WAYS if number % 2 else WAYS[::-1]:
                figures = bench.timed(getattr(bench, way))
                if number:
                    found[way].append(figures)
                if way != "copy":
                    start = time.perf_counter()
                    bench.proof.check(bench.read, colocated(bench.engine, bench.rank), number)
                    if way == "mega_rl" and number:
                        proof_s.append(time.perf_counter() - start)
        transfer_counts = gather_objects(bench.transfer_count)
        sent, local = (sum(getattr(part, name) for part in transfer_counts) for name in ("bytes_sent", "bytes_local"))
        minimum = sum(part.bytes_minimum for part in transfer_counts)
        results.append(
            {
                "case": case.name,
                "bytes_local": local,
                "bytes_sent": sent,
                "bytes_minimum": minimum,
                "num_buckets": bench.transfer_count.num_buckets,
                "plan_s": max(gather_objects(bench.plan_s)),
                "proof_s": statistics.median(proof_s),
                "seconds": {way: [s for s, _, _ in runs] for way, runs in found.items()},
                "cpu_seconds": {way: [s for _, s, _ in runs] for way, runs in found.items()},
                "extra_bytes": {way: max(extra for _, _, extra in runs) for way, runs in found.items()},
            }
        )
    return results


def worker(rank: int, arguments: argparse.Namespace, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/store", rank=rank, world_size=WORLD_SIZE)
    results = measure(arguments, directory)
    if rank == 0:
        (directory / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = write_config(Path(name), model(arguments.layers, arguments.hidden, arguments.vocabulary))
        # Forked, so that vLLM is imported once.
        mp.start_processes(worker, (arguments, directory), nprocs=WORLD_SIZE, start_method="fork")
        results = json.loads((directory / "results.json").read_text())
    ratio_names = [f"{way} / mega_rl" for way in ("gather", "copy")]
    header = ("case", "GB sent", "sent / minimum", *(f"{way}, s" for way in WAYS), *ratio_names)
    rows = []
    for found in results:
        seconds = {way: statistics.median(runs) for way, runs in found["seconds"].items()}
        ratio = found["bytes_sent"] / found["bytes_minimum"] if found["bytes_minimum"] else 1.0
        ratios = [seconds[way] / seconds["mega_rl"] for way in ("gather", "copy")]
        cpu_seconds = {way: statistics.median(runs) for way, runs in found["cpu_seconds"].items()}
        ratios += [cpu_seconds[way] / cpu_seconds["mega_rl"] for way in ("gather", "copy")]
        extra = [found["extra_bytes"][way] / 2**20 for way in ("mega_rl", "gather")]
        rows.append([found["case"], found["bytes_sent"] / 1e9, f"{ratio:.2f}", *seconds.values(), *ratios, *extra])
        rows[-1] += [found["plan_s"], found["proof_s"]]
    columns = (
        *header,
        *(f"{name}, CPU" for name in ratio_names),
        "mega_rl extra, MiB",
        "gather extra, MiB",
        "plan, s",
        "proof of all, s",
    )
    shape = model(arguments.layers, arguments.hidden, arguments.vocabulary)
    size = sum(torch.Size(size).numel() for size in hf_tensors(shape).values()) * DTYPE.itemsize
    title = f"Weight sync: {size / 1e9:.2f} GB of bfloat16, 4 processes, gloo, median of {arguments.rounds}"
    publish(title, table(columns, rows), platform.current().name, {"results": results}, arguments.json)


def parse(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """The size of the model and how often each way is measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14, help="even (default: 14)")
    parser.add_argument("--hidden", type=int, default=1024, help="multiple of 256 (default: 1024)")
    parser.add_argument("--vocabulary", type=int, default=32000, help="rows of the embedding (default: 32000)")
    parser.add_argument("--bucket-mib", type=int, default=64, help="bridge.bucket_bytes, MiB (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way after one warm-up (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a small case, once: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.layers, arguments.hidden, arguments.vocabulary, arguments.rounds = 2, 256, 512, 1
    return arguments


def main(argv: list[str] | None = None) -> None:
    platform.select("cpu")  # the exchange is gloo's
    compare(parse(argv, __doc__))


if __name__ == "__main__":
    main()
