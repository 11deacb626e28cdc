"""Started by torchrun on two ranks: recompute and offload change nothing, norms do not decay, bad steps are skipped.

Prints ``PASSED <layout> <check>`` on rank 0 for every check that held on all ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.slices import indices
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import InputError
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.offload import PARTS, TrainerOffload
from mega_rl.megatron.optim.optimizer import chained, owned_range
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.megatron.reference import FrozenCopy
from mega_rl.microbatch import Figures
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from tests.models import tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, own_device, pack_for_rank, run_config
from tests.models.layouts import Case
from tests.models.parity_reference import LR, OBJECTIVES, WEIGHT_DECAY, make_sequences

LAYOUTS = (Case(2, tensor=2, sequence=True), Case(2))
RECOMPUTE = {
    "mlp": ("selective", None, None, 2),
    "core_attn": ("selective", ["core_attn"], None, 1),
    "both": ("selective", ["core_attn", "mlp"], None, 2),
    "full": ("full", None, None, 2),
    "first_layer": ("full", None, 1, 2),
}  # name -> memory.recompute, its modules, its layers, how often the first layer's MLP runs for a micro-batch
OBJECTIVE = OBJECTIVES["sft"]


class World:
    """One layout with its data; engines are made anew, so that checks do not depend on each other."""

    def __init__(self, case: Case, layout: ParallelLayout, directory: Path) -> None:
        self.case, self.layout, self.directory = case, layout, directory
        sequences = make_sequences(OBJECTIVE, tiny_models.vocab_size("qwen2"))
        self.microbatches = pack_for_rank(case, layout, sequences)
        self.loss_function = loss_of(OBJECTIVE, sequences)

    def config(self, dtype: str = "float32") -> RunConfig:
        return run_config(self.case, OBJECTIVE, dtype)

    def engine(self, config: RunConfig) -> MegatronEngine:
        return build_engine(config, self.layout, self.directory, 10)

    def backward(self, engine: MegatronEngine) -> list[Figures]:
        return engine.forward_backward(self.microbatches, self.loss_function)


def state_of(engine: MegatronEngine) -> dict[str, Tensor]:
    """Weights, masters and moments, copied."""
    state = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    for i, part in enumerate(chained(engine.optimizer)):
        for j, p in enumerate(p for group in part.optimizer.param_groups for p in group["params"]):
            moments = {k: v for k, v in part.optimizer.state[p].items() if torch.is_tensor(v)}
            state |= {f"{i}.{j}.{k}": v.detach().clone() for k, v in {"master": p, **moments}.items()}
    return state


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def recompute(world: World) -> None:
    """Loss and every gradient are the same bits, and the work is really done again."""

    def run(mode: str, modules: list[str] | None, layers: int | None) -> tuple[list[float], dict[str, Tensor], int]:
        config = world.config()
        config.memory.recompute, config.memory.recompute_modules = mode, modules
        config.memory.recompute_num_layers = layers
        engine, calls = world.engine(config), []
        engine.policy.chunks[0].decoder.layers[0].mlp.linear_fc1.register_forward_hook(lambda *_: calls.append(1))
        losses = [float(report.sums["loss"]) for report in world.backward(engine)]
        return losses, {n: p.main_grad.clone() for n, p in engine.policy.parameters.items()}, len(calls)

    losses, gradients, num_calls = run("none", None, None)
    assert num_calls == len(world.microbatches)
    for name, (mode, modules, layers, times) in RECOMPUTE.items():
        own_losses, own_gradients, own_calls = run(mode, modules, layers)
        assert own_losses == losses, name
        assert_equal(own_gradients, gradients)
        assert own_calls == times * num_calls, (name, own_calls, num_calls)
    try:
        run("selective", ["moe"], None)
    except InputError as error:
        assert "memory.recompute_modules has 'moe'" in str(error)
    else:
        raise AssertionError("a module that the model does not have was accepted")


def offload(world: World) -> None:
    """Training with a round trip before, within and after every step is the same bits; nothing is left meanwhile."""
    for dtype in ("float32", "bfloat16"):
        config = world.config(dtype)
        straight, moved = world.engine(config), world.engine(config)
        assert moved.offload.is_complete
        config.memory.offload = list(PARTS)
        mover = TrainerOffload(config.memory, moved.wrapped, moved.optimizer, is_active=True)
        for _ in range(3):
            for engine in (straight, moved):
                world.backward(engine)
                assert not engine.optimizer_step().skipped
            before = state_of(moved)
            mover.to_host("gradients", "optimizer")
            assert all(p.main_grad.untyped_storage().nbytes() == 0 for p in moved.policy.parameters.values())
            moments = [
                v for part in chained(moved.optimizer) for s in part.optimizer.state.values() for v in s.values()
            ]
            assert moments and all(v.untyped_storage().nbytes() == 0 for v in moments if torch.is_tensor(v))
            mover.to_host("weights")
            assert all(p.untyped_storage().nbytes() == 0 for p in moved.policy.parameters.values())
            assert not mover.is_complete
            mover.to_host(*PARTS)  # what is away stays away
            mover.to_device("weights")
            mover.to_device()
            mover.to_device()
            assert mover.is_complete
            assert_equal(state_of(moved), before)
            assert all(not p.main_grad.any() for p in moved.policy.parameters.values())
        assert_equal(state_of(moved), state_of(straight))
        inactive = TrainerOffload(config.memory, moved.wrapped, moved.optimizer, is_active=False)
        inactive.to_host(*PARTS)
        assert inactive.is_complete and next(iter(moved.policy.parameters.values())).untyped_storage().nbytes() > 0


def reference(world: World) -> None:
    """A reference that stays on the host gives the same statistics, twice."""
    config = world.config()
    engine = world.engine(config)
    expected = engine.token_stats(world.microbatches)
    config.memory.offload = ["weights"]
    policy = MegatronPolicy(engine.policy.spec, engine.policy.shape, world.layout, own_device())
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(engine.policy.parameters[name])
    frozen = FrozenCopy(policy, config.memory, is_active=True)
    for _ in range(2):
        assert all(p.untyped_storage().nbytes() == 0 for p in policy.parameters.values())
        own = frozen.token_stats(world.microbatches)
        assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(own, expected, strict=True))


def decay(world: World) -> None:
    """With a gradient of zero a step is the decay alone: of matrices, never of norms and biases."""
    engine = world.engine(world.config())
    before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    engine.forward_backward(world.microbatches, lambda stats, m: (stats.logprobs.sum() * 0.0, Figures()))
    stats = engine.optimizer_step()
    assert not stats.skipped and stats.grad_norm == 0.0 and stats.lr == LR
    spared = set()
    for piece in engine.slices_of(dist.get_rank()):
        box = indices(piece.local_box)
        is_spared = "norm" in piece.hf_name or piece.hf_name.endswith("bias")
        expected = before[piece.local_name][box] * (1.0 if is_spared else 1.0 - LR * WEIGHT_DECAY)
        torch.testing.assert_close(engine.policy.parameters[piece.local_name][box], expected, rtol=2e-7, atol=0)
        spared |= {piece.hf_name.split(".")[-2]} if is_spared else set()
    assert {"norm", "input_layernorm", "post_attention_layernorm", "q_proj", "k_proj", "v_proj"} <= spared, spared


def poison(engine: MegatronEngine, name: str, value: float, rank: int) -> None:
    """Make the last element of one Hugging Face tensor's gradient bad, on one rank alone."""
    for piece in engine.slices_of(dist.get_rank()):
        if piece.hf_name == name and dist.get_rank() == rank:
            parameter = engine.policy.parameters[piece.local_name]
            start, end = owned_range(engine.optimizer, parameter)
            flat = torch.arange(parameter.numel()).view(parameter.shape)[indices(piece.local_box)].flatten()
            owned = flat[(flat >= start) & (flat < end)]
            if len(owned):
                parameter.main_grad.view(-1)[owned[-1]] = value


