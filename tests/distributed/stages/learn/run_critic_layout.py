"""Started by torchrun on two ranks: a critic with a layout of its own against one that has the policy's.

Prints ``PASSED <the policy's layout> <the critic's>`` on rank 0 for every pair in which all held on all ranks.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.algorithms.reduce import Denominators
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.slices import indices
from mega_rl.config.schema.learning import CriticConfig
from mega_rl.config.schema.stage import critic_parallel
from mega_rl.megatron.checkpoint import checkpoint, local_state
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.groups import Groups
from mega_rl.megatron.model.value import NewScore
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.microbatch import Microbatch
from mega_rl.models.shape import value_shape
from mega_rl.observe.timers import Timers
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.activations import PlannedTokens
from mega_rl.planning.companions import companions
from mega_rl.platform.operators.memory import OPERATOR_MEMORY
from mega_rl.stages.learn.critic import Critic
from mega_rl.stages.models.trainer import trainer_spec
from mega_rl.stages.run.batch_share import BatchShare
from tests.models import tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, own_device, pack_for_rank, run_config
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES, make_sequences, num_learnt

FAMILY = "qwen2"
OBJECTIVE = OBJECTIVES["rl"]
SETTINGS = CriticConfig(gamma=0.9, lam=0.8)
LIMIT = 1e-5


def critic_of(case: Case, own: Case | None, actor: MegatronEngine, directory: Path) -> tuple[Critic, MegatronEngine]:
    """A critic at the layout ``own``; None: at the actor's."""
    config = run_config(case, OBJECTIVE)
    config.algorithm.advantage = "gae"
    if own is not None:
        config.critic = CriticConfig(tensor=own.tensor, pipeline=own.pipeline, context=own.context)
    parallel, world = critic_parallel(config), dist.get_world_size()
    layout = ParallelLayout.of(parallel, world)
    shape = value_shape(actor.policy.shape)
    weights = NewScore(HFReader(directory), shape.hidden_size, seed=4)
    spec, made = replace(trainer_spec(config), parallel=parallel), Groups(layout, 1, 60.0) if own else None
    with made.current() if made else nullcontext():
        policy = MegatronPolicy(spec, shape, layout, own_device())
        engine = MegatronEngine(policy, weights, Optimization(config.optimizer, 10, 5), None, made)
    share = BatchShare(layout, dist.get_rank(), 64, layout.tensor if parallel.sequence else 1, 0)
    check_plan(config, actor, engine)
    config.critic.gamma, config.critic.lam = SETTINGS.gamma, SETTINGS.lam
    job: Any = SimpleNamespace(config=config, timers=Timers(), say=print)
    return Critic(job, share, engine, actor, made is not None), engine


