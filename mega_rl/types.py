"""The records that pass between the stages of training: frozen, typed, a shape and a unit on every field.

Letters in shapes: B sequences, G samples per prompt, T packed tokens of a micro-batch, R tokens of one response.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt data set, ready to be sampled from.

    Example: ``Prompt(index=7, token_ids=(3, 14, 4), text="3+4=", ground_truth="7", data_source="arithmetic")``
    """

    index: int  # row number in the data set: keys the sampling seeds, so it never depends on the layout
    token_ids: tuple[int, ...]  # what the engine is given, chat template applied
    text: str  # the same, readable
    ground_truth: str
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One sampled response to a prompt."""

    prompt: Prompt
    sample_index: int  # 0 .. G-1 within the prompt's group
    token_ids: tuple[int, ...]  # [R], the end-of-sequence token included where it was sampled
    logprobs: tuple[float, ...]  # [R], nats, of the sampled tokens under the engine's (possibly noisy) policy
    text: str  # detokenised without special tokens
    finish_reason: str  # "stop" or "length"
    weight_version: int  # the sync whose weights sampled it


@dataclass(frozen=True)
class UnknownReward:
    """Why a reward has no value for one completion."""

    cause: str  # one of mega_rl.rewards.worker.CAUSES
    detail: str  # completes "the reward ..."


@dataclass(frozen=True)
class Score:
    """The reward of one completion."""

    value: float  # the weighted sum of the parts; NaN where one of them is unknown
    parts: Mapping[str, float] = field(default_factory=dict)  # reward name -> its own value before weighting
    unknown: Mapping[str, UnknownReward] = field(default_factory=dict)  # reward name -> why it has no value

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.value)


@dataclass(frozen=True)
class Sample:
    """A completion with its reward and advantage: what the trainer learns from."""

    completion: Completion
    score: Score
    advantage: float  # the same for every token of the response


@dataclass(frozen=True)
class Sequence:
    """One training sequence before packing; position t of every per-token field predicts ``token_ids[t + 1]``."""

    token_ids: torch.Tensor  # [L+1] int64
    loss_mask: torch.Tensor  # [L] float32, 1 where the predicted token is learnt from
    advantages: torch.Tensor | None = None  # [L] float32
    rollout_logprobs: torch.Tensor | None = None  # [L] float32, 0 outside the mask


@dataclass(frozen=True)
class Microbatch:
    """Packed (thd) sequences that one forward pass takes; no padding but a tail that makes T divisible.

    The tail, where there is one, is a sequence of its own in ``cu_seqlens`` with a zero mask.
    """

    token_ids: torch.Tensor  # [T] int64
    target_ids: torch.Tensor  # [T] int64, the token that each position predicts
    position_ids: torch.Tensor  # [T] int64, restarting at 0 in every sequence
    loss_mask: torch.Tensor  # [T] float32
    cu_seqlens: torch.Tensor  # [B+1] int32, cumulative lengths with the leading 0
    max_seqlen: int  # tokens, of the longest sequence
    sequence_indices: tuple[int, ...]  # [B without tail]: where each sequence stood in the list that was packed
    advantages: torch.Tensor | None = None  # [T] float32
    rollout_logprobs: torch.Tensor | None = None  # [T] float32, nats
    old_logprobs: torch.Tensor | None = None  # [T] float32, nats: pi_old of the objective
    reference_logprobs: torch.Tensor | None = None  # [T] float32, nats

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())

    def replace(self, **changes: Any) -> Microbatch:
        return dataclasses.replace(self, **changes)

    def to(self, device: torch.device) -> Microbatch:
        """The same micro-batch with its tensors on ``device``; ``cu_seqlens`` too."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return self.replace(**{k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)})


@dataclass(frozen=True)
class TokenStats:
    """What a forward pass says of every packed position of one micro-batch."""

    logprobs: torch.Tensor  # [T] float32, nats, of target_ids after the sampling temperature
    entropy: torch.Tensor  # [T] float32, nats


@dataclass(frozen=True)
class Figures:
    """What an objective measured on the learnt tokens of one micro-batch, by name, detached.

    Over micro-batches and data-parallel ranks the sums are added and the largest of the maxima is taken.
    """

    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [] each
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [] each, never negative
