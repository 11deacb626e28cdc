"""A checkpoint's part of the responses that are under way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mega_rl.rollout.partial import PartialResponse, piece_of
from mega_rl.rollout.scheduling import fleet_state
from mega_rl.rollout.scheduling.fleet_state import decoded, encoded
from mega_rl.types import HandedTrajectory, Prompt, Response, Span, Trajectory
from tests.pretended.owners import not_handed


def partial_response(sample: int, num_tokens: int) -> PartialResponse:
    prompt = Prompt(4, (8, 9), "", "", "test")
    ids, logprobs = list(range(num_tokens)), [-0.125 * token for token in range(num_tokens)]
    return PartialResponse(prompt, sample).grown(piece_of(0, ids, logprobs, (Span(2, 5), Span(3, 6))))


def state(*lengths: int) -> dict[str, Any]:
    prefixes = {sample: partial_response(sample, length) for sample, length in enumerate(lengths)}
    row = {"ticket": 0, "is_kept": None, "results": {}, "prefixes": prefixes}
    return {"format": 1, "trained": 6, "steps": {6: [row]}}


def again(found: dict[str, Any]) -> dict[int, PartialResponse]:
    decoded_state, scores = decoded(json.loads(json.dumps(encoded(found, {}, not_handed))))
    assert not scores
    ((row,),) = decoded_state["steps"].values()
    return row["prefixes"]  # type: ignore[no-any-return]


def test_responses_under_way_come_back_with_their_versions_and_log_probabilities() -> None:
    found = again(state(3, 7))
    assert [found[sample].num_sampled for sample in (0, 1)] == [3, 7]
    for sample, length in enumerate((3, 7)):
        assert found[sample].trajectory() == partial_response(sample, length).trajectory()


def test_the_longest_are_saved_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_state, "MAX_TOKENS", 12)
    assert sorted(again(state(5, 2, 7, 3))) == [0, 2]


def test_a_trajectory_that_another_rank_owns_is_written_whole() -> None:
    prompt = Prompt(4, (8, 9), "", "", "test")
    whole = Trajectory.single_turn(prompt, 0, [3, 2], [-0.5, -0.25], "b", "stop", 5)
    told = HandedTrajectory(whole.summary(3, 17))
    row = {"ticket": 0, "is_kept": None, "results": {0: told}, "prefixes": {}}
    found = {"format": 1, "trained": 6, "steps": {6: [row]}}
    asked: list[Response] = []
    written = json.loads(json.dumps(encoded(found, {}, lambda one: asked.append(one) or whole)))  # type: ignore[func-returns-value]
    ((back,),) = decoded(written)[0]["steps"].values()
    assert back["results"] == {0: whole} and asked == [told]
