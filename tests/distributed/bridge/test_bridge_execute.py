"""Plans carried out by gloo processes: trainer shards into engine parameters, and streams of whole tensors.

The file is also the program of one process: ``python test_bridge_execute.py RANK WORLD_SIZE STORE_FILE``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_slices
from mega_rl.bridge.mapping.tensors import full_series, hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_slices
from mega_rl.bridge.reshard.execute import Transfer, TransferCount
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, Slice, indices
from mega_rl.models.shape import ModelShape

REPOSITORY = Path(__file__).resolve().parents[3]
TIMEOUT_S = 280
SHAPE = ModelShape(
    family="qwen3",
    num_layers=4,
    hidden_size=16,
    ffn_size=24,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=77,
    tied=True,
    qkv_bias=True,
    qk_norm=True,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
)


def random_model(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in hf_tensors(SHAPE).items()}


def local_parameters(slices: list[Slice], model: dict[str, torch.Tensor] | None, dtype: torch.dtype) -> dict:
    """Zeroed parameters as small as the slices allow, filled from the model where one is given."""
    sizes: dict[str, list[int]] = {}
    for s in slices:
        ends = [end for _, end in s.local_box]
        sizes[s.local_name] = [max(a, b) for a, b in zip(sizes.get(s.local_name, ends), ends, strict=True)]
    local = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
    for s in slices if model is not None else []:
        local[s.local_name][indices(s.local_box)] = model[s.hf_name][indices(s.hf_box)]
    return local


def trainer_slices(tp: int, pp: int) -> list[list[Slice]]:
    per_stage = SHAPE.num_layers // pp
    stages = [(range(p * per_stage, (p + 1) * per_stage), p == 0, p == pp - 1) for p in range(pp)]
    return [
        megatron_slices(SHAPE, ModelChunk(layers, Shard(t, tp), *ends)) for layers, *ends in stages for t in range(tp)
    ]


class Rank:
    """One process of the checks below."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def agree(self, value: int) -> None:
        values: list[int] = [0] * self.world_size
        dist.all_gather_object(values, value)
        assert len(set(values)) == 1, values

    def check_run(self, sources: list, destinations: list, dtype: torch.dtype, bucket_bytes: int) -> TransferCount:
        model = random_model(dtype)
        mine = local_parameters(sources[self.rank], model, dtype)
        engine = local_parameters(destinations[self.rank], None, dtype)

        def read(name: str, hf_name: str, hf_box: Box, box: Box) -> torch.Tensor:
            assert torch.equal(mine[name][indices(box)], model[hf_name][indices(hf_box)])
            return mine[name][indices(box)]

        def write(name: str, hf_name: str, hf_box: Box, box: Box, piece: torch.Tensor) -> None:
            engine[name][indices(box)] += piece  # a piece that is written twice shows

        plan = compile_plan(sources, destinations)
        transfer = Transfer(plan, self.rank, self.world_size, None, bucket_bytes)
        for _ in range(2):
            for tensor in engine.values():
                tensor.zero_()
            transfer_count = transfer.run(read, write, dtype)
        expected = local_parameters(destinations[self.rank], model, dtype)
        assert engine.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(engine[name], tensor), f"rank {self.rank}: {name}"
        assert transfer_count.bytes_received == transfer_count.bytes_minimum
        total = sum(t.numel() for t in expected.values()) * dtype.itemsize
        assert transfer_count.bytes_local + transfer_count.bytes_received == total
        self.agree(transfer_count.num_buckets)
        return transfer_count

    def check_stream(self, sources: list, destination_ranks: list[int], bucket_bytes: int) -> None:
        model = random_model(torch.bfloat16)
        mine = local_parameters(sources[self.rank], model, torch.bfloat16)

        def read(name: str, hf_name: str, hf_box: Box, box: Box) -> torch.Tensor:
            return mine[name][indices(box)]

        wanted = [slices_of(full_series(SHAPE)) if r in destination_ranks else [] for r in range(self.world_size)]
        transfer = Transfer(compile_plan(sources, wanted), self.rank, self.world_size, None, bucket_bytes)
        seen = []
        for name, tensor in transfer.stream(read, list(model), torch.bfloat16):
            assert torch.equal(tensor, model[name]), f"rank {self.rank}: {name}"
            seen.append(name)
        assert seen == (list(model) if self.rank in destination_ranks else [])


def worker(rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_S // 2)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    me, pp = Rank(rank, world_size), world_size // 2
    sources = trainer_slices(2, pp)
    for engine_tp in {1, world_size}:
        destinations = [vllm_slices(SHAPE, engine_tp, r % engine_tp) for r in range(world_size)]
        for dtype in (torch.float32, torch.bfloat16):
            many = me.check_run(sources, destinations, dtype, bucket_bytes=500)
            one = me.check_run(sources, destinations, dtype, bucket_bytes=1 << 24)
            assert one.num_buckets == 1 < many.num_buckets
    separate = [*trainer_slices(1, 1), *[[] for _ in range(world_size - 1)]]
    engine = [[], *[vllm_slices(SHAPE, 1, 0) for _ in range(world_size - 1)]]
    transfer_count = me.check_run(separate, engine, torch.bfloat16, bucket_bytes=4096)
    assert (transfer_count.bytes_sent > 0) == (rank == 0) and transfer_count.bytes_local == 0
    for bucket_bytes in (300, 3000, 1 << 24):
        me.check_stream(sources, [0], bucket_bytes)
        me.check_stream(sources, list(range(world_size)), bucket_bytes)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4])
def test_trainer_shards_reach_the_engine(world_size: int, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(world_size), str(tmp_path / "store")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    assert codes == [0] * world_size, "\n".join(outputs)


def test_one_process_needs_no_group() -> None:
    sources, destinations = trainer_slices(1, 1), [vllm_slices(SHAPE, 1, 0)]
    model = random_model(torch.float32)
    mine, engine = (local_parameters(s[0], m, torch.float32) for s, m in ((sources, model), (destinations, None)))
    waits: list[int] = []  # elements written before each wait for the device
    count = lambda: waits.append(sum(int((t != 0).sum()) for t in engine.values()))  # noqa: E731
    transfer = Transfer(compile_plan(sources, destinations), 0, 1, None, 100, synchronize=count)

    def read(name: str, hf_name: str, hf_box: Box, box: Box) -> torch.Tensor:
        return mine[name][indices(box)]

    def write(name: str, hf_name: str, hf_box: Box, box: Box, piece: torch.Tensor) -> None:
        engine[name][indices(box)] = piece

    transfer_count = transfer.run(read, write, torch.float32)
    assert (transfer_count.num_buckets, transfer_count.bytes_sent, transfer_count.bytes_received) == (0, 0, 0)
    assert waits == [0, sum(tensor.numel() for tensor in model.values())], "not at both ends"
    for name, tensor in local_parameters(destinations[0], model, torch.float32).items():
        assert torch.equal(engine[name], tensor), name


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
