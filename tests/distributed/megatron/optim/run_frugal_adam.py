"""Started by torchrun on two ranks: an optimizer whose state is on the host, or whose moments are bfloat16.

Prints ``PASSED <case> <check>`` on rank 0 for every check that held on all ranks.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.megatron.checkpoint import checkpoint, local_state
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.optim import frugal_adam
from mega_rl.megatron.optim.optimizer import chained
from mega_rl.megatron.optim.optimizer_state import KINDS, owned
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.state import stage_parameters, trainer_state
from mega_rl.platform import transfers
from tests.models import tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, pack_for_rank, run_config
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES, make_sequences

OBJECTIVE = OBJECTIVES["sft"]
LORA: dict[str, Any] = {"method": "lora", "adapter": AdapterConfig(rank=4, alpha=8.0)}
FREEZE: dict[str, Any] = {"method": "freeze", "train_layers": 1}


@dataclass(frozen=True)
class Variant:
    name: str
    case: Case
    family: str = "qwen2"
    dtype: str = "bfloat16"
    tuning: dict[str, Any] = field(default_factory=dict)
    num_checks: int = 2  # the first so many of ``CHECKS``


VARIANTS = (
    Variant("dp2", Case(2), num_checks=4),
    Variant("dp2_float32", Case(2), dtype="float32"),
    Variant("tp2_overlap", Case(2, tensor=2, sequence=True, overlap=True)),
    Variant("experts", Case(2, expert=2), family="qwen3_moe", num_checks=3),
    Variant("lora", Case(2), tuning=LORA, num_checks=3),
    Variant("freeze", Case(2), tuning=FREEZE),
)
Bits = dict[str, Tensor]


class World:
    def __init__(self, variant: Variant, layout: ParallelLayout, directory: Path) -> None:
        self.variant, self.layout, self.directory = variant, layout, directory
        sequences = make_sequences(OBJECTIVE, tiny_models.vocab_size(variant.family))
        self.microbatches = pack_for_rank(variant.case, layout, sequences)
        self.loss = loss_of(OBJECTIVE, sequences)

    def config(self, on_host: bool, moments: str = "float32") -> RunConfig:
        config = run_config(self.variant.case, OBJECTIVE, self.variant.dtype)
        config.tuning = TuningConfig(**self.variant.tuning)
        config.memory.optimizer_on_host, config.memory.optimizer_state_dtype = on_host, moments
        return config

    def engine(self, on_host: bool, moments: str = "float32") -> MegatronEngine:
        return build_engine(self.config(on_host, moments), self.layout, self.directory / self.variant.family, 10)

    def train(self, engine: MegatronEngine, num_steps: int) -> list[float]:
        norms = []
        for _ in range(num_steps):
            engine.forward_backward(self.microbatches, self.loss)
            stats = engine.optimizer_step()
            assert not stats.skipped
            norms.append(stats.grad_norm)
        return norms


def bits_of(engine: MegatronEngine) -> Bits:
    """Weights, masters and moments of this rank."""
    found = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    for number, part in enumerate(chained(engine.optimizer)):
        for name, parameter, _ in owned(part):
            own = part._get_main_param_and_optimizer_states(parameter)
            found |= {f"{number}.{name}.{kind}": own[kind].detach().float().cpu().clone() for kind in KINDS}
    return found


def assert_same(first: Bits, second: Bits) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def host(world: World) -> None:
    """State on the host gives the bits of state on the device; so do bfloat16 moments in either place."""
    device, on_host = world.engine(False), world.engine(True)
    parts = chained(on_host.optimizer)
    assert all(part.optimizer.on_host for part in parts)
    assert not any(isinstance(part.optimizer, frugal_adam.FrugalAdam) for part in chained(device.optimizer))
    windows = [len(list(block.windows())) for part in parts for block in part.optimizer._blocks]
    assert max(windows, default=2) >= 2, windows  # or nothing is cut
    assert world.train(device, 3) == world.train(on_host, 3)
    assert_same(bits_of(device), bits_of(on_host))
    norms = [name for name in hf_tensors(device.policy.shape) if "norm" in name]
    assert_same(device.master_weights(norms), on_host.master_weights(norms))  # which noise is added to
    rounded = [world.engine(where, "bfloat16") for where in (False, True)]
    for engine in rounded:
        world.train(engine, 3)
    assert_same(*map(bits_of, rounded))
    assert any(
        not torch.equal(a, b) for a, b in zip(bits_of(device).values(), bits_of(rounded[0]).values(), strict=True)
    )


def state(world: World) -> None:
    """The plan's bytes of masters and moments are those that are there, and none of them a view of a weight."""
    for on_host, moments in ((True, "float32"), (False, "bfloat16"), (True, "bfloat16")):
        config, engine = world.config(on_host, moments), world.engine(on_host, moments)
        shape, rank = read_model_shape(world.directory / world.variant.family), dist.get_rank()
        stage = world.layout.coordinates(rank).pipeline
        held = stage_parameters(config, shape, world.layout, stage, engine.policy.plan)
        planned = trainer_state(config, world.layout, rank, held, has_reference=False)
        states = [own for part in chained(engine.optimizer) for own in part.optimizer.state.values()]
        of = {name: sum(own[name].nbytes for own in states) for name in ("exp_avg", "exp_avg_sq", frugal_adam.MASTER)}
        assert of["exp_avg"] + of["exp_avg_sq"] == planned.moments, (of, planned.moments)
        if world.variant.dtype == "bfloat16":
            assert of[frugal_adam.MASTER] == planned.masters, (of, planned.masters)