def skipped(world: World) -> None:
    """One bad element on one rank: no rank changes anything, all name the tensor, and enough of them end the run."""
    config = world.config()
    config.trainer.max_skipped_steps = 3
    engine = world.engine(config)
    world.backward(engine)
    engine.optimizer_step()
    before = state_of(engine)
    layer = "model.layers.2."
    # A norm is held alike by tensor-parallel ranks, of which the gradient norm counts the first alone.
    bad = [(layer + "mlp.up_proj.weight", math.nan), (layer + "post_attention_layernorm.weight", math.inf)]
    for count, (name, value) in enumerate(bad, start=1):
        world.backward(engine)
        for rank in range(2):
            poison(engine, name, value, rank if world.layout.data > 1 else 1)
        poison(engine, "model.norm.weight", value, 0 if count == 1 else 1)  # a later one
        stats = engine.optimizer_step()
        assert stats.skipped and stats.bad_parameter == name, stats
        assert engine.stepper.skipped.state_dict() == {"total": count, "in_a_row": count}
        assert_equal(state_of(engine), before)
    world.backward(engine)
    assert not engine.optimizer_step().skipped
    assert engine.stepper.skipped.state_dict() == {"total": 2, "in_a_row": 0}
    assert gather_objects(stats.bad_parameter) == [bad[-1][0]] * 2
    for _ in range(2):
        world.backward(engine)
        poison(engine, "model.norm.weight", math.nan, 1)
        poison(engine, "model.norm.weight", math.nan, 0)
        assert engine.optimizer_step().skipped
    world.backward(engine)
    poison(engine, "model.norm.weight", math.nan, 1)
    poison(engine, "model.norm.weight", math.nan, 0)
    try:
        engine.optimizer_step()
    except InputError as error:
        assert "trainer.max_skipped_steps (3)" in str(error) and "model.norm.weight" in str(error), error
    else:
        raise AssertionError("the run went on after three skipped steps in a row")


