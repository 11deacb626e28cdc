"""Preference losses against what TRL's own code returned (``trl_preference.json``), for any packing, in float64."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mega_rl.algorithms.pairs import AnswersApart
from mega_rl.algorithms.preference import (
    PAIR_LOSSES,
    KtoObjective,
    PreferenceObjective,
    answer_sums,
    bradley_terry_shares,
    kto_kl,
)
from mega_rl.microbatch import Figures, Microbatch, TokenStats

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "trl_preference.json").read_text())
D = torch.float64
LENGTHS: list[int] = RECORDED["lengths"]  # of the answers, chosen and rejected in turn
PROMPT: int = RECORDED["prompt_positions"]
POLICY, REFERENCE = (list(torch.tensor(RECORDED[name], dtype=D).split(LENGTHS)) for name in ("policy", "reference"))
REFERENCE_B = torch.stack([values.sum() for values in REFERENCE])
NUM_PAIRS, CHOSEN_TOKENS = len(LENGTHS) // 2, sum(LENGTHS[::2])
SETTINGS = ("loss", "beta", "label_smoothing", "simpo_gamma", "sft_coefficient")
# Sequences of each micro-batch: all in one, each pair by itself in another order, and shares of several sizes.
PACKINGS = {
    "one": [[*range(12)]],
    "pairs": [[8, 9], [2, 3], [0, 1], [10, 11], [6, 7], [4, 5]],
    "uneven": [[4, 5, 0, 1, 10, 11], [], [2, 3], [8, 9, 6, 7]],
}
SINGLES = {
    "one": PACKINGS["one"],
    "singles": [[i] for i in range(12)],
    "uneven": [[11, 3, 0], [], [1, 2, 4, 5, 6, 7], [8, 9, 10]],
}


def packed(values: list[torch.Tensor], indices: list[int]) -> tuple[TokenStats, Microbatch]:
    """A micro-batch with prompt positions and a tail, whose log-probabilities must not matter."""
    parts, masks, borders = [], [], [0]
    for index in indices:
        parts += [torch.full((PROMPT,), -9.0, dtype=D), values[index]]
        masks += [torch.zeros(PROMPT), torch.ones(LENGTHS[index])]
        borders.append(borders[-1] + PROMPT + LENGTHS[index])
    logprobs_T = torch.cat([*parts, torch.full((5,), -7.0, dtype=D, requires_grad=True)])
    tokens_T = torch.zeros(logprobs_T.numel(), dtype=torch.int64)
    mask_T = torch.cat([*masks, torch.zeros(5)]).to(D)
    cu_seqlens = torch.tensor([*borders, borders[-1] + 5], dtype=torch.int32)
    microbatch = Microbatch(tokens_T, tokens_T, tokens_T, mask_T, cu_seqlens, 9, tuple(indices))
    return TokenStats(logprobs_T, torch.zeros_like(logprobs_T)), microbatch


def learnt(objective: Any, packing: list[list[int]]) -> tuple[float, list[torch.Tensor], dict[str, float]]:
    """Loss, its gradient by answer, and the figures, over all micro-batches."""
    values = [answer.clone().requires_grad_() for answer in POLICY]
    total, sums = 0.0, dict[str, float]()
    for indices in packing:
        loss, figures = objective(*packed(values, indices))
        assert isinstance(figures, Figures)
        loss.backward()
        total += float(loss.detach())
        for name, value in figures.sums.items():
            assert not value.requires_grad
            sums[name] = sums.get(name, 0.0) + float(value)
    return total, [torch.zeros_like(v) if v.grad is None else v.grad for v in values], sums


def settings_of(case: dict[str, Any]) -> PreferenceObjective:
    return PreferenceObjective(**{name: case[name] for name in SETTINGS if name in case})


def pairs(settings: PreferenceObjective) -> Any:
    reference = REFERENCE_B if settings.needs_reference else None
    return partial(settings, reference_B=reference, num_pairs=NUM_PAIRS, num_chosen_tokens=CHOSEN_TOKENS)


def name_of(case: dict[str, Any]) -> str:
    return f"{case['loss']}-{case.get('label_smoothing', 0.0)}-{case.get('sft_coefficient', 0.0)}"


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("case", RECORDED["cases"], ids=name_of)
def test_a_loss_on_pairs_is_trls(case: dict[str, Any], packing: str) -> None:
    total, gradients, sums = learnt(pairs(settings_of(case)), PACKINGS[packing])
    tolerance = 1e-9 if case["loss"] == "orpo" else 1e-12  # TRL computes the odds in float32
    assert total == pytest.approx(case["value"], abs=tolerance, rel=0)
    assert float((torch.cat(gradients) - torch.tensor(case["gradient"], dtype=D)).abs().max()) <= tolerance
    if "metrics" in case and case["loss"] != "ipo":  # TRL's rewards of ipo are sums, ours what its formula sees
        names = {"chosen_reward": "rewards/chosen", "rejected_reward": "rewards/rejected", "margin": "rewards/margins"}
        names |= {
            "accuracy": "rewards/accuracies",
            "chosen_logprob": "logps/chosen",
            "rejected_logprob": "logps/rejected",
        }
        for own, theirs in names.items():
            assert sums[own] / NUM_PAIRS == pytest.approx(case["metrics"][theirs], abs=1e-7)


@pytest.mark.parametrize("packing", SINGLES)
@pytest.mark.parametrize("case", RECORDED["cases"], ids=name_of)
def test_answers_that_lie_apart_are_learnt_from_as_pairs_are(case: dict[str, Any], packing: str) -> None:
    """Every gradient of every answer, the loss and the figures, wherever the answers lie."""
    settings = settings_of(case)
    total, gradients, sums = learnt(pairs(settings), PACKINGS["one"])
    shares_of = partial(
        settings.of_pairs,
        num_tokens_P2=torch.tensor(LENGTHS).view(-1, 2),
        reference_P2=REFERENCE_B.view(-1, 2),
        num_pairs=NUM_PAIRS,
        num_chosen_tokens=CHOSEN_TOKENS,
    )
    scores_B = torch.stack([answer.sum() for answer in POLICY])
    apart = AnswersApart(shares_of, scores_B, lambda stats, microbatch: answer_sums(stats.logprobs, microbatch))
    _, own_gradients, own_sums = learnt(apart, SINGLES[packing])
    assert float((torch.cat(own_gradients) - torch.cat(gradients)).abs().max()) <= 1e-12
    assert own_sums == pytest.approx({**sums, "loss": total}, abs=1e-12, rel=1e-12)


def test_every_loss_is_recorded() -> None:
    assert {case["loss"] for case in RECORDED["cases"]} == set(PAIR_LOSSES)


def test_smoothing_of_the_sigmoid_mixes_both_verdicts() -> None:
    """Conservative DPO, which TRL no longer has: the expected loss if a share of the verdicts is wrong."""
    smooth = learnt(pairs(PreferenceObjective(beta=0.3, label_smoothing=0.1)), PACKINGS["one"])[0]
    ratios = torch.stack([a.sum() for a in POLICY]) - REFERENCE_B
    logits = 0.3 * (ratios[::2] - ratios[1::2])
    wanted = 0.9 * F.softplus(-logits) + 0.1 * F.softplus(logits)
    assert smooth == pytest.approx(float(wanted.mean()), abs=1e-12)


@pytest.mark.parametrize("packing", SINGLES)
@pytest.mark.parametrize("case", RECORDED["kto"], ids=["kl 0.7", "kl 0"])
def test_kto_is_trls(case: dict[str, Any], packing: str) -> None:
    settings = KtoObjective(**{name: case[name] for name in ("beta", "desirable_weight", "undesirable_weight")})
    kl = kto_kl(*(torch.tensor(case[name], dtype=D) for name in ("kl_policy", "kl_reference")))
    is_good = torch.tensor([True, False] * NUM_PAIRS)
    objective = partial(settings, reference_B=REFERENCE_B, is_good_B=is_good, kl=kl, num_answers=len(LENGTHS))
    total, gradients, sums = learnt(objective, SINGLES[packing])
    assert total == pytest.approx(case["value"], abs=1e-12, rel=0)
    assert float((torch.cat(gradients) - torch.tensor(case["gradient"], dtype=D)).abs().max()) <= 1e-12
    ratios = torch.stack([a.sum() for a in POLICY]) - REFERENCE_B
    assert sums["chosen_reward"] == pytest.approx(0.3 * float(ratios[::2].sum()))
    assert sums["rejected_reward"] == pytest.approx(0.3 * float(ratios[1::2].sum()))


def test_bradley_terry_is_trls() -> None:
    case = RECORDED["bradley_terry"]
    scores = torch.tensor(case["scores"], dtype=D).requires_grad_()
    margins, parts = torch.tensor(case["margins"], dtype=D), ([0, 4, 2], [1, 5, 3])
    chosen, rejected = scores.view(-1, 2).unbind(1)
    shares = [
        bradley_terry_shares(chosen[p], rejected[p], margins[p], case["centre"], NUM_PAIRS).sum()
        for p in map(list, parts)
    ]
    total = torch.stack(shares).sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(case["value"], abs=1e-12, rel=0)
    assert float((scores.grad - torch.tensor(case["gradient"], dtype=D)).abs().max()) <= 1e-12
    without = bradley_terry_shares(chosen, rejected, None, 0.0, NUM_PAIRS).sum()
    assert float(without.detach()) == pytest.approx(float(F.softplus(rejected - chosen).mean().detach()))


def test_sums_of_answers_leave_out_prompt_and_tail() -> None:
    stats, microbatch = packed(POLICY, [3, 2])
    assert torch.allclose(answer_sums(stats.logprobs, microbatch), torch.stack([POLICY[3].sum(), POLICY[2].sum()]))
    empty, nothing = packed(POLICY, [])
    assert answer_sums(empty.logprobs, nothing).numel() == 0
