"""Objectives: an independent float64 reference, and the same loss and gradient for any split of the batch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from mega_rl.algorithms.advantage import power_sums, whiten, with_penalty_to_go
from mega_rl.algorithms.correction import CORRECTIONS, LOG_WEIGHTS
from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.objective import OBJECTIVES, PolicyObjective, SftObjective
from mega_rl.algorithms.reduce import REDUCTIONS, Denominators, sequence_mean
from mega_rl.microbatch import Microbatch, TokenStats

MAX_RESPONSE = 16
PLAIN = PolicyObjective(
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    kl_coefficient=0.0,
    kl_estimator="k3",
    entropy_coefficient=0.0,
    importance_cap=None,
    reduction="token_mean",
)
FULL = replace(PLAIN, dual_clip=3.0, kl_coefficient=0.05, entropy_coefficient=0.02, importance_cap=1.5)
CORRECTED: dict[str, dict[str, Any]] = {
    "uncorrected": {"importance_cap": None},
    **{
        f"{correction}_{level}": {
            "importance_correction": correction,
            "importance_level": level,
            "importance_floor": 0.6 if correction == "mask" else 0.0,
        }
        for correction, level in itertools.product(CORRECTIONS, LOG_WEIGHTS)
    },
}
EVERY = list(itertools.product(OBJECTIVES, CORRECTED, REDUCTIONS))
OWN = f"{Path(__file__).parents[3]}/examples/add_an_objective/soft_gate.py:soft_gate"


def combined(objective: str, correction: str, reduction: str, **changes: Any) -> PolicyObjective:
    """All terms at once; the dual clip where there is one."""
    dual_clip = 3.0 if objective == "ppo" else None
    changes = {"objective": objective, "dual_clip": dual_clip, "reduction": reduction, **changes}
    return replace(FULL, **(CORRECTED[correction] | changes))


@dataclass
class Batch:
    """Sequences of one optimizer step as [L] float64 arrays; ``logprobs`` and ``entropy`` are leaves with gradient."""

    fields: list[dict[str, Tensor]]
    leaves: list[dict[str, Tensor]]

    @property
    def denominators(self) -> Denominators:
        num_tokens = int(sum(f["loss_mask"].sum() for f in self.fields))
        return Denominators(num_tokens, len(self.fields), MAX_RESPONSE)

    def microbatch(self, members: list[int], tail: int) -> tuple[TokenStats, Microbatch]:
        def join(rows: list[dict[str, Tensor]], name: str) -> Tensor:
            return torch.cat([*(rows[i][name] for i in members), torch.full((tail,), -3.0 * (name != "loss_mask"))])

        lengths = [len(self.fields[i]["loss_mask"]) for i in members] + ([tail] if tail else [])
        names = ("loss_mask", "advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs")
        zeros = torch.zeros(sum(lengths), dtype=torch.int64)
        packed: dict[str, Any] = {name: join(self.fields, name) for name in names}
        microbatch = Microbatch(
            token_ids=zeros,
            target_ids=zeros,
            position_ids=zeros,
            cu_seqlens=torch.tensor([0, *numpy.cumsum(lengths)], dtype=torch.int32),
            max_seqlen=max(lengths),
            sequence_indices=tuple(members),
            **packed,
        )
        return TokenStats(join(self.leaves, "logprobs"), join(self.leaves, "entropy")), microbatch


def make_batch(lengths: list[int], seed: int) -> Batch:
    """Random sequences; each has a prompt part outside the mask, and every third no learnt token at all."""
    rng = numpy.random.default_rng(seed)
    fields, leaves = [], []
    for i, length in enumerate(lengths):
        mask = numpy.arange(length) >= rng.integers(0, length)
        logprobs = -rng.exponential(1.0, length)
        near = {n: logprobs + rng.normal(0, 0.4, length) for n in ("old_logprobs", "reference_logprobs")}
        field = {"loss_mask": mask * (i % 3 != 2), "advantages": rng.normal(size=length), **near}
        field["rollout_logprobs"] = near["old_logprobs"] + rng.normal(0, 0.5, length)
        fields.append({name: torch.tensor(value, dtype=torch.float64) for name, value in field.items()})
        leaf = {"logprobs": logprobs, "entropy": rng.exponential(1.0, length)}
        leaves.append({name: torch.tensor(value, requires_grad=True) for name, value in leaf.items()})
    return Batch(fields, leaves)


def run(
    batch: Batch, objective: Any, split: list[list[int]], tails: list[int]
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradients of all leaves in sequence order, and metrics, summed over the micro-batches of ``split``."""
    losses: list[Tensor] = []
    metrics: dict[str, float] = {}
    for members, tail in zip(split, tails, strict=True):
        loss, figures = objective(*batch.microbatch(members, tail), batch.denominators)
        losses.append(loss)
        assert all(not x.requires_grad and x.ndim == 0 for x in (*figures.sums.values(), *figures.maxima.values()))
        for name, value in figures.sums.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
        for name, value in figures.maxima.items():
            metrics[f"{name}_max"] = max(metrics.get(f"{name}_max", 0.0), value.item())
    leaves = [leaf for leaf_of in batch.leaves for leaf in leaf_of.values()]
    total = torch.stack(losses).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return total.item(), torch.cat(gradients), metrics