def two_models(world: World) -> None:
    """Models of another type, temperature and learning rate live beside each other in one process."""
    first = world.engine(world.config())
    config = world.config("bfloat16")
    config.optimizer.lr = 7 * LR
    second = world.engine(config)
    assert {p.dtype for p in first.policy.parameters.values()} == {torch.float32}
    assert {p.dtype for p in second.policy.parameters.values()} == {torch.bfloat16}
    cold_spec = replace(first.policy.spec, temperature=0.25)
    cold = MegatronPolicy(cold_spec, first.policy.shape, world.layout, own_device())
    for name, parameter in cold.parameters.items():
        parameter.detach().copy_(first.policy.parameters[name])
    before, colder = first.token_stats(world.microbatches), cold.token_stats(world.microbatches)
    for a, b, m in zip(before, colder, world.microbatches, strict=True):
        is_learnt = m.loss_mask.cpu() != 0
        assert bool((b.entropy < a.entropy)[is_learnt].all()) and not (a.entropy + b.entropy)[~is_learnt].any()
    rates = []
    for engine in (first, second):
        world.backward(engine)
        rates.append(engine.optimizer_step().lr)
    assert rates == [LR, 7 * LR], rates


CHECKS: tuple[Callable[[World], None], ...] = (recompute, offload, reference, decay, skipped, two_models)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    if dist.get_rank() == 0:
        tiny_models.make("qwen2").save_pretrained(arguments.dir)
    dist.barrier()
    for case in LAYOUTS:
        with groups(case) as layout:
            world = World(case, layout, arguments.dir)
            for check in CHECKS:
                check(world)
                dist.barrier()
                if dist.get_rank() == 0:
                    print(f"PASSED {case.name} {check.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