def checkpoints(world: World) -> None:
    """A run goes on with the state in the other place as it would have gone on in its own, and back again."""
    root = world.directory / f"checkpoints_{world.variant.name}"
    start, straight = world.engine(False), world.engine(True)
    world.train(start, 1)
    save(root, 1, start)
    on_host = resumed(root, 1, world.engine(True))
    world.train(on_host, 1)
    save(root, 2, on_host)
    back = resumed(root, 2, world.engine(False))
    world.train(back, 1)
    world.train(straight, 3)
    assert_same(bits_of(back), bits_of(straight))
    copy = local_state.to_bytes(straight, {})
    each_weight_is_kept_once(straight, copy)
    other = world.engine(True)
    local_state.from_bytes(other, copy)
    assert_same(bits_of(other), bits_of(straight))


def each_weight_is_kept_once(engine: MegatronEngine, copy: bytes) -> None:
    """Over the ranks that hold it; they share out the bytes about evenly."""
    kept = torch.load(io.BytesIO(copy), weights_only=True)["weights"]
    for is_dense, group in (
        (True, parallel_state.get_data_parallel_group(with_context_parallel=True)),
        (False, parallel_state.get_expert_data_parallel_group()),
    ):
        held = {
            f"model.0.{name}": parameter
            for name, parameter in engine.policy.chunks[0].named_parameters()
            if getattr(parameter, "allreduce", True) is is_dense and parameter.requires_grad
        }
        of_ranks = gather_objects([name for name in kept if name in held], group)
        assert sorted(name for names in of_ranks for name in names) == sorted(held), of_ranks
        sizes = [sum(held[name].nbytes for name in names) for names in of_ranks]
        assert max(sizes) - min(sizes) <= max((one.nbytes for one in held.values()), default=0), sizes


def rounded_checkpoints(world: World) -> None:
    """Moments in bfloat16 come back as they were; to float32 they widen, from float32 they are rounded."""
    root = world.directory / f"rounded_{world.variant.name}"
    start = world.engine(True, "bfloat16")
    world.train(start, 1)
    save(root, 1, start)
    here = resumed(root, 1, world.engine(False, "bfloat16"))
    assert_same(bits_of(here), bits_of(start))
    assert_same(bits_of(resumed(root, 1, world.engine(False))), bits_of(start))
    world.train(here, 1)
    world.train(start, 1)
    assert_same(bits_of(here), bits_of(start))
    wide = world.engine(False)
    world.train(wide, 1)
    save(root, 2, wide)
    narrow, exact = bits_of(resumed(root, 2, world.engine(True, "bfloat16"))), bits_of(wide)
    moments = [name for name in exact if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert moments
    for name in moments:
        torch.testing.assert_close(narrow[name], exact[name], rtol=2**-8, atol=0)


def save(root: Path, step: int, engine: MegatronEngine) -> None:
    writer = CheckpointWriter(root, 0, is_async=False)
    writer.save(step, engine, {"data": {}, "validations": {}})
    writer.finish()
    dist.barrier()


def resumed(root: Path, step: int, engine: MegatronEngine) -> MegatronEngine:
    with torch.no_grad():
        for parameter in engine.policy.parameters.values():
            if parameter.requires_grad:
                parameter.fill_(7.0)
    checkpoint.load(checkpoint.directory_of(root, step), engine)
    return engine


CHECKS: tuple[Callable[[World], None], ...] = (host, state, checkpoints, rounded_checkpoints)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    # Of the size of the tiny models, so that their parameters are cut and share blocks.
    frugal_adam.WINDOW_ELEMENTS = transfers.WINDOW_ELEMENTS = 2048
    frugal_adam.BLOCK_ELEMENTS = 4096
    if dist.get_rank() == 0:
        for family in {variant.family for variant in VARIANTS}:
            tiny_models.make(family).save_pretrained(arguments.dir / family)
    dist.barrier()
    for variant in VARIANTS:
        if arguments.only not in variant.name:
            continue
        with groups(variant.case) as layout:
            world = World(variant, layout, arguments.dir)
            for check in CHECKS[: variant.num_checks]:
                check(world)
                dist.barrier()
                if dist.get_rank() == 0:
                    print(f"PASSED {variant.name} {check.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