def reference_loss(batch: Batch, objective: PolicyObjective) -> float:
    """The same objective in plain Python, token by token, written from the formulas."""
    per_sequence = []
    for field, leaf in zip(batch.fields, batch.leaves, strict=True):
        learnt = numpy.flatnonzero(field["loss_mask"].numpy())
        values = {name: value.detach().numpy()[learnt] for name, value in (field | leaf).items()}
        log_ratios = values["logprobs"] - values["old_logprobs"]
        log_weights = values["old_logprobs"] - values["rollout_logprobs"]
        tokens = []
        for t in range(len(learnt)):
            log_weight = log_weights[t] if objective.importance_level == "token" else log_weights.sum()
            weight = reference_weight(math.exp(log_weight), objective)
            log_ratio = log_ratios.mean() if objective.objective == "gspo" else log_ratios[t]
            pg_loss = reference_pg_loss(math.exp(log_ratio), values["advantages"][t], values["logprobs"][t], objective)
            k1 = values["logprobs"][t] - values["reference_logprobs"][t]
            kl = {"k1": k1, "k2": k1**2 / 2, "k3": math.exp(-k1) + k1 - 1}[objective.kl_estimator]
            bonus = objective.entropy_coefficient * values["entropy"][t]
            tokens.append(weight * pg_loss + objective.kl_coefficient * kl - bonus)
        per_sequence.append(tokens)
    everything = [loss for tokens in per_sequence for loss in tokens]
    if objective.reduction == "token_mean":
        return sum(everything) / len(everything)
    if objective.reduction == "sequence_mean":
        return sum(sum(tokens) / len(tokens) for tokens in per_sequence if tokens) / len(per_sequence)
    return sum(everything) / (len(per_sequence) * MAX_RESPONSE)


def reference_weight(weight: float, objective: PolicyObjective) -> float:
    if objective.importance_cap is None:
        return 1.0
    if objective.importance_correction == "truncate":
        return min(weight, objective.importance_cap)
    return weight if objective.importance_floor <= weight <= objective.importance_cap else 0.0


def reference_pg_loss(ratio: float, advantage: float, logprob: float, objective: PolicyObjective) -> float:
    bounded = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
    if objective.objective == "cispo":
        return -bounded * advantage * logprob
    gain = min(ratio * advantage, bounded * advantage)
    if objective.dual_clip is not None and advantage < 0:
        gain = max(gain, objective.dual_clip * advantage)
    return -gain


@pytest.mark.parametrize(("objective", "correction", "reduction"), EVERY)
def test_equals_the_float64_reference(objective: str, correction: str, reduction: str) -> None:
    batch = make_batch([5, 3, 7, 16, 1, 9], seed=3)
    for estimator in KL_ESTIMATORS:
        chosen = combined(objective, correction, reduction, kl_estimator=estimator)
        loss, _, _ = run(batch, chosen, [[0, 1, 2, 3, 4, 5]], [2])
        assert loss == pytest.approx(reference_loss(batch, chosen), rel=1e-12)
    plain = replace(PLAIN, objective=objective, reduction=reduction)
    loss, _, _ = run(batch, plain, [[0, 1, 2, 3, 4, 5]], [2])
    assert loss == pytest.approx(reference_loss(batch, plain), rel=1e-12)


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int], int]:
    """Lengths, micro-batches (of whichever ranks) in any order, padding tails, seed."""
    lengths = draw(st.lists(st.integers(1, MAX_RESPONSE), min_size=2, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths) - 1))))
    split = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(lengths)], strict=True)]
    tails = draw(st.lists(st.integers(0, 3), min_size=len(split), max_size=len(split)))
    return lengths, split, tails, draw(st.integers(0, 99))


