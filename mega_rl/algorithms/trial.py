"""Losses and advantages tried on a few numbers, for a contract that a look at their parameters does not show (`own`).

Letters in names: as in `own`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from mega_rl.algorithms.advantage import advantage_of
from mega_rl.algorithms.objective import policy_loss
from mega_rl.algorithms.own import ADVANTAGE, OBJECTIVE, PolicyLoss
from mega_rl.algorithms.policy_loss import FIGURES
from mega_rl.config.schema.sections import AlgorithmConfig
from mega_rl.errors import InputError
from mega_rl.own_code import is_own

LENGTHS = (4, 3, 6, 2)  # of the trial's sequences; the last one is a padding tail
LEARNT = (0, 1, 1, 1) + (0, 1, 1) + (0, 0, 1, 1, 0, 1) + (0, 0)  # its mask
RTOL, ATOL = 1e-4, 1e-5  # between two ways of adding up float32
Given = dict[str, Any]


def check_own(algorithm: AlgorithmConfig, device: torch.device | str = "cpu") -> None:
    """Tries the user's own loss and advantage, if there are any.

    Raises:
        InputError: one cannot be imported, or does not keep the contract.
    """
    if is_own(algorithm.objective):
        loss = policy_loss(algorithm.objective)
        if algorithm.dual_clip is not None and "dual_clip" not in loss.takes:
            raise InputError(
                f"algorithm.dual_clip is {algorithm.dual_clip}, but {OBJECTIVE} {loss.name} takes no dual_clip: set it "
                "to null, or name that parameter"
            )
        settings = {"clip_low": algorithm.clip_ratio_low, "clip_high": algorithm.clip_ratio_high}
        check_loss(loss, settings | {"dual_clip": algorithm.dual_clip}, device)
    if is_own(algorithm.advantage):
        check_advantage(algorithm.advantage, advantage_of(algorithm.advantage).function)


def check_loss(loss: PolicyLoss, settings: Mapping[str, float | None], device: torch.device | str = "cpu") -> None:
    """Whether a loss keeps the contract.

    Args:
        settings: ``clip_low``, ``clip_high`` and ``dual_clip``.
    """
    batch = _batch(device) | dict(settings)
    learnt_T = batch["mask_T"] != 0
    loss_T, gradient_T = _of(loss, batch)
    if not _agree((loss_T, gradient_T), _of(loss, batch), learnt_T):
        loss.refuse("gives another loss for the same tensors; make it a function of its parameters alone")
    if gradient_T[~learnt_T].any():
        loss.refuse("learns from tokens whose mask_T is 0; leave them out of sums over a sequence")
    elsewhere = {name: torch.where(learnt_T, batch[name], -7.5) for name in batch if name.endswith("logprobs_T")}
    elsewhere["advantages_T"] = torch.where(learnt_T, batch["advantages_T"], 9.0)
    if not _agree((loss_T, gradient_T), _of(loss, batch | elsewhere), learnt_T):
        loss.refuse("depends on tokens whose mask_T is 0; leave them out of sums over a sequence")
    parts = [_of(loss, part) for part in _split(batch)]
    alone = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    if not _agree((loss_T, gradient_T), alone, learnt_T):
        loss.refuse(
            "gives a token another loss if its sequence is packed alone; use no means or sums over the whole tensor, "
            "which is only a part of the batch"
        )
    _check_on_policy(loss, batch, learnt_T)


def check_advantage(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Whether an advantage keeps the contract."""
    rewards = torch.tensor([1.0, 0.0, 0.25, float("nan"), 5.0, 3.0, 0.5, 0.5], dtype=torch.float64)
    groups = torch.tensor([9, 9, 2, 9, 2, 9, 4, 4])
    known = ~rewards.isnan()
    found = _advantages(name, function, rewards, groups)
    if not found.isfinite().all() or found[~known].any():
        _refuse_advantage(
            name, f"returns {found.tolist()} for the rewards {rewards.tolist()}; return 0 where a reward is NaN, which "
            "is one that is not known, and finite numbers everywhere"
        )  # fmt: skip
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    if not torch.allclose(_advantages(name, function, rewards[order], groups[order]), found[order]):
        _refuse_advantage(name, "depends on the order of the samples; find those of one prompt by groups_N")
    if not torch.allclose(_advantages(name, function, rewards[known], groups[known]), found[known]):
        _refuse_advantage(name, "depends on rewards that are NaN, which are not known; leave them out")


