"""The ``algorithm`` section: its names are those of the functions, and what makes no sense together is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from mega_rl.config import RunConfig, problems
from mega_rl.config.checks.algorithm import algorithm_problems
from mega_rl.config.schema.sections import GroupBaseline


def found(config: RunConfig) -> list[str]:
    return list(algorithm_problems(config, lambda *fields: True))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"objective": "gspo"}, "set it to sequence_mean"),
        ({"clip_ratio_low": 1.0}, "algorithm.objective to cispo"),
        ({"objective": "cispo", "dual_clip": 3.0}, "algorithm.objective 'cispo' has none"),
        ({"importance_floor": 0.5}, "'truncate' has no lower bound"),
        ({"importance_correction": "mask", "importance_cap": None}, "'mask' needs an upper bound"),
        ({"importance_correction": "mask", "importance_floor": 1.5}, "with 1 between them"),
        ({"importance_correction": "mask", "importance_floor": 0.2, "importance_cap": 0.5}, "with 1 between them"),
    ],
)
def test_what_makes_no_sense_together(changes: dict[str, Any], part: str) -> None:
    config = RunConfig()
    assert found(config) == []
    for key, value in changes.items():
        setattr(config.algorithm, key, value)
    (line,) = found(config)
    assert part in line and line.startswith("algorithm.")


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("objective", "gpso", "gspo"),
        ("name", "drgrpo", "dr_grpo"),
        ("advantage", "rlo", "rloo"),
        ("kl_in", "los", "loss"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(key: str, value: str, near: str) -> None:
    config = RunConfig()
    config.model.path = "nowhere"
    setattr(config.algorithm, key, value)
    (line,) = [line for line in problems(config) if line.startswith("algorithm.")]
    assert line.startswith(f"algorithm.{key} is {value!r}: set it to one of ") and f"did you mean {near}?" in line


def test_what_is_asked_of_a_loss_and_an_advantage_of_ones_own() -> None:
    """Its file must be there; bounds and reduction are what it makes of them, and no group is demanded."""
    config = RunConfig()
    algorithm = config.algorithm
    algorithm.objective, algorithm.advantage, config.rollout.n = "package.losses:loss", f"{__file__}:found", 1
    algorithm.clip_ratio_low, algorithm.dual_clip = 1.0, 3.0
    assert found(config) == []
    algorithm.objective, algorithm.advantage = "gone.py:loss", "losses.py: no name"
    assert found(config) == [
        "algorithm.advantage is 'losses.py: no name': write package.module:function or path/to/file.py:function",
        "algorithm.objective is 'gone.py:loss', but gone.py is not a file: give an existing Python file",
    ]


@pytest.mark.parametrize("advantage", get_args(GroupBaseline))
def test_a_group_baseline_needs_a_group(advantage: str) -> None:
    config = RunConfig()
    config.algorithm.advantage, config.rollout.n = advantage, 1
    (line,) = found(config)
    assert line.startswith("rollout.n is 1") and advantage in line
    config.algorithm.advantage = "reinforce_pp"
    assert found(config) == []


def test_k1_in_the_loss_is_refused_and_k1_in_the_reward_is_not() -> None:
    config = RunConfig()
    config.algorithm.kl_estimator = "k1"
    (line,) = found(config)
    assert line.startswith("algorithm.kl_estimator is 'k1'") and "k2" in line
    for key, value in (("kl_in", "reward"), ("kl_coefficient", 0.0), ("kl_estimator", "k2")):
        changed = RunConfig()
        changed.algorithm.kl_estimator = "k1"
        setattr(changed.algorithm, key, value)
        assert found(changed) == []