def assert_same_for_any_split(objective: Any, case: tuple[list[int], list[list[int]], list[int], int]) -> None:
    lengths, split, tails, seed = case
    batch = make_batch(lengths, seed)
    loss, gradient, metrics = run(batch, objective, [list(range(len(lengths)))], [0])
    split_loss, split_gradient, split_metrics = run(batch, objective, split, tails)
    assert split_loss == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=1e-12)
    assert split_metrics == pytest.approx(metrics, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("correction", CORRECTED)
@pytest.mark.parametrize("objective", [*OBJECTIVES, pytest.param(OWN, id="own")])
@given(case=splits(), estimator=st.sampled_from(sorted(KL_ESTIMATORS)))
@settings(max_examples=6, deadline=None)
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(
    objective: str,
    correction: str,
    reduction: str,
    case: tuple[list[int], list[list[int]], list[int], int],
    estimator: str,
) -> None:
    assert_same_for_any_split(combined(objective, correction, reduction, kl_estimator=estimator), case)


@given(case=splits())
@settings(max_examples=10, deadline=None)
def test_the_supervised_loss_does_not_depend_on_the_split(
    case: tuple[list[int], list[list[int]], list[int], int],
) -> None:
    assert_same_for_any_split(SftObjective(), case)


@given(case=splits())
@settings(max_examples=25, deadline=None)
def test_advantages_per_token_do_not_depend_on_the_split(
    case: tuple[list[int], list[list[int]], list[int], int],
) -> None:
    """A KL in the reward, then whitening with moments that are added up over the parts."""
    lengths, split, tails, seed = case
    batch = make_batch(lengths, seed)

    def shaped(parts: list[list[int]], tails: list[int]) -> dict[int, Tensor]:
        microbatches = [batch.microbatch(p, t)[1] for p, t in zip(parts, tails, strict=True)]
        less_kl = []
        for m in microbatches:
            assert m.advantages is not None and m.old_logprobs is not None and m.reference_logprobs is not None
            kl_T = m.old_logprobs - m.reference_logprobs
            less_kl.append(with_penalty_to_go(m.advantages, kl_T, m.loss_mask, m.cu_seqlens, 0.1))
        pairs = list(zip(less_kl, microbatches, strict=True))
        count, total, _ = torch.stack([power_sums(a, m.loss_mask, 0.0) for a, m in pairs]).sum(0).tolist()
        mean = total / max(count, 1)
        squares = torch.stack([power_sums(a, m.loss_mask, mean) for a, m in pairs]).sum(0)[2].item()
        out = {}
        for advantages_T, m in pairs:
            whitened_T = whiten(advantages_T, m.loss_mask, mean, squares / max(count - 1, 1))
            out |= dict(zip(m.sequence_indices, whitened_T.split(m.cu_seqlens.diff().tolist()), strict=False))
        return out

    whole, in_parts = shaped([list(range(len(lengths)))], [0]), shaped(split, tails)
    for index, advantages in whole.items():
        torch.testing.assert_close(in_parts[index], advantages, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("objective", ["ppo", "cispo"])
def test_on_policy_step_has_ratio_one_and_the_policy_gradient(objective: str) -> None:
    batch = make_batch([6, 4], seed=1)
    stats, microbatch = batch.microbatch([0, 1], tail=2)
    num_tokens = batch.denominators.num_tokens
    on_policy = microbatch.replace(old_logprobs=None)
    loss, figures = replace(PLAIN, objective=objective)(stats, on_policy, batch.denominators)
    (gradient,) = torch.autograd.grad(loss, stats.logprobs)
    mask = microbatch.loss_mask
    assert microbatch.advantages is not None
    torch.testing.assert_close(gradient, -microbatch.advantages * mask / num_tokens, rtol=1e-12, atol=0)
    assert figures.sums["ratio"].item() == num_tokens and figures.maxima["ratio"].item() == 1.0
    assert figures.sums["ppo_kl"].item() == 0.0 and figures.sums["clip_fraction"].item() == 0.0


def test_metrics_by_hand() -> None:
    half = math.log(0.5)
    vector = torch.tensor
    microbatch = Microbatch(
        token_ids=torch.zeros(3, dtype=torch.int64),
        target_ids=torch.zeros(3, dtype=torch.int64),
        position_ids=torch.arange(3),
        loss_mask=vector([0.0, 1.0, 1.0]),
        cu_seqlens=vector([0, 3], dtype=torch.int32),
        max_seqlen=3,
        sequence_indices=(0,),
        advantages=vector([9.0, 1.0, -1.0]),
        old_logprobs=vector([9.0, 0.0, 2 * half]),
        rollout_logprobs=vector([9.0, half, half]),
        reference_logprobs=vector([9.0, half, half]),
        staleness=vector([0, 0, 2]),
    )
    stats = TokenStats(logprobs=vector([9.0, half, half], requires_grad=True), entropy=vector([9.0, 0.25, 0.5]))
    _, figures = replace(PLAIN, importance_cap=1.75, num_ages=3)(stats, microbatch, Denominators(2, 1, 4))
    maxima = {name: value.item() for name, value in figures.maxima.items()}
    assert maxima == pytest.approx({"ratio": 2.0, "rollout_logprob_abs_diff": 0.0}, abs=1e-6)
    assert {name: value.item() for name, value in figures.sums.items()} == pytest.approx(
        {
            "pg_loss": 1.75 * -0.5 + 0.5 * 2.0,  # ratios 0.5 (good) and 2 (bad), neither clipped; weights 1.75 and 0.5
            "entropy": 0.75,
            "ratio": 2.5,
            "ppo_kl": -half + half,
            "clip_fraction": 0.0,
            "dual_clip_fraction": 0.0,
            "kl": 0.0,
            "importance_weight": 2.25,
            "importance_bounded": 1.0,
            "rollout_kl": 0.0,
            "rollout_logprob_abs_diff": 0.0,
            "pooled/weight": 2.0 + 0.5,
            "pooled/weight_squared": 4.0 + 0.25,
            **{f"pooled/tokens/{age}": number for age, number in enumerate((1.0, 0.0, 1.0))},
            **{f"pooled/rollout_kl/{age}": 0.0 for age in range(3)},
        },
        abs=1e-6,
    )


def test_sequence_mean_ignores_infinities_outside_the_mask_and_counts_per_sequence() -> None:
    losses = torch.tensor([math.inf, 2.0, 4.0, 6.0, math.nan])
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])
    cu_seqlens = torch.tensor([0, 2, 4, 5], dtype=torch.int32)
    assert sequence_mean(losses, mask, cu_seqlens, Denominators(3, 2, 4)).item() == pytest.approx((2 + 5) / 2)


