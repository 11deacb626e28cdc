"""A critic beside the policy, with a stand-in for its engine, and a reward model's part in the scores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from mega_rl.config.checks.algorithm import PRESETS
from mega_rl.config.schema.sections import AlgorithmConfig
from mega_rl.megatron.offload import PARTS
from mega_rl.microbatch import Figures, Microbatch
from mega_rl.rewards.scorer import WeightedReward
from mega_rl.rollout.collect.collect import GroupSummary
from mega_rl.stages.learn import learning
from mega_rl.stages.learn.critic import Critic
from mega_rl.stages.learn.gate_watch import GateWatch
from mega_rl.stages.learn.learning import Learner
from mega_rl.stages.score.reward_model import RewardModel
from mega_rl.types import Score
from tests.unit.stages.learn.test_learning import LENGTHS, REWARDS, Actor, Learning, Reference, trajectories_and_scores

GAMMA, LAM = 0.9, 0.8


def values_of(microbatch: Microbatch) -> torch.Tensor:
    """A critic by hand: something of every place and of the token that comes next."""
    return 0.1 * microbatch.position_ids + 0.01 * (microbatch.target_ids % 5)


class Offload:
    def __init__(self, name: str, done: list[tuple[str, str, tuple[str, ...]]]) -> None:
        self.name, self.done = name, done

    def to_host(self, *parts: str) -> None:
        self.done.append((self.name, "to host", parts))

    def to_device(self, *parts: str) -> None:
        self.done.append((self.name, "to device", parts))


class CriticEngine(Actor):
    """Values instead of log-probabilities."""

    def __init__(self, done: list[tuple[str, str, tuple[str, ...]]]) -> None:
        super().__init__()
        self.policy: Any = SimpleNamespace(token_values=lambda ms: [values_of(m) for m in ms])
        self.offload, self.lr_schedule = Offload("critic", done), SimpleNamespace(num_steps=0)

    def in_its_groups(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward_backward(self, microbatches: list[Microbatch], loss_function: Any) -> list[Figures]:
        self.batches.append(microbatches)
        found = [loss_function(values_of(m).requires_grad_(), m) for m in microbatches]
        return [Figures({"loss": loss.detach(), **figures.sums}) for loss, figures in found]

    def optimizer_step(self, next_is_forward_backward: bool) -> Any:
        self.lr_schedule.num_steps += 1
        return super().optimizer_step(next_is_forward_backward)


class World(Learning):
    """One rollout batch through a ``Learner`` with a critic, as often as it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        for key, value in PRESETS["ppo"].items():
            setattr(self.config.algorithm, key, value)
        self.config.algorithm.kl_coefficient, self.config.algorithm.minibatches_per_step = 0.5, 2
        self.config.trainer.gates.disabled = ["reference", "engine"]  # the stand-ins differ
        critic = self.config.critic
        critic.gamma, critic.lam = GAMMA, LAM
        self.done: list[tuple[str, str, tuple[str, ...]]] = []
        self.actor: Any = Actor()
        self.actor.offload, self.actor.companions = Offload("actor", self.done), {}
        self.engine: Any = CriticEngine(self.done)

    def steps(self, num_steps: int) -> list[dict[str, float]]:
        reference: Any = Reference()
        critic = Critic(self.job, self.share, self.engine, self.actor)
        learner = Learner(self.job, self.actor, reference, critic)
        watch = GateWatch(self.config, True, self.said.append)
        trajectories, scores = trajectories_and_scores()
        found = []
        for step in range(num_steps):
            groups = [GroupSummary(tuple(map(self.trajectory_store.add, trajectories)), tuple(scores))]
            samples = learning.with_advantages(groups, AlgorithmConfig(advantage="gae"))
            found.append(learner.update(samples, watch.of_step(step, version=0, sigma=0.0)))
        return found


@pytest.fixture
def world() -> World:
    return World()


