"""What the trainer computes on: sequences, the micro-batches that they are packed into, and what passes say of them.

Letters in shapes: B sequences, T packed tokens of a micro-batch, L positions of one sequence, M layers that have
experts, K experts of a token in one layer, F tokens of pictures, C numbers of a patch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Picture(Protocol):
    """A picture that is read when it is needed."""

    @property
    def key(self) -> str:
        """The same for the same patches only."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""

    def patches(self) -> torch.Tensor:
        """[rows x columns, C] float32: what the model's image processor makes of it, C numbers of a patch.

        Raises:
            InputError: it cannot be read any more.
        """


@dataclass(frozen=True)
class Images:
    """The pictures of a sequence or a micro-batch, in the order of their tokens."""

    pictures: tuple[Picture, ...]
    places: torch.Tensor  # [F] int64: every token of a picture by its number, never looked up by its id

    def to(self, device: torch.device) -> Images:
        return Images(self.pictures, self.places.to(device))


@dataclass(frozen=True)
class Sequence:
    """One training sequence before packing; position t of every per-token field predicts ``token_ids[t + 1]``."""

    token_ids: torch.Tensor  # [L+1] int64
    loss_mask: torch.Tensor  # [L] float32, 1 where the predicted token is learnt from
    advantages: torch.Tensor | None = None  # [L] float32
    rollout_logprobs: torch.Tensor | None = None  # [L] float32, 0 outside the mask
    routed_experts: npt.NDArray[np.unsignedinteger[Any]] | None = None  # [L, M, K]: the engine's choice; None: unknown
    staleness: torch.Tensor | None = (
        None  # [L] int64, steps that the weights behind a learnt token are older than the step
    )
    images: Images | None = None  # places count the tokens of this sequence
    position_ids: torch.Tensor | None = None  # [3, L] int64: time, height and width; None: 0, 1, ... of text


@dataclass(frozen=True)
class Microbatch:
    """Packed (thd) sequences that one forward pass takes; no padding but a tail that makes T divisible.

    The tail, where there is one, is a sequence of its own in ``cu_seqlens`` with a zero mask.
    """

    token_ids: torch.Tensor  # [T] int64
    target_ids: torch.Tensor  # [T] int64, the token that each position predicts
    position_ids: torch.Tensor  # [T], or [3, T] with pictures: int64, restarting at 0 in every sequence
    loss_mask: torch.Tensor  # [T] float32
    cu_seqlens: torch.Tensor  # [B+1] int32, cumulative lengths with the leading 0
    max_seqlen: int  # tokens, of the longest sequence
    sequence_indices: tuple[int, ...]  # [B without tail]: where each sequence stood in the list that was packed
    advantages: torch.Tensor | None = None  # [T] float32
    rollout_logprobs: torch.Tensor | None = None  # [T] float32, nats
    old_logprobs: torch.Tensor | None = None  # [T] float32, nats: pi_old of the objective
    staleness: torch.Tensor | None = None  # [T] int64, steps; it counts on learnt tokens only
    reference_logprobs: torch.Tensor | None = None  # [T] float32, nats
    values: torch.Tensor | None = None  # [T] float32, of a critic before the update, in units of the reward
    returns: torch.Tensor | None = None  # [T] float32, what these values should have been
    # Which experts take each token, for every model that computes this micro-batch: the engine's choice, or what the
    # policy itself chose in an earlier pass. None, -1 or a layer without an entry: the router chooses.
    routed_experts: torch.Tensor | None = None  # [T, M, K] int16
    own_experts: Mapping[int, torch.Tensor] | None = None  # layer -> [N, K] int16, for the N tokens of this rank
    images: Images | None = None  # places count packed tokens

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, the tail left out; of a micro-batch whose tensors are on the host."""
        borders = self.cu_seqlens[: len(self.sequence_indices) + 1].tolist()
        return [end - start for start, end in pairwise(borders)]

    def replace(self, **changes: Any) -> Microbatch:
        return dataclasses.replace(self, **changes)

    def to(self, device: torch.device) -> Microbatch:
        """The same micro-batch with its tensors on ``device``; ``cu_seqlens`` too."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return self.replace(**{k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor | Images)})


@dataclass(frozen=True)
class TokenStats:
    """What a forward pass says of the packed positions of one micro-batch; zeros where the loss mask is 0."""

    logprobs: torch.Tensor  # [T] float32, nats, of target_ids after the sampling temperature
    entropy: torch.Tensor  # [T] float32, nats
    is_top: torch.Tensor | None = None  # [T] float32, 1 where no token is more probable than the target
    own_experts: Mapping[int, torch.Tensor] | None = None  # as in the micro-batch, of this rank's layers; if recorded


@dataclass(frozen=True)
class Figures:
    """What an objective measured on the learnt tokens of one micro-batch, by name, detached.

    Over micro-batches and data-parallel ranks the sums are added and the largest of the maxima is taken.
    """

    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [] each
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [] each, never negative
