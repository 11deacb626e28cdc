"""From scored trajectories to optimizer steps, with a stand-in for the engine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from mega_rl.algorithms import advantage, policy_loss
from mega_rl.algorithms.objective import OBJECTIVES
from mega_rl.config import RunConfig
from mega_rl.config.checks.algorithm import PRESETS
from mega_rl.errors import GateFailure, InputError
from mega_rl.microbatch import Figures, Microbatch, TokenStats
from mega_rl.observe.metrics.declared import is_declared
from mega_rl.observe.timers import Timers
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.collect.collect import GroupSummary
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.stages.learn import learning
from mega_rl.stages.learn.gate_watch import GateWatch
from mega_rl.stages.learn.learning import Learner
from mega_rl.stages.run.batch_share import BatchShare
from mega_rl.types import Prompt, Score, Trajectory

NAN = float("nan")
REWARDS = {0: [1.0, 0.0, NAN, 0.5], 1: [0.0, 0.0, 1.0, NAN], 2: [NAN, NAN, NAN, 1.0]}  # prompt -> its samples'
LENGTHS = {0: [3, 1, 4, 2], 1: [5, 2, 2, 3], 2: [1, 1, 1, 3]}


def logprobs_of(microbatch: Microbatch, shift: float) -> torch.Tensor:
    """A policy by hand: something of every token and its place."""
    return -1.0 - 0.1 * (microbatch.target_ids % 7) - 0.03 * microbatch.position_ids + shift * microbatch.position_ids


class Actor:
    """Counts what it is asked for; ``off`` moves the policy's forward pass without gradients."""

    def __init__(self, off: float = 0.0) -> None:
        self.off, self.num_steps, self.num_passes = off, 0, 0
        self.batches: list[list[Microbatch]] = []
        self.gradients: list[torch.Tensor] = []  # by the log-probabilities of every micro-batch
        self.stepper = SimpleNamespace(skipped=SimpleNamespace(total=0, in_a_row=0))
        self.router_metrics: dict[str, float] = {}
        self.policy = None

    def token_stats(self, microbatches: Sequence[Microbatch], record_experts: bool = False) -> list[TokenStats]:
        self.num_passes += 1
        experts = {0: torch.zeros(1, 1)} if record_experts else None
        shifted = ((logprobs_of(m, 0.0) + self.off, torch.ones(m.num_tokens)) for m in microbatches)
        return [TokenStats(*rows, own_experts=experts) for rows in shifted]

    def forward_backward(self, microbatches: list[Microbatch], loss_function: Any) -> list[Figures]:
        self.batches.append(microbatches)
        reports = []
        for microbatch in microbatches:
            logprobs = logprobs_of(microbatch, 0.0).requires_grad_()
            loss, figures = loss_function(TokenStats(logprobs, torch.ones(microbatch.num_tokens)), microbatch)
            self.gradients.append(torch.autograd.grad(loss, logprobs)[0])
            reports.append(Figures({"loss": loss.detach(), **figures.sums}, figures.maxima))
        return reports

    def optimizer_step(self, next_is_forward_backward: bool) -> Any:
        self.num_steps += 1
        return SimpleNamespace(skipped=False, grad_norm=1.0, lr=0.1, bad_parameter=None)


class Reference:
    def token_stats(self, microbatches: Sequence[Microbatch]) -> list[TokenStats]:
        return [TokenStats(logprobs_of(m, 0.01), torch.ones(m.num_tokens)) for m in microbatches]


def trajectories_and_scores() -> tuple[list[Trajectory], list[Score]]:
    trajectories, scores = [], []
    for index, rewards in REWARDS.items():
        prompt = Prompt(index, (1, 2, 3), "", "", "s")
        for i, (reward, length) in enumerate(zip(rewards, LENGTHS[index], strict=True)):
            token_ids = tuple(range(4 + i, 4 + i + length))
            trajectories.append(Trajectory.single_turn(prompt, i, token_ids, (-1.5,) * length, "", "stop", 0))
            scores.append(Score(reward))
    return trajectories, scores


