"""What every loss and every advantage must hold. To check your own, add a line to LOSSES or to ADVANTAGES_TRIED."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest
import torch

from mega_rl.algorithms.advantage import ADVANTAGES, advantage_of
from mega_rl.algorithms.objective import OBJECTIVES, policy_loss
from mega_rl.algorithms.own import OF_LOSS
from mega_rl.algorithms.trial import check_advantage, check_loss, check_own
from mega_rl.config.schema.sections import AlgorithmConfig
from mega_rl.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_an_objective"
LOSSES = [*OBJECTIVES, f"{EXAMPLE}/soft_gate.py:soft_gate"]
ADVANTAGES_TRIED = [*ADVANTAGES, f"{EXAMPLE}/median_baseline.py:median_baseline"]
BOUNDS: dict[str, float | None] = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}

# What a loss of one's own does -> how it is refused.
BAD_LOSSES = {
    "def f(logprobs, advantages_T): ...": r"takes logprobs \(did you mean logprobs_T\?\), which it is not given",
    "def f(logprobs_T, /): ...": "takes logprobs_T by position, but is given it by name",
    "def f(advantages_T): ...": "takes advantages_T; it needs the parameter logprobs_T",
    "def f(logprobs_T): 1 / 0": "fails on a small batch .ZeroDivisionError",
    "def f(logprobs_T): return logprobs_T.sum()":
        r"returns a tensor \[\]; return the loss of each token, a tensor \[15\]",
    "def f(logprobs_T): return None": "returns a NoneType; return the loss of each token",
    "def f(logprobs_T): return logprobs_T, 3": "returns a tuple; return the loss of each token",
    "def f(logprobs_T): return logprobs_T, {'x': logprobs_T.sum()}": "returns the figure x as a tensor",
    "def f(logprobs_T): return logprobs_T, {'x': logprobs_T.log()}": "returns the figure own/x that is not finite",
    "def f(logprobs_T): return logprobs_T.log()": "returns a loss that is not finite",
    "def f(logprobs_T): return logprobs_T.detach()": "returns a loss without a gradient",
    "def f(logprobs_T, entropy_T): return entropy_T": "has no gradient where the policy is still pi_old",
    "def f(logprobs_T): return (logprobs_T * 0).sqrt()": "has a gradient that is not finite",
    "def f(logprobs_T, advantages_T): return logprobs_T * advantages_T.mul_(2)": "changes the tensors",
    "def f(logprobs_T): return logprobs_T * torch.rand(logprobs_T.shape)": "gives another loss for the same tensors",
    "def f(logprobs_T): return logprobs_T - logprobs_T.mean()": "learns from tokens whose mask_T is 0",
    "def f(logprobs_T, advantages_T): return -logprobs_T * (advantages_T - advantages_T.mean())":
        "depends on tokens whose mask_T is 0",
    "def f(logprobs_T, mask_T): return -logprobs_T / mask_T.sum().clamp_min(1)":
        "another loss if its sequence is packed",
    "def f(logprobs_T): return -logprobs_T, {'ratio': logprobs_T}": "returns a figure ratio that is not 1",
}  # fmt: skip
# The same of advantages.
BAD_ADVANTAGES = {
    "def f(rewards): ...": r"takes rewards \(did you mean rewards_N\?\)",
    "def f(groups_N): ...": "needs the parameter rewards_N",
    "def f(rewards_N): 1 / 0": "fails on a few rewards .ZeroDivisionError",
    "def f(rewards_N): return rewards_N.mean()": r"returns a tensor \[\]; return one number for each sample",
    "def f(rewards_N): return rewards_N": "return 0 where a reward is NaN",
    "def f(rewards_N): return rewards_N.nan_to_num() - rewards_N.nanmean()": "return 0 where a reward is NaN",
    "def f(rewards_N): return rewards_N.nan_to_num_()": "changes the tensors",
    "def f(rewards_N): return rewards_N.nan_to_num().cumsum(0) * (rewards_N == rewards_N)":
        "on the order of the samples",
    "def f(rewards_N): return rewards_N.nan_to_num() / len(rewards_N)": "depends on rewards that are NaN",
}  # fmt: skip


def written(path: Path, source: str) -> str:
    path.write_text(f"import torch\n{source}\n")
    return f"{path}:f"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_keeps_the_contract(name: str) -> None:
    check_loss(policy_loss(name), BOUNDS)


@pytest.mark.parametrize("name", ADVANTAGES_TRIED)
def test_an_advantage_keeps_the_contract(name: str) -> None:
    check_advantage(name, advantage_of(name).function)


@pytest.mark.parametrize("source", BAD_LOSSES)
def test_a_loss_that_does_not_is_refused_in_a_sentence(source: str, tmp_path: Path) -> None:
    name = written(tmp_path / "bad.py", source)
    with pytest.raises(InputError, match=BAD_LOSSES[source]) as caught:
        check_own(AlgorithmConfig(objective=name))
    assert str(caught.value).startswith(f"algorithm.objective: {name} ")


@pytest.mark.parametrize("source", BAD_ADVANTAGES)
def test_an_advantage_that_does_not_is_refused_in_a_sentence(source: str, tmp_path: Path) -> None:
    name = written(tmp_path / "bad.py", source)
    with pytest.raises(InputError, match=BAD_ADVANTAGES[source]) as caught:
        check_own(AlgorithmConfig(advantage=name))
    assert str(caught.value).startswith(f"algorithm.advantage: {name} ")


def test_a_dual_clip_that_a_loss_does_not_take_is_refused(tmp_path: Path) -> None:
    name = written(tmp_path / "plain.py", "def f(logprobs_T, advantages_T): return -logprobs_T * advantages_T")
    check_own(AlgorithmConfig(objective=name))
    with pytest.raises(InputError, match="takes no dual_clip: set it to null, or name that parameter"):
        check_own(AlgorithmConfig(objective=name, dual_clip=3.0))
    check_own(AlgorithmConfig(objective="mega_rl.algorithms.policy_loss:ppo_clip_loss", dual_clip=3.0))


def test_a_run_of_built_in_ones_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_rl.algorithms.trial.check_loss", None)
    monkeypatch.setattr("mega_rl.algorithms.trial.check_advantage", None)
    check_own(AlgorithmConfig())


def test_the_soft_gate_by_its_formula() -> None:
    old, new, advantages = [-1.0, -0.5, -2.0], [-0.75, -0.5, -2.5], [1.0, 2.0, -0.5]
    given: dict[str, Any] = dict.fromkeys(OF_LOSS) | {
        "logprobs_T": torch.tensor(new, dtype=torch.float64),
        "old_logprobs_T": torch.tensor(old, dtype=torch.float64),
        "advantages_T": torch.tensor(advantages, dtype=torch.float64),
        "mask_T": torch.ones(3),
    }
    loss_T, figures = policy_loss(f"{EXAMPLE}/soft_gate.py:soft_gate")(given)
    for position, advantage in enumerate(advantages):
        ratio, tau = math.exp(new[position] - old[position]), 1.0 if advantage > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert loss_T[position].item() == pytest.approx(-4 / tau * gate * advantage, rel=1e-6)
        assert figures["own/openness"][position].item() == pytest.approx(4 * gate * (1 - gate), rel=1e-6)
        assert figures["ratio"][position].item() == pytest.approx(ratio)
    assert not figures["clip_fraction"].any() and not figures["dual_clip_fraction"].any()


def test_the_median_baseline_by_hand() -> None:
    groups = {3: [1.0, 0.0, 5.0], 1: [0.25, math.nan], 7: [math.nan]}
    rewards = [(reward, group) for group, values in groups.items() for reward in values]
    known = {group: [value for value in values if value == value] for group, values in groups.items()}
    expected = [r - median_low(known[g]) if r == r else 0.0 for r, g in rewards]
    values, places = (torch.tensor(column) for column in zip(*rewards, strict=True))
    found = advantage_of(f"{EXAMPLE}/median_baseline.py:median_baseline").function(values.double(), places)
    assert found.tolist() == expected == [0.0, -1.0, 4.0, 0.0, 0.0, 0.0]
