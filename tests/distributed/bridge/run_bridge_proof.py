"""Faults injected into syncs between gloo processes; launched by ``test_bridge_proof.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_series, vllm_slices
from mega_rl.bridge.reshard.execute import Transfer
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.reshard.proof import SAMPLE_SYNCS, Proof, colocated
from mega_rl.bridge.slices import Box, indices
from tests.distributed.bridge.test_bridge_execute import SHAPE, local_parameters, random_model, trainer_slices

DTYPE = torch.bfloat16
ENGINE_SIZE = 2
VICTIM = 3  # rank, in the second engine
TENSOR = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"


class Sync:
    """TP2 PP2 trainers and two engines of two ranks in the same four processes."""

    def __init__(self, is_sample: bool = False) -> None:
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        self.sources = trainer_slices(2, 2)
        wanted = [vllm_slices(SHAPE, ENGINE_SIZE, rank % ENGINE_SIZE) for rank in range(world_size)]
        self.weights = local_parameters(self.sources[self.rank], random_model(DTYPE), DTYPE)
        self.engine = local_parameters(wanted[self.rank], None, DTYPE)
        plan = compile_plan(self.sources, wanted)
        self.transfer = Transfer(plan, self.rank, world_size, None, bucket_bytes=4096)
        held, engine = self.sources[self.rank], [vllm_series(SHAPE, ENGINE_SIZE, rank) for rank in range(ENGINE_SIZE)]
        self.proof = Proof(hf_tensors(SHAPE), held, engine, world_size, is_sample, seed=1)
        self.dropped = ""

    def read(self, name: str, hf_name: str, hf_box: Box, box: Box) -> torch.Tensor:
        return self.weights[name][indices(box)]

    def write(self, name: str, hf_name: str, hf_box: Box, box: Box, piece: torch.Tensor) -> None:
        if hf_name != self.dropped:
            self.engine[name][indices(box)] = piece

    def move(self) -> None:
        self.transfer.run(self.read, self.write, DTYPE)

    def refusal(self, version: int = 1) -> str:
        """What the proof says, the same on every rank; empty where it agrees."""
        try:
            self.proof.check(self.read, colocated(self.engine, self.rank), version)
            said = ""
        except RuntimeError as error:
            said = str(error)
        everywhere: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everywhere, said)
        assert len(set(everywhere)) == 1, everywhere
        return said


def expect(said: str, name: str, rank: int) -> None:
    assert f"weight version 1 the engine on rank {rank} holds another {name} than" in said, said


def clean() -> None:
    sync = Sync()
    sync.move()
    assert sync.refusal() == ""


def flipped_byte() -> None:
    sync = Sync()
    sync.move()
    if sync.rank == VICTIM:
        sync.engine[TENSOR].view(torch.uint8)[5, 3] ^= 64
    expect(sync.refusal(), TENSOR, VICTIM)


def dropped_tensor() -> None:
    sync = Sync()
    sync.dropped = TENSOR if sync.rank == VICTIM else ""
    sync.move()
    expect(sync.refusal(), TENSOR, VICTIM)


def noise_twice() -> None:
    """An engine that adds this sync's noise to what already has it."""
    sync = Sync()
    for name in sync.weights:
        if name.endswith("input_layernorm.weight"):
            sync.weights[name] += 0.5
    sync.move()
    assert sync.refusal() == ""
    if sync.rank == VICTIM:
        sync.engine[NORM] += 0.5
    expect(sync.refusal(), NORM, VICTIM)


def stale_update() -> None:
    """The weights moved on after the transfer: the engines hold the version before."""
    sync = Sync()
    sync.move()
    for weight in sync.weights.values():
        weight += 1
    assert "holds another" in sync.refusal()


def stale_bucket() -> None:
    """One rank writes what an earlier exchange left in its buffer."""
    sync = Sync()
    exchange, calls = dist.all_to_all_single, []

    def faulty(output: torch.Tensor, *args: object, **keys: object) -> object:
        before = output.clone()
        work = exchange(output, *args, **keys)
        calls.append(output.numel())
        if len(calls) == 3 and sync.rank == VICTIM:
            work.wait()
            output.copy_(before)
        return work

    dist.all_to_all_single = faulty
    try:
        sync.move()
    finally:
        dist.all_to_all_single = exchange
    assert len(calls) > 3
    said = sync.refusal()
    assert f"the engine on rank {VICTIM} holds another" in said, said


def trainer_copies_differ() -> None:
    sync = Sync()
    sync.move()
    if sync.rank == VICTIM:
        piece = next(s for s in sync.sources[VICTIM] if s.hf_name == NORM)
        sync.weights[piece.local_name][indices(piece.local_box)] += 1
    said = sync.refusal()
    assert f"trainer ranks 2 and {VICTIM} hold different copies of {NORM}" in said, said


def sample_finds_it_in_time() -> None:
    sync = Sync(is_sample=True)
    sync.move()
    if sync.rank == VICTIM:
        sync.engine[TENSOR][0, 0] += 1
    said = [found for _ in range(SAMPLE_SYNCS) if (found := sync.refusal())]
    assert len(said) == 1, said
    expect(said[0], TENSOR, VICTIM)


def failing_reads() -> None:
    """Where one rank cannot read its weights, or its engine's, nobody waits for it, and the next proof is sound."""
    sync = Sync()
    sync.move()
    weights, engine, empty = sync.weights, sync.engine, {}
    sync.weights = empty if sync.rank == VICTIM else weights
    expect_failure(sync, "hashing the trainer's weights")
    sync.weights, sync.engine = weights, empty if sync.rank == VICTIM else engine
    expect_failure(sync, "hashing the engine's weights")
    sync.engine = engine
    assert sync.refusal() == ""


def expect_failure(sync: Sync, what: str) -> None:
    try:
        sync.proof.check(sync.read, colocated(sync.engine, sync.rank), 1)
    except KeyError:
        assert sync.rank == VICTIM
    except RuntimeError as error:
        assert sync.rank != VICTIM and f"{what} failed on rank {VICTIM}" in str(error), error
    else:
        raise AssertionError("no error")


CHECKS: tuple[Callable[[], None], ...] = (
    clean,
    flipped_byte,
    dropped_tensor,
    noise_twice,
    stale_update,
    stale_bucket,
    trainer_copies_differ,
    sample_finds_it_in_time,
    failing_reads,
)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for check in CHECKS:
        check()
        if dist.get_rank() == 0:
            print(f"CHECK {check.__name__} ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
