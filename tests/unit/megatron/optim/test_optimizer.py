"""Learning-rate tables of every schedule, and what a resumed run takes from its checkpoint."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config.schema.sections import OptimizerConfig
from mega_rl.errors import InputError
from mega_rl.megatron.optim.optimizer import SkippedSteps, learning_rate_schedule, own_hyperparameters


def config(schedule: str, **settings: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1.0, "min_lr": 0.2, "schedule": schedule, **settings})


def one_group() -> Any:
    return SimpleNamespace(param_groups=[{"wd_mult": 1.0}])


def table(made: OptimizerConfig, total_steps: int) -> list[float]:
    """The learning rates of steps 1, 2, ..."""
    optimizer = one_group()
    schedule = learning_rate_schedule(optimizer, made, total_steps)
    rates = []
    for _ in range(total_steps):
        schedule.step(1)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_wsd_rises_stays_and_falls() -> None:
    rates = table(config("wsd", warmup_steps=2, decay_steps=4), 10)
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_the_other_schedules() -> None:
    assert table(config("constant", warmup_steps=2), 4) == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert table(config("linear", warmup_steps=1), 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(1, 5)]
    assert table(config("cosine"), 4) == pytest.approx(cosine)


def test_a_share_of_the_run_is_rounded_up() -> None:
    assert table(config("constant", warmup_steps=0.3), 6) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert table(config("constant", warmup_steps=0.0), 3) == pytest.approx([1.0] * 3)


def test_warm_up_and_decay_must_fit() -> None:
    table(config("wsd", warmup_steps=2, decay_steps=8), 10)
    with pytest.raises(InputError, match=r"optimizer.warmup_steps 3 and optimizer.decay_steps 8 .* 10 optimizer steps"):
        table(config("wsd", warmup_steps=3, decay_steps=8), 10)


def test_a_resumed_run_takes_the_step_from_the_checkpoint_and_the_rest_from_its_own_configuration() -> None:
    saved = learning_rate_schedule(one_group(), config("linear", lr=9.0), 4)
    saved.step(3)
    optimizer = one_group()
    resumed = learning_rate_schedule(optimizer, config("linear", warmup_steps=0), 8)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.num_steps == 3
    resumed.step(1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.6)


def test_hyperparameters_survive_the_loading_of_parameter_groups() -> None:
    optimizer = SimpleNamespace(param_groups=[{"params": [1], "betas": (0.9, 0.95), "max_lr": 1.0}])
    with own_hyperparameters(optimizer):  # type: ignore[arg-type]
        optimizer.param_groups = [{"params": [2], "betas": (0.5, 0.5), "max_lr": 7.0, "step": 4}]
    assert optimizer.param_groups == [{"params": [2], "betas": (0.9, 0.95), "max_lr": 1.0, "step": 4}]


def test_counts_round_trip() -> None:
    skipped, other = SkippedSteps(total=5, in_a_row=2), SkippedSteps()
    other.load_state_dict(skipped.state_dict())
    assert other == skipped