def check_plan(config: Any, actor: MegatronEngine, engine: MegatronEngine) -> None:
    """Weights and gradients take what the plan says of this rank, at the critic's layout."""
    own = [b for chunk in engine.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    tokens, layout = PlannedTokens(64, 32, 1), actor.policy.layout
    plan = companions(config, actor.policy.shape, layout, OPERATOR_MEMORY["cpu"], tokens)
    (planned,) = plan(dist.get_rank())
    assert planned.state.weights == sum(b.param_data.nbytes for b in own)
    assert planned.state.gradients == sum(b.grad_data.nbytes for b in own)


def whole(engine: MegatronEngine) -> dict[str, Tensor]:
    """The weights as Hugging Face tensors, from all ranks."""
    own = [(p.hf_name, p.hf_box, engine.policy.local(p.local_name, p.local_box).clone()) for p in slices(engine)]
    tensors = {name: torch.full(size, torch.nan) for name, size in hf_tensors(engine.policy.shape).items()}
    for part in gather_objects(own):
        for name, box, values in part:
            tensors[name][indices(box)] = values
    return tensors


def slices(engine: MegatronEngine) -> list[Any]:
    return engine.slices_of(dist.get_rank())


def step(critic: Critic, packed: list[list[Microbatch]], tokens: int) -> tuple[list[Tensor], dict[str, float]]:
    """The values, advantages and returns that the policy is given, and the metrics of an update."""
    prepared = critic.with_advantages(packed, None)
    found = [
        torch.stack([m.values, m.returns, m.advantages])[:, : sum(m.lengths)]  # but for the tail
        for part in prepared
        for m in part
    ]
    metrics = critic.update([(part, Denominators(tokens, 10, 64)) for part in prepared])
    return found, metrics


def assert_close(metrics: dict[str, float], wanted: dict[str, float]) -> None:
    assert set(metrics) == set(wanted)
    for name, value in metrics.items():
        # rounding decides which of two equal errors is the larger one, and so whether a token counts as clipped
        limit = 0.05 if name == "critic/clip_fraction" else LIMIT * max(1.0, abs(wanted[name]))
        assert abs(value - wanted[name]) < limit, (name, value, wanted[name])


def check(case: Case, own: Case, layout: ParallelLayout, directory: Path) -> None:
    sequences = make_sequences(OBJECTIVE, tiny_models.vocab_size(FAMILY))
    config, tokens = run_config(case, OBJECTIVE), int(num_learnt(sequences))
    packed = [pack_for_rank(case, layout, sequences), pack_for_rank(case, layout, sequences[:5])]
    actor = build_engine(config, layout, directory / FAMILY, 10)
    alone, own_engine = critic_of(case, own, actor, directory / FAMILY)
    other, engine = critic_of(case, None, actor, directory / FAMILY)
    loss = loss_of(OBJECTIVE, sequences)
    for _ in range(2):
        (found, metrics), (expected, wanted) = (step(critic, packed, tokens) for critic in (alone, other))
        for left, right in zip(found, expected, strict=True):
            assert torch.allclose(left, right, atol=LIMIT) and left.any(), float((left - right).abs().max())
        assert_close(metrics, wanted)
        actor.forward_backward(packed[0], loss)  # whose groups are its own again
        assert actor.optimizer_step().grad_norm > 0
    weights, theirs = whole(own_engine), whole(engine)
    for name, tensor in weights.items():
        assert float((tensor - theirs[name]).abs().max()) < LIMIT, name

    root = directory / f"{case.name}-{own.name}"
    actor.companions = {"critic": own_engine}
    CheckpointWriter(root, 0, is_async=False).save(1, actor, {"data": {}, "validations": {}})
    first = step(alone, packed, tokens)[1]
    checkpoint.load(checkpoint.directory_of(root, 1), actor)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole(own_engine).items())
    again = step(alone, packed, tokens)[1]
    assert again == first, (again, first)
    copy, kept = local_state.to_bytes(actor, {}), whole(own_engine)
    own_engine.offload.to_device()
    after = step(alone, packed, tokens)[1]
    local_state.from_bytes(actor, copy)  # of what the critic's ranks share, as its layout has them
    assert all(torch.equal(tensor, kept[name]) for name, tensor in whole(own_engine).items())
    assert step(alone, packed, tokens)[1] == after
    actor.companions = {"critic": engine}  # a checkpoint goes on at another layout of the critic too
    checkpoint.load(checkpoint.directory_of(root, 1), actor)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole(engine).items())
    then = step(other, packed, tokens)[1]
    assert_close(then, first)
    gather_objects(None)
    if dist.get_rank() == 0:
        print(f"PASSED {case.name} {own.name}\n", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=json.loads, required=True, help="JSON list of pairs of arguments of Case")
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    if dist.get_rank() == 0:
        tiny_models.make(FAMILY).save_pretrained(arguments.dir / FAMILY)
    dist.barrier()
    for policy, critic in arguments.cases:
        with groups(Case(**policy)) as layout:
            check(Case(**policy), Case(**critic), layout, arguments.dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
