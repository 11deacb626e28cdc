"""The plain arithmetic of the stages: metrics out of samples, and when something is due."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.config import RunConfig
from mega_rl.config.schema.sections import AlgorithmConfig
from mega_rl.data.packing import sequence_of
from mega_rl.errors import InputError
from mega_rl.evaluation.evaluate import RowSummary, evaluation_metrics
from mega_rl.observe.metrics.declared import match
from mega_rl.rollout.collect.collect import GroupSummary
from mega_rl.stages.learn import learning
from mega_rl.stages.learn.update_metrics import Gradients, pass_metrics
from mega_rl.stages.run.batch_share import Totals
from mega_rl.stages.run.progress import is_due
from mega_rl.stages.sampling import rollout_metrics
from mega_rl.stages.sampling.batch_builder import has_signal, has_signal_by_turn
from mega_rl.stages.score import scoring
from mega_rl.stages.weights.weight_sync import Pushed
from mega_rl.types import (
    ASSISTANT,
    PROMPT,
    Outcome,
    Prompt,
    RoutingShape,
    Sample,
    Score,
    Span,
    Trajectory,
    TrajectoryTokens,
    TurnSpan,
    UnknownReward,
)


def sample(
    prompt_index: int, reward: float, length: int = 2, finish: str = "stop", index: int = 0, **parts: float
) -> Sample:
    prompt = Prompt(prompt_index, (1, 2, 3), "", "", "s")
    trajectory = Trajectory.single_turn(prompt, index, (5,) * length, (-0.5,) * length, "", finish, 0)
    return Sample(trajectory.summary(), Score(reward, parts), 0.0)


def group_of(samples: Sequence[Sample]) -> GroupSummary:
    return GroupSummary(tuple(s.summary for s in samples), tuple(s.score for s in samples))


def test_sample_metrics_by_hand() -> None:
    samples = [sample(0, 1.0), sample(0, 0.0, 4, "length", 1), sample(1, 1.0), sample(1, 1.0, index=1)]
    metrics = rollout_metrics.sample_metrics(samples)
    assert metrics["reward/mean"] == 0.75 and metrics["reward/std"] == pytest.approx(0.5)
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward/groups_equal_fraction"] == 0.5
    assert metrics["response_length/mean"] == 2.5 and metrics["response_length/clip_fraction"] == 0.25
    assert metrics["rollout/entropy"] == pytest.approx(0.5)
    assert "reward/a" not in metrics


def test_the_bytes_of_experts_are_shown_if_there_are_any() -> None:
    plain = sample(0, 1.0)
    routed = replace(plain, summary=plain.summary._replace(routing=RoutingShape("uint8", 3, 2)))
    assert rollout_metrics.sample_metrics([plain, routed, routed])["rollout/routing_bytes"] == 2 * 4 * 3 * 2
    assert "rollout/routing_bytes" not in rollout_metrics.sample_metrics([plain])


def test_the_parts_of_a_sum_of_rewards_are_shown() -> None:
    metrics = rollout_metrics.sample_metrics([sample(0, 1.5, a=1.0, b=0.5), sample(0, 0.5, a=0.0, b=0.5)])
    assert metrics["reward/a"] == 0.5 and metrics["reward/b"] == 0.5


def test_advantages_go_by_group_even_where_two_have_the_same_prompt() -> None:
    groups = []
    for rewards in ((1.0, 0.0), (0.0, 0.0)):
        samples = [sample(7, reward) for reward in rewards]
        groups.append(group_of(samples))
    values = [s.advantage for s in learning.with_advantages(groups, AlgorithmConfig())]
    assert values[0] == pytest.approx(0.5 / (0.5**0.5 + 1e-6)) and values[1] == -values[0]
    assert values[2:] == [0.0, 0.0] and learning.with_advantages([], AlgorithmConfig()) == []


def episode(turns: Sequence[int], score: Score) -> Sample:
    """Of turns of so many tokens, each answered by a token of its environment."""
    prompt, ids, mask, found = Prompt(7, (1, 2), "", "", "s"), [1, 2], [0, 0], [TurnSpan(PROMPT, 0, 2)]
    for number, size in enumerate(turns):
        if number:
            ids, mask = [*ids, 9], [*mask, 0]
            found.append(TurnSpan("tool", len(ids) - 1, len(ids)))
        ids, mask = [*ids, *[5] * size], [*mask, *[1] * size]
        found.append(TurnSpan(ASSISTANT, len(ids) - size, len(ids)))
    trajectory = Trajectory(
        prompt,
        0,
        np.array(ids, np.int32),
        np.array(mask, np.bool_),
        np.zeros(len(ids), np.float32),
        (Span(2, 0),),
        tuple(found),
        "",
        "stop",
        None,
        Outcome("environment", len(turns), None, None, {}, score.turn_rewards),
    )
    return Sample(trajectory.summary(), score, 0.0)


def test_credit_by_turn() -> None:
    """Returns 3 2 2 and 1 1: the rest of a score, 2 and 1, is of the last turn."""
    samples = [
        episode([1, 2, 3], Score(3.0, turn_rewards=(1.0, 0.0, 0.0))),
        episode([4, 1], Score(1.0)),
        episode([2], Score(math.nan)),
    ]
    algorithm = AlgorithmConfig(advantage="dr_grpo", credit="turn")
    found = learning.with_advantages([group_of(samples)], algorithm)
    assert [s.turn_advantages for s in found] == [(1.0, 0.5, 0.0), (-1.0, -0.5), (0.0,)]
    assert [s.advantage for s in found] == pytest.approx([2 / 6, -4.5 / 5, 0.0])
    mask = [0, 0, 1, 0, 1, 1, 0, 1, 1, 1]
    tokens = TrajectoryTokens(np.full(10, 5, np.int32), np.packbits(mask), -np.ones(6, np.float32))
    sequence = sequence_of(tokens, found[0].token_advantages)
    assert sequence.advantages is not None and sequence.advantages.tolist() == [0, 1, 0, 0.5, 0.5, 0, 0, 0, 0]
    whole = learning.with_advantages([group_of(samples)], AlgorithmConfig(advantage="dr_grpo"))
    assert [(s.advantage, s.turn_advantages) for s in whole] == [(1.0, ()), (-1.0, ()), (0.0, ())]


def test_a_group_whose_turns_alone_differ_is_learnt_from_if_turns_are_credited() -> None:
    scores = [Score(1.0, turn_rewards=(1.0, 0.0)), Score(1.0, turn_rewards=(0.0, 1.0)), Score(math.nan)]
    assert not has_signal(None, scores) and has_signal_by_turn(scores, [2, 2, 1], 1.0)
    assert not has_signal_by_turn(scores[1:], [2, 1], 1.0)


def test_a_group_of_a_source_without_the_reward_that_counts_goes_by_the_sum() -> None:
    scores = [Score(1.0, {"right": 1.0, "short": 0.0}), Score(1.0, {"right": 0.0, "short": 1.0})]
    assert has_signal("right", scores) and not has_signal("other", scores)
    assert has_signal("other", [Score(1.0, {"right": 1.0}), Score(0.0, {"right": 0.0})])


def test_a_group_of_other_numbers_of_turns_is_learnt_from_if_a_turn_has_an_advantage() -> None:
    def is_learnt_from(turns: Sequence[Sequence[int]], scores: Sequence[Score], discount: float) -> bool:
        group = group_of([episode(*pair) for pair in zip(turns, scores, strict=True)])
        algorithm = AlgorithmConfig(advantage="grpo", credit="turn", turn_discount=discount)
        found = learning.with_advantages([group], algorithm)
        has_advantage = any(abs(a) > 1e-3 for s in found for a in s.turn_advantages)
        assert has_signal_by_turn(group.scores, group.num_turns, discount) == has_advantage
        return has_advantage

    unpaid = [Score(1.0, turn_rewards=(0.0, 0.0, 0.0)), Score(1.0, turn_rewards=(0.0, 0.0))]
    assert not is_learnt_from([[1, 1, 1], [1, 1]], unpaid, 1.0), "all returns are 1"
    late = [Score(1.0), Score(1.0)]
    assert is_learnt_from([[1, 1], [1, 1, 1, 1]], late, 0.5), "the first returns are 1/2 and 1/8"
    assert not is_learnt_from([[1, 1], [1, 1, 1, 1]], late, 1.0)
    same = [Score(0.6, turn_rewards=(0.1, 0.2, 0.3)), Score(0.6, turn_rewards=(0.3, 0.2, 0.1))]
    assert is_learnt_from([[1, 1, 1], [1, 1, 1]], same, 1.0)
    rounded = [Score(0.1 + 0.2 + 0.3), Score(0.3 + 0.2 + 0.1), Score(math.nan)]
    assert not is_learnt_from([[1], [1], [1]], rounded, 1.0), "equal but for rounding"


def unknown(prompt_index: int, cause: str = "raised") -> Sample:
    known = sample(prompt_index, 0.0)
    score = Score(math.nan, {"a": 1.0}, {"b": UnknownReward(cause, "raised KeyError: 'x'")})
    return Sample(known.summary, score, 0.0)


def test_unknown_samples_are_counted_and_left_out() -> None:
    samples = [sample(0, 1.0, a=1.0, b=0.0), unknown(0), sample(1, 0.5, a=0.5, b=0.0), unknown(1, "timed_out")]
    metrics = rollout_metrics.sample_metrics(samples)
    assert metrics["reward/num_unknown"] == 2.0
    assert metrics["reward/num_unknown/raised"] == metrics["reward/num_unknown/timed_out"] == 1.0
    assert (metrics["reward/mean"], metrics["reward/min"], metrics["reward/a"]) == (0.75, 0.5, 0.75)
    assert "reward/num_unknown" not in rollout_metrics.sample_metrics(samples[::2])
    for name in metrics:
        match(name)  # is declared
    none_known = rollout_metrics.sample_metrics([unknown(0)])
    assert none_known["reward/num_unknown"] == 1.0 and "reward/mean" not in none_known


def test_unknown_rewards_are_told_by_sample_and_end_the_run_when_nothing_else_comes() -> None:
    said: list[str] = []
    watch = scoring.RewardWatch(said.append)
    bad, good = unknown(7), sample(7, 1.0)

    def step(*samples: Sample) -> None:
        watch.check([group_of(samples)])

    step(good, bad)
    assert said == [
        "warning: the reward b is unknown (raised) for 1 of 2 samples: s prompt 7 sample 0; "
        "on the first of them it raised KeyError: 'x'"
    ]
    for _ in range(scoring.MAX_UNKNOWN_STEPS - 1):
        step(bad)
    assert said[-1] == "warning: no reward of this step is known, so nothing is learnt from it"
    step(good)  # counts anew from here
    for _ in range(scoring.MAX_UNKNOWN_STEPS - 1):
        step(bad)
    with pytest.raises(InputError, match="for 5 steps in a row: fix the reward b, which raised KeyError"):
        step(bad)


def test_a_reward_that_raises_on_every_first_sample_ends_the_run_at_once() -> None:
    said: list[str] = []
    watch = scoring.RewardWatch(said.append)
    bad = [unknown(index) for index in range(5)]
    with pytest.raises(InputError, match="the reward b fails on all 5 samples of the first step: it raised KeyError"):
        watch.check([group_of(bad)])
    assert "for 5 of 5 samples: s prompt 0 sample 0, s prompt 1 sample 0, s prompt 2 sample 0 and 2 more" in said[0]


def test_validation_leaves_unknown_scores_out() -> None:
    samples = [sample(0, 1.0), unknown(0), unknown(1), sample(2, 0.0), sample(2, 1.0)]
    greedy, sampled = ([RowSummary(s.summary, s.score, is_greedy) for s in samples] for is_greedy in (True, False))
    metrics = evaluation_metrics(greedy[:3] + sampled)
    assert metrics["val-core/s/greedy/acc"] == 1.0
    assert (metrics["val-core/s/acc/mean@1"], metrics["val-core/s/acc/best@2"]) == (2 / 3, 1.0)


def test_minibatches_average_and_maxima_stay_maxima() -> None:
    first = Gradients(Totals({"loss": 1.0, "kl": 6.0}, {"ratio": 1.5}), num_tokens=3, gate_metrics={})
    second = Gradients(Totals({"loss": 2.0, "kl": 5.0}, {"ratio": 1.25}), num_tokens=5, gate_metrics={})
    assert pass_metrics([first, second]) == {"actor/loss": 1.5, "actor/kl": 1.5, "actor/ratio_max": 1.5}


def test_schedule_metrics_are_there_only_with_noise() -> None:
    config = RunConfig()
    noise = AqnNoise(config.aqn, 10)
    assert rollout_metrics.schedule_metrics(noise, Pushed(5, 0.0), [], {"rollout/kl": 0.1}) == {}
    config.aqn.enabled = True
    assert rollout_metrics.schedule_metrics(noise, Pushed(9, 0.0005), [], {"rollout/kl": 0.1}) == {
        "aqn/sigma": 0.0005,
        "aqn/stage": 9.0,
        "aqn/kl_clean_noisy": 0.1,
    }


def test_schedule_metrics_are_of_the_weights_that_sampled() -> None:
    config = RunConfig()
    config.aqn.enabled, config.aqn.schedule = True, "linear"
    noise = AqnNoise(config.aqn, 10)

    def found(*versions: tuple[int, int]) -> dict[str, float]:
        of = sample(0, 1.0)
        samples = [Sample(of.summary._replace(versions=versions), of.score, 0.0)]
        return rollout_metrics.schedule_metrics(noise, Pushed(6, noise.sigma(6)), samples, {})

    assert found((5, 2)) == {"aqn/sigma": noise.sigma(5), "aqn/stage": 5.0}
    several = found((4, 3), (6, 1))
    assert several == {
        "aqn/sigma": pytest.approx((3 * noise.sigma(4) + noise.sigma(6)) / 4),
        "aqn/sigma_min": noise.sigma(6),
        "aqn/sigma_max": noise.sigma(4),
        "aqn/stage": 4.5,
        "aqn/stage_min": 4.0,
        "aqn/stage_max": 6.0,
    }
    assert all(match(name) is not None for name in several)


@pytest.mark.parametrize(("step", "frequency", "due"), [(10, -1, True), (4, 2, True), (5, 2, False), (5, -1, False)])
def test_what_is_due(step: int, frequency: int, due: bool) -> None:
    assert is_due(step, frequency, total_steps=10) is due