def _batch(device: torch.device | str) -> Given:
    """Four packed sequences by fixed numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = len(LEARNT)
    logprobs_T = -torch.rand(num_tokens, generator=generator) - 0.1
    old_T, rollout_T = (logprobs_T + 0.3 * torch.randn(num_tokens, generator=generator) for _ in range(2))
    batch = {
        "logprobs_T": logprobs_T,
        "old_logprobs_T": old_T,
        "rollout_logprobs_T": rollout_T,
        "advantages_T": torch.randn(num_tokens, generator=generator),
        "entropy_T": torch.rand(num_tokens, generator=generator) + 0.1,
        "mask_T": torch.tensor(LEARNT, dtype=torch.float32),
        "cu_seqlens": torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _split(batch: Given) -> list[Given]:
    """Every sequence as a micro-batch of its own."""
    columns = {name: value.split(LENGTHS) for name, value in batch.items() if name.endswith("_T")}
    ends = [batch["cu_seqlens"].new_tensor([0, length]) for length in LENGTHS]
    return [
        batch | {name: column[i] for name, column in columns.items()} | {"cu_seqlens": ends[i]}
        for i in range(len(LENGTHS))
    ]


def _of(loss: PolicyLoss, batch: Given) -> tuple[Tensor, Tensor]:
    """The loss [T], detached, and the gradient [T] of its sum over the learnt tokens by the log-probabilities."""
    learnt_T = batch["mask_T"] != 0
    leaves = {name: batch[name].clone().requires_grad_() for name in ("logprobs_T", "entropy_T")}
    given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
    try:
        loss_T, figures = loss(given | leaves)
    except InputError:
        raise
    except Exception as error:  # the user's code
        raise InputError(
            f"{OBJECTIVE}: {loss.name} fails on a small batch ({type(error).__name__}: {error}); fix the function"
        ) from error
    if any(
        isinstance(value, Tensor) and not torch.equal(value, batch[name]) for name, value in (given | leaves).items()
    ):
        loss.refuse("changes the tensors that it is given; make new ones")
    if not loss_T.requires_grad:
        loss.refuse("returns a loss without a gradient; compute it from logprobs_T, not detached")
    for what, values_T in {"a loss": loss_T, **{f"the figure {name}": figures[name] for name in figures}}.items():
        if not values_T[learnt_T].isfinite().all():
            loss.refuse(f"returns {what} that is not finite for log-probabilities between -2 and 0; fix its formula")
    (gradient_T,) = torch.autograd.grad(
        loss_T[learnt_T].sum(), leaves["logprobs_T"], allow_unused=True, materialize_grads=True
    )
    if not gradient_T.isfinite().all():
        loss.refuse("has a gradient that is not finite; a NaN that torch.where leaves out still has one")
    return loss_T.detach(), gradient_T


def _agree(some: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], learnt_T: Tensor) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.allclose(one[learnt_T], other[learnt_T], RTOL, ATOL) for one, other in pairs)


def _check_on_policy(loss: PolicyLoss, batch: Given, learnt_T: Tensor) -> None:
    """With pi_old the policy itself there is something to learn, and a ratio is 1: a gate of every run looks at it."""
    same = batch | {"old_logprobs_T": batch["logprobs_T"]}
    if not _of(loss, same)[1].any():
        loss.refuse("has no gradient where the policy is still pi_old, so that nothing is learnt; use logprobs_T")
    ratio_T = loss(same)[1][FIGURES[0]]
    if not torch.allclose(ratio_T[learnt_T], torch.ones_like(ratio_T[learnt_T])):
        loss.refuse("returns a figure ratio that is not 1 where the policy is still pi_old; give it another name")


def _advantages(name: str, function: Callable[[Tensor, Tensor], Tensor], rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    given = rewards_N.clone(), groups_N.clone()
    try:
        found = function(*given)
    except InputError:
        raise
    except Exception as error:  # the user's code
        _refuse_advantage(name, f"fails on a few rewards ({type(error).__name__}: {error}); fix the function")
    if not torch.equal(given[0].nan_to_num(-1.0), rewards_N.nan_to_num(-1.0)) or not torch.equal(given[1], groups_N):
        _refuse_advantage(name, "changes the tensors that it is given; make new ones")
    return found


def _refuse_advantage(name: str, what: str) -> NoReturn:
    raise InputError(f"{ADVANTAGE}: {name} {what}")
