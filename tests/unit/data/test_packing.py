"""Packing: no token lost or moved, whatever the lengths and the tail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from mega_rl.data.packing import pack, sequence_of, unpack
from mega_rl.microbatch import Sequence
from mega_rl.types import Prompt, Span, Trajectory
from tests.recorded.trajectories import two_turns

PAD = 99
tokens = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def answer(prompt_ids: list[int], response_ids: list[int]) -> Trajectory:
    logprobs = tuple(-0.5 - position for position in range(len(response_ids)))
    prompt = Prompt(0, tuple(prompt_ids), "", "", "s")
    return Trajectory.single_turn(prompt, 0, response_ids, logprobs, "", "stop", 0)


@given(tokens, tokens)
def test_a_sample_is_learnt_from_on_its_response_alone(prompt_ids: list[int], response_ids: list[int]) -> None:
    sequence = sequence_of(answer(prompt_ids, response_ids), advantage=-1.5)
    assert sequence.advantages is not None and sequence.rollout_logprobs is not None
    assert sequence.token_ids.tolist() == prompt_ids + response_ids
    assert len(sequence.loss_mask) == len(prompt_ids) + len(response_ids) - 1
    is_learnt = sequence.loss_mask.bool()
    assert sequence.token_ids[1:][is_learnt].tolist() == response_ids
    assert sequence.token_ids[1:][~is_learnt].tolist() == prompt_ids[1:]
    assert sequence.advantages.tolist() == [-1.5 * mask for mask in sequence.loss_mask.tolist()]
    assert sequence.rollout_logprobs[is_learnt].tolist() == [-0.5 - position for position in range(len(response_ids))]
    assert not sequence.rollout_logprobs[~is_learnt].any()


@pytest.mark.parametrize("spans", [(Span(3, 1),), (Span(3, 1), Span(8, 4))])  # also inside of a turn
def test_of_several_turns_only_the_sampled_tokens_are_learnt_from(spans: tuple[Span, ...]) -> None:
    sequence = sequence_of(two_turns(spans), advantage=2.0)
    packed = pack([sequence_of(answer([1, 2], [3]), 1.0), sequence], [1], 1, PAD)
    assert packed.advantages is not None and packed.rollout_logprobs is not None
    assert packed.token_ids.tolist() == [3, 14, 4, 50, 51, 90, 91, 52, 53]
    assert packed.target_ids.tolist() == [14, 4, 50, 51, 90, 91, 52, 53, 2]
    assert packed.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert packed.advantages.tolist() == [0, 0, 2, 2, 0, 0, 2, 2, 2]
    expected = torch.tensor([0, 0, -0.1, -0.2, 0, 0, -0.3, -0.4, -0.5])
    assert packed.rollout_logprobs.equal(expected)
    dtypes = [t.dtype for t in (packed.token_ids, packed.loss_mask, packed.advantages, packed.rollout_logprobs)]
    assert dtypes == [torch.int64, torch.float32, torch.float32, torch.float32]


def test_experts_lie_beside_their_tokens_and_are_minus_one_where_they_are_not_known() -> None:
    given, unknown = answer([1, 2], [3, 4]), answer([5], [6, 7])
    experts = np.arange(6, dtype=np.uint8).reshape(3, 1, 2) + 250  # of the first sample
    sequences = [
        sequence_of(dataclasses.replace(trajectory, routed_experts=e), 1.0)
        for trajectory, e in ((given, experts), (unknown, None))
    ]
    packed = pack(sequences, [1, 0], 4, PAD)
    assert packed.routed_experts is not None and packed.routed_experts.dtype == torch.int16
    assert (
        packed.routed_experts[:, 0].tolist() == [[-1, -1]] * 2 + [[250, 251], [252, 253], [254, 255]] + [[-1, -1]] * 3
    )
    assert pack(sequences, [1], 4, PAD).routed_experts is None


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[Sequence], list[int], int]:
    samples = draw(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6))
    sequences = [sequence_of(answer(p, r), float(i + 1)) for i, (p, r) in enumerate(samples)]
    order = draw(st.permutations(range(len(sequences))))
    count = draw(st.integers(1, len(sequences)))
    return sequences, list(order[:count]), draw(st.sampled_from([1, 2, 4, 7, 16]))


@settings(max_examples=60, deadline=None)
@given(packs())
def test_packing_keeps_every_token_in_its_place(case: tuple[list[Sequence], list[int], int]) -> None:
    sequences, indices, multiple = case
    packed = pack(sequences, indices, multiple, PAD)
    assert packed.advantages is not None and packed.rollout_logprobs is not None
    assert packed.sequence_indices == tuple(indices)
    for name, of_sequence in {
        "token_ids": lambda s: s.token_ids[:-1],
        "target_ids": lambda s: s.token_ids[1:],
        "position_ids": lambda s: torch.arange(len(s.loss_mask)),
        "loss_mask": lambda s: s.loss_mask,
        "advantages": lambda s: s.advantages,
        "rollout_logprobs": lambda s: s.rollout_logprobs,
    }.items():
        parts = unpack(getattr(packed, name), packed)
        assert len(parts) == len(indices)
        for index, part in zip(indices, parts, strict=True):
            assert part.equal(of_sequence(sequences[index])), name


@settings(max_examples=60, deadline=None)
@given(packs())
def test_the_tail_is_a_silent_sequence_of_its_own(case: tuple[list[Sequence], list[int], int]) -> None:
    sequences, indices, multiple = case
    packed = pack(sequences, indices, multiple, PAD)
    num_real = sum(len(sequences[index].loss_mask) for index in indices)
    num_tail = packed.num_tokens - num_real
    assert packed.num_tokens % multiple == 0 and num_tail < multiple
    assert packed.cu_seqlens.dtype == torch.int32
    lengths = packed.cu_seqlens.diff().tolist()
    assert packed.cu_seqlens[0] == 0 and packed.cu_seqlens[-1] == packed.num_tokens
    assert lengths == [len(sequences[index].loss_mask) for index in indices] + [num_tail] * (num_tail > 0)
    assert packed.max_seqlen == max(lengths)
    tail = slice(num_real, None)
    assert packed.position_ids[tail].tolist() == list(range(num_tail))
    assert packed.token_ids[tail].tolist() == packed.target_ids[tail].tolist() == [PAD] * num_tail
    assert packed.advantages is not None
    assert not packed.loss_mask[tail].any() and not packed.advantages[tail].any()


def test_supervised_sequences_have_no_reinforcement_fields() -> None:
    packed = pack([Sequence(torch.tensor([1, 2, 3]), torch.tensor([0.0, 1.0]))], [0], 4, PAD)
    assert packed.advantages is None and packed.rollout_logprobs is None
    assert packed.loss_mask.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_values_with_more_dimensions_and_of_another_length() -> None:
    packed = pack(
        [Sequence(torch.tensor([1, 2, 3]), torch.ones(2)), Sequence(torch.tensor([4, 5]), torch.ones(1))],
        [1, 0],
        4,
        PAD,
    )
    assert [part.shape for part in unpack(torch.zeros(4, 3), packed)] == [(1, 3), (2, 3)]
    with pytest.raises(AssertionError, match="one value per packed position"):
        unpack(torch.zeros(3), packed)


def test_a_rank_without_sequences_still_has_something_to_compute() -> None:
    sequences = [sequence_of(answer([1, 2], [3]), 1.0)]
    packed = pack(sequences, [], 4, PAD)
    assert packed.num_tokens == 4 and packed.cu_seqlens.tolist() == [0, 4] and not packed.loss_mask.any()
    assert packed.advantages is not None and packed.rollout_logprobs is not None
    assert unpack(packed.token_ids, packed) == []