def expected() -> tuple[list[float], list[float]]:
    """Whitened advantages and returns of all known samples, token by token."""
    advantages, returns = [], []
    for prompt, rewards in REWARDS.items():
        for number, (reward, length) in enumerate(zip(rewards, LENGTHS[prompt], strict=True)):
            carry = later = 0.0
            of_one = []
            for t in reversed(range(length)) if reward == reward else ():
                place, token = 2 + t, 4 + number + t  # of the position that predicts it, behind three prompt tokens
                value = 0.1 * place + 0.01 * (token % 5)
                k1 = -0.01 * place  # logp_old - logp_ref
                got = (reward if t == length - 1 else 0.0) - 0.5 * k1
                carry = got + GAMMA * later - value + GAMMA * LAM * carry
                later = value
                of_one.append((carry, carry + value))
            advantages += [a for a, _ in of_one]
            returns += [r for _, r in of_one]
    values = numpy.array(advantages)
    return ((values - values.mean()) / values.std(ddof=1)).tolist(), returns


def learnt(name: str, batches: list[list[Microbatch]]) -> list[float]:
    return sorted(v for batch in batches for m in batch for v in getattr(m, name)[m.loss_mask != 0].tolist())


def test_policy_and_critic_learn_from_the_same_values(world: World) -> None:
    (metrics,) = world.steps(1)
    advantages, returns = expected()
    assert learnt("advantages", world.actor.batches) == pytest.approx(sorted(advantages), rel=1e-4, abs=1e-5)
    assert learnt("returns", world.engine.batches) == pytest.approx(sorted(returns), rel=1e-5, abs=1e-6)
    assert (world.actor.num_steps, world.engine.num_steps) == (2, 2)
    assert metrics["critic/return_mean"] == pytest.approx(numpy.mean(returns), rel=1e-5)
    assert metrics["actor/ratio_mean"] == 1.0 and 0.0 <= metrics["critic/clip_fraction"] <= 1.0


def test_the_critic_learns_alone_first_and_the_gates_look_on(world: World) -> None:
    world.config.critic.warmup_steps = 1
    alone, both = world.steps(2)
    assert alone["gate/ppo_kl"] == 0.0 and "actor/loss" in alone and "actor/grad_norm" not in alone
    assert "actor/grad_norm" in both and len(world.actor.batches) == 1 + 2
    assert (world.actor.num_steps, world.engine.num_steps) == (2, 4)


def test_who_is_idle_is_away(world: World) -> None:
    world.steps(1)
    idle = ("gradients", "optimizer")
    working = [
        ("actor", "to host", idle),
        ("critic", "to device", ()),
        ("critic", "to host", PARTS),
        ("actor", "to device", idle),
    ]
    assert world.done == [("critic", "to host", PARTS), *working, *working]
    assert world.actor.companions == {"critic": world.engine}


def test_a_reward_model_adds_its_part_once(world: World) -> None:
    trajectories, scores = trajectories_and_scores()

    class Model:
        def token_values(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
            return [m.token_ids.float() for m in microbatches]

    @contextmanager
    def on_device() -> Any:
        yield Model()

    frozen: Any = SimpleNamespace(on_device=on_device)
    model = RewardModel(WeightedReward("model", 0.5), frozen, world.share)
    scores = [Score(1.5, {"a": 1.5}), *scores[1:]]
    summaries = [world.trajectory_store.add(trajectory) for trajectory in trajectories]
    found = model.complete(summaries, scores, world.trajectory_store)
    assert [score.parts["model"] for score in found] == [float(t.token_ids[-1]) for t in trajectories]
    assert found[0] == Score(1.5 + 0.5 * float(trajectories[0].token_ids[-1]), {"a": 1.5, **found[0].parts})
    unknown = [not score.is_known for score in scores]
    assert [not score.is_known for score in found] == unknown and any(unknown)
    assert model.complete(summaries, found, world.trajectory_store)[0] is found[0]
    source = summaries[0].data_source
    for only, is_scored in ((("elsewhere",), False), (("elsewhere", source), True)):
        other = RewardModel(WeightedReward("model", 0.5, only), frozen, world.share)
        assert other.scores(source) is is_scored
        again = other.complete(summaries, scores, world.trajectory_store)
        assert [score.parts for score in again] == [score.parts for score in (found if is_scored else scores)]
