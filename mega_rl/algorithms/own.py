"""The contract of losses (``algorithm.objective``) and advantages (``algorithm.advantage``), built in or a user's own.

A loss returns the loss of every token [T], unmasked, or that and a dictionary of figures [T], of which the mean over
the learnt tokens is logged. It takes what it names as parameters, ``logprobs_T`` at least:

    logprobs_T          [T] nats, with gradient: of the policy that learns
    old_logprobs_T      [T] nats: of pi_old, the policy as it was when the step began
    rollout_logprobs_T  [T] nats: of the engine that sampled
    advantages_T        [T]: as ``algorithm.advantage`` and the rest of the section made them
    entropy_T           [T] nats, with gradient: of the policy that learns, over the whole vocabulary
    mask_T              [T]: 1 on the tokens that are learnt from, else 0
    cu_seqlens          [B+1] int32: where the sequences begin and the last one ends; no sequence is cut
    clip_low            ``algorithm.clip_ratio_low``
    clip_high           ``algorithm.clip_ratio_high``
    dual_clip           ``algorithm.dual_clip``, None if it is off

T are the packed tokens of a micro-batch, prompts and padding included, and B its sequences. The loss of a token may
depend on the learnt tokens of its sequence, and on nothing else: neither on what was packed beside it nor on chance.
Importance weights, the terms of KL and entropy, mask and reduction come after it (`objective.PolicyObjective`).

An advantage takes ``rewards_N`` [N] float64, of all samples of the step in any order, NaN where one is not known, and
``groups_N`` [N] int64, equal for answers to one prompt. It returns one number for each [N]: 0 for a reward that is not
known, which has no part in the others'. With ``algorithm.credit=turn`` turns stand in the place of samples.

`trial` holds functions to all of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from mega_rl.algorithms.policy_loss import FIGURES, figures_of
from mega_rl.errors import InputError
from mega_rl.own_code import load, nearest

OBJECTIVE, ADVANTAGE = "algorithm.objective", "algorithm.advantage"
OF_LOSS = (
    *("logprobs_T", "old_logprobs_T", "rollout_logprobs_T", "advantages_T", "entropy_T", "mask_T", "cu_seqlens"),
    *("clip_low", "clip_high", "dual_clip"),
)
OF_ADVANTAGE = ("rewards_N", "groups_N")
OWN = "own/"  # begins the names of figures that only a user's loss has


class PolicyLoss:
    """A loss per token, called with what it names.

    Args:
        name: as in the configuration.
        function: None: what a user's code has under that name.

    Raises:
        InputError: it cannot be imported, or takes something that no loss is given.
    """

    def __init__(self, name: str, function: Callable[..., Any] | None = None) -> None:
        self.name = name
        self._function = load(name, OBJECTIVE) if function is None else function
        self.takes = _taken(self._function, OBJECTIVE, name, OF_LOSS)

    def __call__(self, given: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T] and figures [T]: `policy_loss.FIGURES`, and others under `OWN`.

        Args:
            given: all of `OF_LOSS`.

        Raises:
            InputError: the function returned something else.
        """
        made = self._function(**{name: given[name] for name in self.takes})
        has_figures = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)
        loss_T, found = made if has_figures else (made, {})
        if not _is_like(loss_T, given["mask_T"]):
            self.refuse(f"returns {_shape(loss_T)}; return the loss of each token, {_shape(given['mask_T'])}")
        for name, values_T in found.items():
            if not _is_like(values_T, given["mask_T"]):
                self.refuse(f"returns the figure {name} as {_shape(values_T)}; return one number for each token")
        figures = {name if name in FIGURES else f"{OWN}{name}": values_T for name, values_T in found.items()}
        if all(name in figures for name in FIGURES):
            return loss_T, figures
        return loss_T, figures_of(given["logprobs_T"], given["old_logprobs_T"]) | figures

    def refuse(self, what: str) -> NoReturn:
        raise InputError(f"{OBJECTIVE}: {self.name} {what}")


class OwnAdvantage:
    """A user's function of rewards and groups, called with what it names.

    Raises:
        InputError: it cannot be imported, or takes something that no advantage is given.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = load(name, ADVANTAGE)
        self._takes = _taken(self._function, ADVANTAGE, name, OF_ADVANTAGE)

    def __call__(self, rewards_N: Tensor, groups_N: Tensor) -> Tensor:
        """[N]; InputError: the function returned something else."""
        given = {"rewards_N": rewards_N, "groups_N": groups_N}
        made = self._function(**{name: given[name] for name in self._takes})
        if not _is_like(made, rewards_N):
            self.refuse(f"returns {_shape(made)}; return one number for each sample, {_shape(rewards_N)}")
        return made  # type: ignore[no-any-return]

    def refuse(self, what: str) -> NoReturn:
        raise InputError(f"{ADVANTAGE}: {self.name} {what}")


def _taken(function: Callable[..., Any], key: str, name: str, offered: tuple[str, ...]) -> tuple[str, ...]:
    """Which of what is offered a function names as its parameters; the first of them it must."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # of a function that is not written in Python
        raise InputError(f"{key}: {name} does not tell its parameters; give a function written in Python") from error
    for parameter in found.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(f"{key}: {name} takes {parameter.name} by position, but is given it by name; remove the /")
        is_needed = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_needed and parameter.default is parameter.empty and parameter.name not in offered:
            raise InputError(
                f"{key}: {name} takes {parameter.name}{nearest(parameter.name, offered)}, which it is not given; name "
                f"parameters of {', '.join(offered)}, or give it a default"
            )
    if offered[0] not in found:
        raise InputError(f"{key}: {name} takes {', '.join(found) or 'nothing'}; it needs the parameter {offered[0]}")
    return tuple(parameter for parameter in found if parameter in offered)


def _is_like(made: Any, tensor: Tensor) -> bool:
    return isinstance(made, Tensor) and made.shape == tensor.shape


def _shape(made: Any) -> str:
    return f"a tensor {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
