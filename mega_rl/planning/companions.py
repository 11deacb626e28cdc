"""What the further models of a run take: the critic of PPO, and a reward model in the trainer's processes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from mega_rl.bridge.mapping.tuning import critic_tuning, tuning_plan
from mega_rl.config.model import REWARD_KEY
from mega_rl.config.schema import RunConfig
from mega_rl.config.stage import has_critic, model_directory, reward_model, samples
from mega_rl.models.shape import SUFFIXES, VALUE, ModelShape, read_model_shape, value_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.activations import ActivationModel, Activations, Tokens
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
    config: RunConfig, shape: ModelShape, layout: ParallelLayout, operators: OperatorMemory, tokens: Tokens
) -> Callable[[int], list[Companion]]:
    """rank -> its companions.

    Args:
        shape: of the policy.
        tokens: of its fullest micro-batches, which the others have too.

    Raises:
        InputError: the directory of one holds no value model.
    """
    models: list[tuple[str, ModelShape, bool, bool]] = []  # name, shape, is trained, has the policy's frozen weights
    if has_critic(config):
        path = config.critic.path
        own = shape if path is None else read_model_shape(path, "critic.path", tuple(SUFFIXES))
        models.append(("critic", value_shape(own), True, config.critic.shares_base))
    if samples(config) and (reward := reward_model(config)) is not None:
        models.append(("reward model", read_model_shape(model_directory(reward), REWARD_KEY, VALUE), False, False))
    stages = range(layout.pipeline)
    held = [[_held(config, one, layout, stage, shares) for stage in stages] for _, one, _, shares in models]
    of_stages = [
        [ActivationModel(config, one, layout, operators, tokens).of_stage(stage) for stage in stages]
        for _, one, _, _ in models
    ]

    def of_rank(rank: int) -> list[Companion]:
        stage, is_kept = layout.coordinates(rank).pipeline, not config.memory.optimizer_on_host
        return [
            Companion(
                name, trainer_state(config, layout, rank, own[stage], False), activations[stage], is_trained, is_kept
            )
            for (name, _, is_trained, _), own, activations in zip(models, held, of_stages, strict=True)
        ]

    return of_rank


def _held(
    config: RunConfig, shape: ModelShape, layout: ParallelLayout, stage: int, shares_base: bool
) -> StageParameters:
    """What a companion has of its own on the ranks of a pipeline stage."""
    plan = tuning_plan(critic_tuning(config.tuning, shares_base), shape)
    parameters = stage_parameters(config, shape, layout, stage, plan)
    return replace(parameters, frozen=()) if shares_base else parameters
