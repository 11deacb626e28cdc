"""Sequences into packed (thd) micro-batches and per-token results back into sequences.

Letters in shapes: L positions of one sequence (one less than its tokens), T packed positions, M layers with experts, K
experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from mega_rl.microbatch import Images, Microbatch, Sequence
from mega_rl.models.vision import NUM_AXES
from mega_rl.types import Trajectory, TrajectoryTokens


def sequence_of(
    tokens: TrajectoryTokens | Trajectory,
    advantage: float | npt.NDArray[np.float64],
    staleness: npt.NDArray[np.int64] | None = None,
) -> Sequence:
    """A trajectory as one training sequence.

    Position t predicts token t + 1, so the first response token is predicted at the last prompt position. The loss
    mask is 1 exactly where a sampled token is predicted; advantages and the engine's log-probabilities stand there
    and are 0 elsewhere.

    Args:
        advantage: of all sampled tokens, or [S]: of each.
        staleness: [S], of the sampled tokens; None: it is not asked for.
    """
    mask = tokens.loss_mask
    assert not mask[0], "a response needs a prompt token that predicts its first one"
    loss_mask = torch.from_numpy(mask[1:].astype(np.float32))
    advantages = loss_mask.clone()
    advantages[torch.from_numpy(mask[1:])] = torch.as_tensor(advantage, dtype=torch.float32)
    ages = None
    if staleness is not None:
        ages = torch.zeros(len(mask) - 1, dtype=torch.int64)
        ages[torch.from_numpy(mask[1:])] = torch.from_numpy(staleness)
    return Sequence(
        token_ids=torch.from_numpy(tokens.token_ids.astype(np.int64)),
        loss_mask=loss_mask,
        advantages=advantages,
        rollout_logprobs=torch.from_numpy(tokens.logprobs[1:].copy()),
        routed_experts=tokens.routed_experts,
        staleness=ages,
    )


def pack(
    sequences: SequenceOf[Sequence] | Mapping[int, Sequence],
    indices: list[int],
    pad_to_multiple: int,
    pad_token_id: int,
) -> Microbatch:
    """Concatenates the L input positions of ``sequences[i] for i in indices`` into one micro-batch.

    Args:
        sequences: all of a batch, or those that this rank needs by their places in the batch.
        indices: which of the sequences, in packing order; kept as ``sequence_indices``. None of them gives a
        micro-batch
            of nothing but a tail: where there are fewer sequences than data-parallel ranks, all must still take part.
        pad_to_multiple: T becomes a multiple of it (tensor-parallel ranks with sequence parallelism) through a tail,
            which is a sequence of its own with a zero mask.
        pad_token_id: token and target of the tail.
    """
    chosen = [sequences[index] for index in indices]
    lengths = [sequence.token_ids.numel() - 1 for sequence in chosen]
    assert min(lengths, default=1) >= 1, "each sequence needs at least one prediction"
    tail = -sum(lengths) % pad_to_multiple if chosen else pad_to_multiple
    padding = torch.full((tail,), pad_token_id, dtype=torch.int64)
    if tail:
        lengths.append(tail)
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    return Microbatch(
        token_ids=torch.cat([sequence.token_ids[:-1] for sequence in chosen] + [padding]),
        target_ids=torch.cat([sequence.token_ids[1:] for sequence in chosen] + [padding]),
        position_ids=_positions(chosen, lengths),
        loss_mask=_concatenate([sequence.loss_mask for sequence in chosen], tail),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int32), lengths_B.cumsum(0, dtype=torch.int32)]),
        max_seqlen=max(lengths),
        sequence_indices=tuple(indices),
        advantages=_optional([sequence.advantages for sequence in chosen], tail),
        rollout_logprobs=_optional([sequence.rollout_logprobs for sequence in chosen], tail),
        staleness=_optional([sequence.staleness for sequence in chosen], tail),
        routed_experts=_routed_experts(chosen, tail),
        images=_images(chosen, lengths),
    )


def unpack(values_T: torch.Tensor, microbatch: Microbatch) -> list[torch.Tensor]:
    """The values of each packed sequence, [L, ...] each, in the order of ``sequence_indices``, without the tail."""
    assert values_T.shape[0] == microbatch.num_tokens, "one value per packed position"
    borders = microbatch.cu_seqlens.tolist()
    return [values_T[borders[i] : borders[i + 1]] for i in range(len(microbatch.sequence_indices))]


def _positions(sequences: list[Sequence], lengths: list[int]) -> torch.Tensor:
    """[T], or [3, T] where a sequence has pictures; text, and the tail, counts 0, 1, ... on every axis."""
    given = [sequence.position_ids for sequence in sequences] + [None] * (len(lengths) - len(sequences))
    if all(positions is None for positions in given):
        return torch.cat([torch.arange(length) for length in lengths])
    parts = [
        torch.arange(length).expand(NUM_AXES, -1) if positions is None else positions[:, :length]
        for positions, length in zip(given, lengths, strict=True)
    ]
    return torch.cat(parts, dim=1)


def _images(sequences: list[Sequence], lengths: list[int]) -> Images | None:
    starts = [sum(lengths[:number]) for number in range(len(sequences))]
    found = [(start, s.images) for start, s in zip(starts, sequences, strict=True) if s.images is not None]
    if not found:
        return None
    pictures = tuple(picture for _, images in found for picture in images.pictures)
    return Images(pictures, torch.cat([start + images.places for start, images in found]))


def _routed_experts(sequences: list[Sequence], tail: int) -> torch.Tensor | None:
    """[T, M, K] int16, -1 in the tail and in sequences whose experts are not known; None if no sequence's are."""
    shapes = {sequence.routed_experts.shape[1:] for sequence in sequences if sequence.routed_experts is not None}
    if not shapes:
        return None
    (shape,) = shapes
    lengths = [sequence.loss_mask.numel() for sequence in sequences]
    packed = np.full((sum(lengths) + tail, *shape), -1, np.int16)
    for sequence, end, length in zip(sequences, np.cumsum(lengths), lengths, strict=True):
        if sequence.routed_experts is not None:
            packed[end - length : end] = sequence.routed_experts
    return torch.from_numpy(packed)


def _concatenate(values: list[torch.Tensor], tail: int) -> torch.Tensor:
    return torch.cat([*values, torch.zeros(tail, dtype=values[0].dtype if values else None)])


def _optional(values: list[torch.Tensor | None], tail: int) -> torch.Tensor | None:
    """A field that all sequences have, or None where none has it; where there are no sequences, it is there."""
    present = [value for value in values if value is not None]
    assert len(present) in (0, len(values)), "a field is there for all sequences or for none"
    return _concatenate(present, tail) if present or not values else None
