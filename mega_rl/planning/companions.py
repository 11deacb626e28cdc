"""What the further models of a run take: the critic of PPO, and a reward model in the trainer's processes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from mega_rl.bridge.mapping.tuning import critic_tuning, tuning_plan
from mega_rl.config.checks.model import REWARD_KEY
from mega_rl.config.schema.sections import RunConfig
from mega_rl.config.schema.stage import critic_parallel, has_critic, model_directory, reward_model, samples
from mega_rl.models.shape import SUFFIXES, VALUE, ModelShape, read_model_shape, value_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.activations import ActivationModel, Activations, PlannedTokens
from mega_rl.planning.state import StageParameters, TrainerState, stage_parameters, trainer_state
from mega_rl.platform.operators.memory import OperatorMemory


@dataclass(frozen=True)
class Companion:
    """One further model on one rank."""

    name: str
    state: TrainerState  # of a frozen model only the weights count
    activations: Activations
    is_trained: bool
    keeps_optimizer: bool = True  # on the device; false: its state is always on the host

    @property
    def num_bytes(self) -> int:
        """While it works."""
        return self.resident(())

    def resident(self, away: Collection[str]) -> int:
        """While it does not. ``away``: the parts that are on the host then."""
        parts = {"weights": self.state.by_kind_total if not self.is_trained else self.state.weights}
        if self.is_trained:
            optimizer = self.state.optimizer if self.keeps_optimizer else 0
            parts |= {"gradients": self.state.gradients, "optimizer": optimizer}
        return sum(size for part, size in parts.items() if part not in away)

    @property
    def host_bytes(self) -> int:
        """What is always on the host."""
        return 0 if self.keeps_optimizer or not self.is_trained else self.state.optimizer


def companions(
    config: RunConfig, shape: ModelShape, layout: ParallelLayout, operators: OperatorMemory, tokens: PlannedTokens
) -> Callable[[int], list[Companion]]:
    """rank -> its companions.

    Args:
        shape: of the policy.
        tokens: of its fullest micro-batches, which the others have too.

    Raises:
        InputError: the directory of one holds no value model.
    """
    models: list[_Model] = []
    if has_critic(config):
        path = config.critic.path
        own = shape if path is None else read_model_shape(path, "critic.path", tuple(SUFFIXES))
        at_its_layout = replace(config, parallel=critic_parallel(config))
        models.append(_Model("critic", value_shape(own), True, config.critic.shares_base, at_its_layout))
    if samples(config) and (reward := reward_model(config)) is not None:
        shape = read_model_shape(model_directory(reward), REWARD_KEY, VALUE)
        models.append(_Model("reward model", shape, False, False, config))
    parts = [_of_ranks(model, layout.world_size, operators, tokens) for model in models]
    return lambda rank: [of_rank(rank) for of_rank in parts]


@dataclass(frozen=True)
class _Model:
    """One further model of a run."""

    name: str
    shape: ModelShape
    is_trained: bool
    shares_base: bool
    config: RunConfig  # with the layout of this model


def _of_ranks(
    model: _Model, world_size: int, operators: OperatorMemory, tokens: PlannedTokens
) -> Callable[[int], Companion]:
    """rank -> what a model takes there."""
    config, stages = model.config, range(model.config.parallel.pipeline)
    layout = ParallelLayout.of(config.parallel, world_size)
    held = [_held(config, model.shape, layout, stage, model.shares_base) for stage in stages]
    computed = ActivationModel(config, model.shape, layout, operators, tokens)
    activations = [computed.of_stage(stage) for stage in stages]

    def of_rank(rank: int) -> Companion:
        stage, is_kept = layout.coordinates(rank).pipeline, not config.memory.optimizer_on_host
        state = trainer_state(config, layout, rank, held[stage], False)
        return Companion(model.name, state, activations[stage], model.is_trained, is_kept)

    return of_rank


def _held(
    config: RunConfig, shape: ModelShape, layout: ParallelLayout, stage: int, shares_base: bool
) -> StageParameters:
    """What a companion has of its own on the ranks of a pipeline stage."""
    plan = tuning_plan(critic_tuning(config.tuning, shares_base), shape)
    parameters = stage_parameters(config, shape, layout, stage, plan)
    return replace(parameters, frozen=()) if shares_base else parameters
