"""Started by torchrun on two ranks: what the actor keeps, moves and restores on device npu.

Prints ``PASSED <check>`` on rank 0 for every check that held on all ranks.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard.execute import Transfer
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.reshard.proof import Proof, colocated
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, indices
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.offload import PARTS
from mega_rl.megatron.optim import frugal_adam
from mega_rl.megatron.optim.optimizer import chained
from tests.distributed.megatron import run_memory
from tests.distributed.megatron.checkpoint.run_checkpoint import follow, local_state, save_now
from tests.distributed.megatron.run_memory import World
from tests.models import tiny_models
from tests.models.engine_support import groups, own_device
from tests.models.layouts import Case

CASES = {
    "qwen2": Case(2, tensor=2, sequence=True),
    "qwen3_moe": Case(2, tensor=2, sequence=True, expert=2, expert_tensor=1),
}


def offload(world: World) -> None:
    """A round trip to the host changes no bit, and meanwhile the device has the memory back."""
    run_memory.offload(world)
    config = world.config("bfloat16")
    config.memory.offload = list(PARTS)
    engine = world.engine(config)
    world.backward(engine)
    engine.optimizer_step()
    num_parameters = sum(p.numel() for p in engine.policy.parameters.values())
    before = torch.npu.memory_allocated()
    engine.offload.to_host(*PARTS)
    freed = before - torch.npu.memory_allocated()
    assert freed >= (2 + 4 + 4 + 8) * num_parameters, (freed, num_parameters)  # weights, gradients, masters, moments
    engine.offload.to_device()
    assert torch.npu.memory_allocated() >= before


def optimizer_on_host(world: World) -> None:
    """State in pinned memory that passes the device on streams of its own gives the bits of state on the device."""
    frugal_adam.WINDOW_ELEMENTS = 2048  # so that windows follow each other
    for moments in ("float32", "bfloat16"):
        ends = []
        for on_host in (False, True):
            config = world.config("bfloat16")
            config.memory.optimizer_on_host, config.memory.optimizer_state_dtype = on_host, moments  # type: ignore[assignment]
            engine = world.engine(config)
            for _ in range(2):
                world.backward(engine)
                engine.optimizer_step()
            ends.append({name: p.detach().clone() for name, p in engine.policy.parameters.items()})
            states = [own for part in chained(engine.optimizer) for own in part.optimizer.state.values()]
            assert {own["exp_avg"].device.type for own in states} == {"cpu" if on_host else "npu"}
            assert not on_host or all(own["exp_avg"].is_pinned() for own in states)
        run_memory.assert_equal(*ends)


def checkpoint_round_trip(world: World) -> None:
    """A new engine goes on from a checkpoint with the same bits: weights, masters, moments, steps, generators."""
    root, family = world.directory / "checkpoints", world.directory.name
    engine = world.engine(world.config("bfloat16"))
    follow(world.case, world.layout, engine, 2, family)
    platform.current().seed(100 + dist.get_rank())
    saved = save_now(root, 2, engine, keep=1)
    draws = [torch.rand(4, device=own_device()), torch.rand(4).to(own_device())]
    state, steps = local_state(engine), follow(world.case, world.layout, engine, 2, family)
    end = local_state(engine)
    resumed = world.engine(world.config("bfloat16"))
    platform.current().seed(0)
    assert checkpoint.load(saved, resumed)["step"] == 2
    assert torch.equal(torch.rand(4, device=own_device()), draws[0]), "the device's generator"
    assert torch.equal(torch.rand(4).to(own_device()), draws[1]), "the host's generator"
    for kind, tensors in local_state(resumed).items():
        run_memory.assert_equal(tensors, state[kind])
    assert follow(world.case, world.layout, resumed, 2, family) == steps
    for kind, tensors in local_state(resumed).items():
        run_memory.assert_equal(tensors, end[kind])


def generators(world: World) -> None:
    """States go round, and Megatron's tracker draws from the device's generator, differently on tensor ranks."""
    here, device = platform.current(), own_device()
    here.seed(5)
    state = here.rng_state()
    first = torch.rand(3, device=device)
    assert not torch.equal(torch.rand(3, device=device), first)
    here.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device), first)

    def draws(seed: int) -> torch.Tensor:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return torch.rand(4, device=device)

    own = draws(1)
    assert torch.equal(draws(1), own) and not torch.equal(draws(2), own)
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    assert not torch.equal(*both)


def memory(world: World) -> None:
    """What is allocated and freed is seen by the platform, in bytes."""
    here, device, size = platform.current(), own_device(), 32 << 20
    gc.collect()  # engines of earlier checks would leave while the block is looked at
    here.reset_peak_memory()
    before = here.memory()
    block = torch.zeros(size, dtype=torch.uint8, device=device)
    assert size <= here.memory().device_peak_bytes - before.device_peak_bytes < size + (1 << 20)
    del block
    here.empty_cache()
    here.reset_peak_memory()
    assert here.memory().device_peak_bytes - before.device_peak_bytes < 1 << 20
    assert here.memory().device_total_bytes == 64 << 30


def bridge(world: World) -> None:
    """The shards of two trainer ranks become whole engine parameters on each, proved as a run proves them."""
    engine, rank = world.engine(world.config()), dist.get_rank()
    shape, device = engine.policy.shape, own_device()
    sources = [engine.series_of(r) for r in range(2)]
    wanted = [vllm_series(shape, 1, 0) for _ in range(2)]
    sizes: dict[str, list[int]] = {}
    for piece in slices_of(wanted[rank]):
        ends = [end for _, end in piece.local_box]
        sizes[piece.local_name] = [max(a, b) for a, b in zip(sizes.get(piece.local_name, ends), ends, strict=True)]
    live = {name: torch.zeros(size, device=device) for name, size in sizes.items()}

    def read(name: str, hf_name: str, hf_box: Box, box: Box) -> torch.Tensor:
        return engine.policy.local(name, box)

    def write(name: str, hf_name: str, hf_box: Box, box: Box, piece: torch.Tensor) -> None:
        assert piece.device == device
        live[name][indices(box)].copy_(piece)

    plan, synchronize = compile_plan(sources, wanted), platform.current().synchronize
    transfer = Transfer(plan, rank, 2, None, 1 << 16, device, synchronize)
    transfer_count = transfer.run(read, write, torch.float32)
    assert transfer_count.num_buckets > 1 and transfer_count.bytes_received == transfer_count.bytes_minimum > 0
    proof = Proof(hf_tensors(shape), slices_of(sources[rank]), wanted[:1], num_workers=2, is_sample=False, seed=0)
    assert proof.check(read, colocated(live, rank), version=1) == len(hf_tensors(shape))
    reader = HFReader(world.directory)
    for piece in slices_of(wanted[rank]):
        expected = reader.read(piece.hf_name, piece.hf_box)
        assert torch.equal(live[piece.local_name][indices(piece.local_box)].cpu(), expected), piece.hf_name


CHECKS: dict[str, tuple[Callable[[World], None], ...]] = {
    "qwen2": (
        offload,
        optimizer_on_host,
        run_memory.reference,
        run_memory.skipped,
        checkpoint_round_trip,
        generators,
        memory,
        bridge,
    ),
    "qwen3_moe": (checkpoint_round_trip,),  # experts have an optimizer of their own
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    if dist.get_rank() == 0:
        for family in CASES:
            tiny_models.make(family).save_pretrained(arguments.dir / family)
    dist.barrier()
    for family, case in CASES.items():
        with groups(case) as layout:
            world = World(case, layout, arguments.dir / family)
            for check in CHECKS[family]:
                check(world)
                dist.barrier()
                if dist.get_rank() == 0:
                    print(f"PASSED {family} {check.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