class Learning:
    """One rollout batch through ``with_advantages`` and ``Learner.update``."""

    def __init__(self) -> None:
        self.config = RunConfig()
        self.config.data.max_response_length = 8
        self.said: list[str] = []
        self.share = BatchShare(ParallelLayout.create(1, 1, 1), 0, max_tokens=16384, pad_multiple=1, pad_token_id=0)
        self.trajectory_store = TrajectoryStore(self.share.layout, 0)
        self.job: Any = SimpleNamespace(
            config=self.config,
            share=self.share,
            trajectory_store=self.trajectory_store,
            timers=Timers(),
            say=self.said.append,
        )

    def run(
        self, actor: Any, has_gates: bool = False, scores: list[Score] | None = None, step: int = 0
    ) -> dict[str, float]:
        trajectories, given = trajectories_and_scores()
        pairs = list(zip(trajectories, scores or given, strict=True))
        groups = [
            GroupSummary(tuple(self.trajectory_store.add(t) for t, _ in found), tuple(s for _, s in found))
            for _, found in ((key, list(part)) for key, part in groupby(pairs, key=lambda pair: pair[0].prompt.index))
        ]
        samples = learning.with_advantages(groups, self.config.algorithm)
        reference: Any = Reference() if self.config.algorithm.kl_coefficient else None
        watch = GateWatch(self.config, True, self.said.append)
        learner = Learner(self.job, actor, reference)
        return learner.update(samples, watch.of_step(step, version=0, sigma=0.0) if has_gates else None)


@pytest.fixture
def world() -> Learning:
    return Learning()


def learnt(values: Any, microbatches: list[Microbatch]) -> list[float]:
    return [v for m, value in zip(microbatches, values, strict=True) for v in value[m.loss_mask != 0].tolist()]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns_and_leaves_unknown_samples_out(world: Learning, name: str) -> None:
    for key, value in PRESETS[name].items():
        setattr(world.config.algorithm, key, value)
    actor = Actor()
    metrics = world.run(actor)
    (batch,) = actor.batches
    num_known = [n for p, rs in REWARDS.items() for r, n in zip(rs, LENGTHS[p], strict=True) if r == r]
    assert sum(len(m.sequence_indices) for m in batch) == len(num_known) == 7
    assert sum(int(m.loss_mask.sum()) for m in batch) == sum(num_known)
    assert actor.num_steps == 1 and all(value == value for value in metrics.values())
    assert (metrics["actor/ratio_mean"], metrics["actor/ppo_kl"]) == (1.0, 0.0)


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("built_in", OBJECTIVES)
def test_the_built_in_ones_as_ones_own_give_the_same_bits(
    world: Learning, built_in: str, num_minibatches: int, tmp_path: Path
) -> None:
    algorithm = world.config.algorithm
    algorithm.objective, algorithm.minibatches_per_step = built_in, num_minibatches
    algorithm.importance_correction, algorithm.entropy_coefficient = "mask", 0.01
    first, second = Actor(), Actor()
    expected = world.run(first)
    copied = [shutil.copy(module.__file__, tmp_path) for module in (policy_loss, advantage)]
    algorithm.objective = f"{copied[0]}:{OBJECTIVES[built_in].__name__}"
    algorithm.advantage = f"{copied[1]}:grpo_advantages"
    learning.check_algorithm(world.config, torch.device("cpu"))
    assert world.run(second) == expected and expected["actor/loss"] != 0
    assert len(first.gradients) == len(second.gradients) == num_minibatches
    for mine, theirs in zip(first.gradients, second.gradients, strict=True):
        assert torch.equal(mine, theirs) and mine.any()


