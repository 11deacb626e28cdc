"""Started by torchrun on two ranks: a critic of adapters on the actor's frozen weights against one with its own.

Prints ``PASSED <layout> <family>`` on rank 0 for every case in which all held on all ranks, and in the end the error of
a checkpoint whose critic was another one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tuning import critic_tuning
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import InputError
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.value import NewScore
from mega_rl.megatron.offload import PARTS, TrainerOffload
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.microbatch import Figures, Microbatch
from mega_rl.models.shape import value_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.activations import PlannedTokens
from mega_rl.planning.companions import companions
from mega_rl.platform.operators.memory import OPERATOR_MEMORY
from mega_rl.stages.models.trainer import trainer_spec
from tests.models import tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, own_device, pack_for_rank, run_config
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES, make_sequences

OBJECTIVE = OBJECTIVES["rl"]
ROUNDS = 3  # head and Bs begin with zeros: only in the third step everything has a gradient


def config_of(case: Case) -> RunConfig:
    config = run_config(case, OBJECTIVE)
    config.algorithm.advantage, config.critic.shares_base = "gae", True
    config.tuning = TuningConfig(method="lora", adapter=AdapterConfig(rank=4, alpha=8.0))
    return config


def critic_of(config: RunConfig, actor: MegatronEngine, directory: Path, base: MegatronPolicy | None) -> MegatronEngine:
    shape = value_shape(actor.policy.shape)
    spec = replace(trainer_spec(config), tuning=critic_tuning(config.tuning, shares_base=True))
    weights = NewScore(HFReader(directory), shape.hidden_size, seed=None)
    policy = MegatronPolicy(spec, shape, actor.policy.layout, own_device())
    return MegatronEngine(policy, weights, Optimization(replace(config.optimizer, lr=3e-3), 10, 5), base)


def value_loss(values_T: Tensor, microbatch: Microbatch) -> tuple[Tensor, Figures]:
    assert microbatch.advantages is not None
    return ((values_T - microbatch.advantages).square() * microbatch.loss_mask).sum() / 50, Figures()


def learn(engine: MegatronEngine, microbatches: list[Microbatch], loss: Callable) -> float:
    engine.forward_backward(microbatches, loss)
    return engine.optimizer_step().grad_norm


def storages(engine: MegatronEngine, names: frozenset[str]) -> dict[int, int]:
    """Where the weights lie, and their bytes."""
    found = (engine.policy.parameters[name].untyped_storage() for name in names)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def check_memory(config: RunConfig, actor: MegatronEngine, critic: MegatronEngine) -> None:
    """The frozen weights are there once, and the rest is what the plan says, to the byte."""
    frozen = frozenset(name for name, p in critic.policy.parameters.items() if not p.requires_grad)
    assert frozen and critic.policy.shared == frozen
    assert storages(critic, frozen).items() <= storages(actor, frozen).items()
    tokens, operators = PlannedTokens(64, 32, 1), OPERATOR_MEMORY["cpu"]
    (planned,) = companions(config, actor.policy.shape, actor.policy.layout, operators, tokens)(dist.get_rank())
    own = [buffer for chunk in critic.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    in_buffers = sum(b.param_data.nbytes + b.grad_data.nbytes for b in own)
    chain = getattr(critic.optimizer, "chained_optimizers", [critic.optimizer])
    states = [state for part in chain if part.optimizer is not None for state in part.optimizer.state.values()]
    moments = sum(state[kind].nbytes for state in states for kind in ("exp_avg", "exp_avg_sq"))
    assert planned.num_bytes == in_buffers + moments, (planned.state, in_buffers, moments)


def check_offload(config: RunConfig, actor: MegatronEngine, critic: MegatronEngine) -> None:
    """The critic takes nothing of the actor with it to the host, and comes back as it was."""
    settings = replace(config.memory, offload=list(PARTS))
    frozen = critic.policy.shared
    mover = TrainerOffload(settings, critic.wrapped, critic.optimizer, is_active=True, shares_frozen=True)
    mover.to_host(*PARTS)
    own = [p for name, p in critic.policy.parameters.items() if name not in frozen]
    assert all(p.untyped_storage().nbytes() == 0 for p in own)
    assert all(actor.policy.parameters[name].untyped_storage().nbytes() > 0 for name in frozen)
    mover.to_device()
    assert all(p.untyped_storage().nbytes() > 0 for p in own)


def check(case: Case, layout: ParallelLayout, family: str, directory: Path) -> None:
    config, model = config_of(case), directory / family
    sequences = make_sequences(OBJECTIVE, tiny_models.vocab_size(family))
    microbatches = pack_for_rank(case, layout, sequences)
    policy_loss = loss_of(OBJECTIVE, sequences)
    actor, alone = (build_engine(config, layout, model, 10) for _ in range(2))
    mover = TrainerOffload(replace(config.memory, offload=list(PARTS)), actor.wrapped, actor.optimizer, is_active=True)
    mover.to_host(*PARTS)  # as a stage does, so that the weights are not on a device twice
    shared = critic_of(config, actor, model, actor.policy)
    mover.to_device()
    separate = critic_of(config, actor, model, None)
    actor.companions["critic"] = shared
    root = directory / f"{family}_{case.name}"

    def rounds(number: int, separately: bool) -> list[float]:
        norms = []
        for _ in range(number):
            norms += [learn(shared, microbatches, value_loss), learn(actor, microbatches, policy_loss)]
            if separately:
                norms_apart = [learn(separate, microbatches, value_loss), learn(alone, microbatches, policy_loss)]
                assert norms[-2:] == norms_apart and min(norms_apart) > 0, (norms[-2:], norms_apart)
        return norms

    rounds(ROUNDS, separately=True)
    values, apart = (critic.policy.token_values(microbatches) for critic in (shared, separate))
    assert all(torch.equal(own, other) and own.any() for own, other in zip(values, apart, strict=True))
    for own, other in zip(actor.token_stats(microbatches), alone.token_stats(microbatches), strict=True):
        assert torch.equal(own.logprobs, other.logprobs), "the critic changes the policy"
    check_memory(config, actor, shared)
    check_offload(config, actor, shared)
    again = shared.policy.token_values(microbatches)
    assert all(torch.equal(own, other) for own, other in zip(values, again, strict=True))

    writer = CheckpointWriter(root, 0, is_async=False)
    writer.save(1, actor, {"data": {}, "validations": {}})
    expected = rounds(2, separately=False)
    checkpoint.load(checkpoint.directory_of(root, 1), actor)
    assert rounds(2, separately=False) == expected, "a resumed run goes on otherwise"
    actor.companions["critic"] = separate
    try:
        checkpoint.load(checkpoint.directory_of(root, 1), actor)
    except InputError as error:
        print(f"PASSED {case.name} {family}\n" * (dist.get_rank() == 0) + f"REFUSED {error}\n", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=json.loads, required=True, help="JSON list of the arguments of Case")
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    cases = [Case(**keys) for keys in arguments.cases]
    if dist.get_rank() == 0:
        for family in {family for case in cases for family in case.families}:
            tiny_models.make(family).save_pretrained(arguments.dir / family)
    dist.barrier()
    for case in cases:
        with groups(case) as layout:
            for family in case.families:
                check(case, layout, family, arguments.dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
