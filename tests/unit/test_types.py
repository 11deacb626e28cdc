"""The trajectory: what it holds of one turn and of several, and what it refuses."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from mega_rl.types import ASSISTANT, PROMPT, Outcome, Prompt, Span, Trajectory, TurnSpan
from tests.recorded.trajectories import two_turns

QUESTION = Prompt(7, (4, 8), "?", "7", "arithmetic", {"level": [1]})
ARRAYS = ("token_ids", "loss_mask", "logprobs")


def single(version: int = 5) -> Trajectory:
    return Trajectory.single_turn(QUESTION, 0, [9, 2], [-0.7, -0.1], "b", "stop", version)


def test_a_single_turn() -> None:
    trajectory = single()
    assert trajectory.token_ids.tolist() == [4, 8, 9, 2]
    assert trajectory.loss_mask.tolist() == [False, False, True, True]
    assert trajectory.logprobs.tolist() == [0, 0, np.float32(-0.7), np.float32(-0.1)]
    assert trajectory.spans == (Span(2, 5),)
    assert trajectory.turns == (TurnSpan(PROMPT, 0, 2), TurnSpan(ASSISTANT, 2, 4))
    assert (trajectory.num_sampled, trajectory.newest_version, trajectory.is_single_turn) == (2, 5, True)
    assert trajectory.sampled_ids.tolist() == [9, 2]
    assert trajectory.sampled_logprobs.tolist() == trajectory.logprobs.tolist()[2:]
    with pytest.raises(AssertionError, match="one log-probability per response token"):
        Trajectory.single_turn(QUESTION, 0, [9, 2], [-0.7], "b", "stop", 5)


def test_a_response_without_tokens_has_a_version_too() -> None:
    trajectory = Trajectory.single_turn(QUESTION, 0, [], [], "", "length", 3)
    assert (trajectory.num_sampled, trajectory.newest_version, trajectory.is_single_turn) == (0, 3, True)


def test_several_turns_and_spans() -> None:
    trajectory = two_turns(spans=(Span(3, 1), Span(8, 4)))  # the second begins inside the last turn
    assert trajectory.sampled_ids.tolist() == [50, 51, 52, 53, 2]
    assert trajectory.sampled_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    assert (trajectory.num_sampled, trajectory.newest_version, trajectory.is_single_turn) == (5, 4, False)
    assert not dataclasses.replace(single(), spans=(Span(2, 1), Span(3, 2))).is_single_turn


def test_nine_bytes_a_token_of_arrays_that_cannot_be_changed() -> None:
    trajectory = two_turns()
    assert sum(getattr(trajectory, name).nbytes for name in ARRAYS) == 9 * len(trajectory.token_ids)
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(trajectory, name)[0] = 1


def routed(dtype: Any = np.uint8, num_tokens: int = 3) -> Trajectory:
    experts = np.arange(num_tokens * 4, dtype=dtype).reshape(num_tokens, 2, 2)
    return dataclasses.replace(single(), routed_experts=experts)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_of_all_tokens_but_the_last(dtype: Any) -> None:
    trajectory = routed(dtype)
    copy = pickle.loads(pickle.dumps(trajectory))
    assert copy == trajectory and copy.routed_experts.dtype == dtype
    for one in (trajectory, copy):
        with pytest.raises(ValueError, match="read-only"):
            one.routed_experts[0] = 1
    assert trajectory != single() and single() != trajectory
    with pytest.raises(AssertionError, match="experts of 4 tokens, and 3 were inputs"):
        routed(dtype, num_tokens=4)
    with pytest.raises(AssertionError, match="int64"):
        routed(np.int64)


@pytest.mark.parametrize("protocol", [4, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_keeps_everything_and_the_protection(protocol: int) -> None:
    buffers: list[Any] = []  # out of band, as Ray passes arrays: they would keep its shared memory occupied
    aside = {"buffer_callback": buffers.append} if protocol >= 5 else {}
    again = pickle.loads(pickle.dumps(two_turns(), protocol, **aside), buffers=buffers)
    assert again == two_turns()
    for name in ARRAYS:
        array = getattr(again, name)
        assert not array.flags.writeable and array.flags.owndata


def test_equal_if_all_fields_are() -> None:
    assert single() == single() and two_turns() == two_turns()
    others: list[dict[str, Any]] = [
        {"prompt": dataclasses.replace(QUESTION, text="!")},
        {"sample_index": 1},
        {"token_ids": np.array([4, 8, 9, 3], np.int32)},
        {"loss_mask": np.array([0, 0, 1, 0], np.bool_), "logprobs": np.array([0, 0, -0.7, 0], np.float32)},
        {"logprobs": np.array([0, 0, -0.7, -0.2], np.float32)},
        {"spans": (Span(2, 6),)},
        {"turns": (TurnSpan(PROMPT, 0, 2), TurnSpan(ASSISTANT, 2, 3), TurnSpan(ASSISTANT, 3, 4))},
        {"text": "c"},
        {"finish_reason": "length"},
        {"routed_experts": np.zeros((3, 1, 1), np.uint8)},
        {"episode": Outcome("environment", 1, None, None, {})},
    ]
    compared = {field.name for field in dataclasses.fields(Trajectory)} - {"engine"}
    assert {name for changes in others for name in changes} == compared
    assert dataclasses.replace(single(), engine=3) == single(), "who sampled it is no part of it"
    assert all(dataclasses.replace(single(), **changes) != single() for changes in others)
    assert single() != "something else"
    with pytest.raises(TypeError, match="unhashable"):
        hash(single())


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": np.array([4, 8, 9, 2], np.int64)},
        {"loss_mask": np.array([0, 0, 1, 1], np.int32)},
        {"logprobs": np.array([0, 0, -0.7, -0.1], np.float64)},
        {"logprobs": np.array([0, 0, -0.7], np.float32)},
        {"token_ids": np.array([4, 7, 9, 2], np.int32)},  # not the prompt
        {"logprobs": np.array([0, -1, -0.7, -0.1], np.float32)},  # outside the mask
        {"loss_mask": np.array([0, 1, 1, 1], np.bool_), "spans": (Span(1, 5),)},  # a sampled prompt
        {"spans": ()},
        {"spans": (Span(3, 5),)},  # the first sampled token has no version
        {"spans": (Span(2, 5), Span(2, 6))},
        {"spans": (Span(2, 5), Span(3, 4))},
        {"spans": (Span(2, 5), Span(4, 6))},  # behind the last token
        {"turns": ()},
        {"turns": (TurnSpan(PROMPT, 0, 1), TurnSpan(ASSISTANT, 1, 4))},
        {"turns": (TurnSpan(PROMPT, 0, 2), TurnSpan(ASSISTANT, 2, 3))},
        {"turns": (TurnSpan(PROMPT, 0, 2), TurnSpan(ASSISTANT, 3, 4))},
        {"turns": (TurnSpan(PROMPT, 0, 2), TurnSpan(ASSISTANT, 1, 4))},
        {"turns": (TurnSpan(PROMPT, 0, 2), TurnSpan(ASSISTANT, 2, 3), TurnSpan("tool", 3, 4))},  # a sampled reply
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        dataclasses.replace(single(), **changes)