def test_figures_of_a_loss_of_ones_own_are_logged(world: Learning, tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text("def plain(logprobs_T, mask_T): return -logprobs_T, {'half': mask_T / 2, 'clip_fraction': mask_T}")
    world.config.algorithm.objective = f"{file}:plain"
    metrics = world.run(Actor())
    assert (metrics["actor/own/half"], metrics["actor/clip_fraction"], metrics["actor/ratio_mean"]) == (0.5, 1.0, 1.0)
    assert all(is_declared(name) for name in metrics)


def test_what_cannot_be_learnt_by_is_an_input_error(world: Learning, tmp_path: Path) -> None:
    file = tmp_path / "scalar.py"
    file.write_text("def scalar(logprobs_T): return logprobs_T.mean()")
    world.config.algorithm.objective = f"{file}:scalar"
    with pytest.raises(InputError, match="algorithm.objective: .*scalar.py:scalar returns a tensor"):
        learning.check_algorithm(world.config, torch.device("cpu"))


def test_the_kl_in_the_reward_and_whitening_by_numpy(world: Learning) -> None:
    algorithm = world.config.algorithm
    algorithm.advantage, algorithm.kl_in, algorithm.kl_estimator = "reinforce_pp", "reward", "k1"
    algorithm.kl_coefficient, algorithm.minibatches_per_step = 0.5, 2
    actor = Actor()
    world.run(actor)
    batches = [m for batch in actor.batches for m in batch]
    assert len(actor.batches) == 2
    expected = []
    for prompt, rewards in REWARDS.items():
        for reward, length in zip(rewards, LENGTHS[prompt], strict=True):
            if reward == reward:
                k1 = numpy.array([-0.01 * position for position in range(2, 2 + length)])  # logp_old - logp_ref
                expected += [reward - 0.5 * k1[t:].sum() for t in range(length)]
    values = numpy.array(expected)
    whitened = (values - values.mean()) / values.std(ddof=1)
    got = learnt([m.advantages for m in batches], batches)
    assert sorted(got) == pytest.approx(sorted(whitened.tolist()), rel=1e-4)
    assert numpy.mean(got) == pytest.approx(0.0, abs=1e-6) and numpy.std(got, ddof=1) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("keys", "num_passes"),
    [
        ({}, 0),  # the update's own pass gives pi_old
        ({"algorithm.minibatches_per_step": 2}, 2),
        ({"algorithm.kl_in": "reward"}, 1),
        ({"aqn.enabled": True}, 0),
        ({"aqn.enabled": True, "aqn.old_logprobs": "recompute_noisy"}, 1),
        ({"aqn.enabled": True, "aqn.old_logprobs": "rollout", "algorithm.minibatches_per_step": 2}, 0),
    ],
)
def test_old_logprobs_are_computed_only_where_the_objective_needs_them(
    world: Learning, keys: dict[str, Any], num_passes: int
) -> None:
    for key, value in keys.items():
        section, name = key.split(".")
        setattr(getattr(world.config, section), name, value)
    actor = Actor()
    world.run(actor)
    assert actor.num_passes == num_passes


@pytest.mark.parametrize("mode", ["rollout", "recompute", "off"])
def test_the_update_replays_the_experts_of_the_pass_before_it(world: Learning, mode: Any) -> None:
    world.config.rollout.routing_replay, world.config.algorithm.minibatches_per_step = mode, 2
    actor = Actor()
    world.run(actor)
    assert {m.own_experts is not None for batch in actor.batches for m in batch} == {mode == "recompute"}


def test_a_step_without_a_known_reward_learns_nothing_and_says_so(world: Learning) -> None:
    actor = Actor()
    assert world.run(actor, scores=[Score(NAN)] * 12) == {}
    assert actor.num_steps == 0 and "learns nothing" in world.said[0]
    metrics = world.run(actor, scores=[Score(1.0)] + [Score(NAN)] * 11)
    assert actor.num_steps == 1 and metrics["actor/pg_loss"] == 0.0


def test_more_minibatches_than_known_samples(world: Learning) -> None:
    world.config.algorithm.minibatches_per_step = 4
    actor = Actor()
    world.run(actor, scores=[Score(1.0), Score(0.0)] + [Score(NAN)] * 10)
    assert actor.num_steps == 2


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_gates_stop_the_first_step_before_the_weights_change(world: Learning, num_minibatches: int) -> None:
    world.config.algorithm.minibatches_per_step, world.config.algorithm.kl_coefficient = num_minibatches, 0.0
    world.config.trainer.gates.engine = 10.0
    metrics = world.run(good := Actor(), has_gates=True)
    assert good.num_steps == num_minibatches
    assert metrics["gate/ppo_kl"] == metrics["gate/ratio"] == 0.0 and metrics["gate/engine"] > 0.1
    assert "gate/reference" not in metrics and "reference not checked (the run has none)" in world.said[0]
    with pytest.raises(GateFailure, match=r"ppo_kl: [^\n]* 0\.001"):
        world.run(bad := Actor(off=1e-3), has_gates=True)
    assert bad.num_steps == 0
    assert not any(name.startswith("gate/") for name in world.run(Actor()))


def test_an_engine_that_is_off_stops_a_later_step_before_the_weights_change(world: Learning) -> None:
    with pytest.raises(GateFailure, match="step 6 is not what it must be"):
        world.run(actor := Actor(off=1e-3), has_gates=True, step=5)
    assert actor.num_steps == 0
    world.config.trainer.gates.engine = 10.0
    assert not any(name.startswith("gate/") for name in world.run(actor, has_gates=True, step=5))
    assert actor.num_steps == 1, "a forward pass without gradients differs, but nobody asked for one"