def test_sft_is_the_mean_negative_log_probability() -> None:
    batch = make_batch([6, 4], seed=5)
    loss, _, metrics = run(batch, SftObjective(), [[0, 1]], [1])
    rows = zip(batch.fields, batch.leaves, strict=True)
    learnt = torch.cat([-leaf["logprobs"][field["loss_mask"] == 1] for field, leaf in rows])
    assert loss == pytest.approx(learnt.mean().item(), rel=1e-12)
    assert metrics["nll"] == pytest.approx(learnt.sum().item(), rel=1e-12)


def test_figures_of_supervised_training_keep_no_graph() -> None:
    """The engine's statistics are rows of one tensor with gradient, the hits among them."""
    stats, microbatch = make_batch([6, 4], seed=5).microbatch([0, 1], 0)
    rows = torch.stack([stats.logprobs, stats.entropy, (stats.logprobs > -1.0).double()])
    _, figures = SftObjective()(TokenStats(*rows), microbatch, Denominators(10, 2, MAX_RESPONSE))
    assert set(figures.sums) == {"nll", "entropy", "hits"}
    assert not any(value.requires_grad for value in figures.sums.values())


def test_a_missing_field_is_found_at_once() -> None:
    stats, microbatch = make_batch([4], seed=0).microbatch([0], 0)
    counts = Denominators(4, 1, 4)
    with pytest.raises(AssertionError, match="reference"):
        replace(PLAIN, kl_coefficient=0.1)(stats, microbatch.replace(reference_logprobs=None), counts)
    with pytest.raises(AssertionError, match="engine"):
        replace(PLAIN, importance_cap=2.0)(stats, microbatch.replace(rollout_logprobs=None), counts)


def test_the_difference_from_the_engine_is_the_trainers_own_whatever_pi_old_is() -> None:
    batch = make_batch([6, 4], seed=2)
    stats, microbatch = batch.microbatch([0, 1], tail=0)
    assert microbatch.rollout_logprobs is not None
    _, figures = PLAIN(stats, microbatch.replace(old_logprobs=microbatch.rollout_logprobs), batch.denominators)
    difference = (microbatch.rollout_logprobs - stats.logprobs.detach())[microbatch.loss_mask != 0]
    assert figures.sums["rollout_kl"].item() == pytest.approx(difference.sum().item())
    assert figures.maxima["rollout_logprob_abs_diff"].item() == pytest.approx(difference.abs().max().item()) != 0.0
