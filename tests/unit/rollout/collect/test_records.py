"""Rollouts as rows, and a run served from them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mega_rl.errors import InputError
from mega_rl.models.mixture import Mixture
from mega_rl.rollout.collect.collect import PromptGroup
from mega_rl.rollout.collect.records import read_step, to_group, to_rows, write_step
from mega_rl.rollout.collect.replay import ReplayEngine
from mega_rl.rollout.requests import make_requests
from mega_rl.types import Prompt, PromptImage, Score, Span, Trajectory, UnknownReward
from tests.recorded.trajectories import two_turns

PROMPT = Prompt(7, (3, 14, 4), "3+4=", "7", "arithmetic", {"level": 1, "names": ["a"]})


def group(version: int = 0, text: str = "7 \u4e03\u2028") -> PromptGroup:
    logprobs = [(-0.1 - i / 3, -1e-17 * i) for i in range(2)]
    trajectories = [Trajectory.single_turn(PROMPT, i, (5, i), logprobs[i], text, "stop", version) for i in range(2)]
    return PromptGroup(tuple(trajectories), (Score(1.0, {"exact_match": 1.0}), Score(0.1, {"exact_match": 0.1})))


def test_a_group_survives_a_file_exactly(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [{"step": 1, "advantage": 0.5, **row} for row in to_rows(group())], -1)
    assert to_group(read_step(tmp_path, 1)) == group()


def test_a_file_of_an_earlier_release_comes_out_byte_for_byte(tmp_path: Path) -> None:
    """Two rows that a release with tuples of Python's numbers wrote; its log-probabilities were float32 values too."""
    prompt = (
        '{"index": 7, "token_ids": [3, 14, 4], "text": "3+4=", "ground_truth": "7", "data_source": "arithmetic", '
        '"extra_info": {"level": 1, "names": ["a"]}}'
    )
    text = (
        f'{{"prompt": {prompt}, "sample_index": 0, "token_ids": [5, 96, 2], "logprobs": [-6.494584083557129, '
        '-4.060962677001953, -3.7864389419555664], "text": "7 \u4e03\u2028", "finish_reason": "stop", '
        '"weight_version": 3, "score": {"value": 1.0, "parts": {"exact_match": 1.0}, "unknown": {}}}\n'
        f'{{"prompt": {prompt}, "sample_index": 1, "token_ids": [8], "logprobs": [-1.1920928244535389e-07], '
        '"text": "", "finish_reason": "length", "weight_version": 3, "score": {"value": null, "parts": {}, "unknown": '
        '{"exact_match": {"cause": "raised", "detail": "raised KeyError: \'x\'"}}}}\n'
    )
    (tmp_path / "step_000001.jsonl").write_text(text, encoding="utf-8")
    path = write_step(tmp_path, 2, to_rows(to_group(read_step(tmp_path, 1))), -1)
    assert path.read_text(encoding="utf-8") == text


def test_several_turns_and_versions_survive_a_file_in_keys_of_their_own(tmp_path: Path) -> None:
    trajectories = (*group().trajectories, two_turns(), two_turns((Span(3, 1), Span(8, 4))))
    longer = PromptGroup(trajectories, (Score(1.0),) * 4)
    assert to_group(read_step(write_step(tmp_path, 1, to_rows(longer), -1).parent, 1)) == longer
    first, *_, last = to_rows(longer)
    assert set(last) - set(first) == {"loss_mask", "spans", "turns"} and last["weight_version"] == 4
    assert (last["token_ids"], last["loss_mask"]) == ([50, 51, 90, 91, 52, 53, 2], [1, 1, 0, 0, 1, 1, 1])


def test_an_unknown_score_is_null_in_the_file_and_unknown_again(tmp_path: Path) -> None:
    why = UnknownReward("raised", "raised KeyError: 'x'")
    unknown = PromptGroup(group().trajectories, (Score(math.nan, {"a": 1.0}, {"b": why}), group().scores[1]))
    path = write_step(tmp_path, 1, to_rows(unknown), -1)
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().split("\n")[:2])
    assert first["score"]["value"] is None and second["score"]["value"] == 0.1
    scores = to_group(read_step(tmp_path, 1)).scores
    assert not scores[0].is_known and scores[0].unknown == {"b": why} and scores[1] == unknown.scores[1]


def test_only_the_newest_files_stay(tmp_path: Path) -> None:
    for step in range(1, 6):
        write_step(tmp_path, step, to_rows(group()), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004.jsonl", "step_000005.jsonl"]


def test_replay_answers_what_was_recorded(tmp_path: Path) -> None:
    older = group(version=2, text="old")  # carried over from an earlier step: not sampled in this one
    write_step(tmp_path, 4, to_rows(older) + to_rows(group(version=3)), -1)
    engine = ReplayEngine(tmp_path, None)
    engine.turn_to(3)
    requests = make_requests([PROMPT], n=2, step=3, seed=0, max_tokens=4, temperature=1.0)
    assert tuple(engine.generate(requests)) == group(version=3).trajectories
    assert engine.weight_version == 3 and engine.num_unfinished == 0
    with pytest.raises(InputError, match="sample 2 of prompt 7 at step 4"):
        engine.check(make_requests([PROMPT], n=3, step=3, seed=0, max_tokens=4, temperature=1.0))
    changed = Prompt(7, (9,), "other", "7", "arithmetic")
    with pytest.raises(InputError, match="prompt 7"):
        engine.check(make_requests([changed], n=1, step=3, seed=0, max_tokens=4, temperature=1.0))


def test_replay_is_of_the_same_pictures(tmp_path: Path) -> None:
    """Two pictures of the same grid have the same tokens."""
    keys_of_pictures = ("a-2x2", "b-2x2", "a-2x4")
    recorded, other, larger = (
        dataclasses.replace(PROMPT, images=(PromptImage(key, 1, 1),)) for key in keys_of_pictures
    )
    sampled = Trajectory.single_turn(recorded, 0, (5,), (-0.1,), "5", "stop", 0)
    write_step(tmp_path, 1, to_rows(PromptGroup((sampled,), (Score(1.0),))), -1)
    engine = ReplayEngine(tmp_path, None)
    engine.turn_to(0)
    keys: dict[str, Any] = {"n": 1, "step": 0, "seed": 0, "max_tokens": 4, "temperature": 1.0}
    assert engine.generate(make_requests([recorded], **keys)) == [sampled]
    with pytest.raises(InputError, match="picture 1 of prompt 7 at step 1; put its file back as it was when"):
        engine.check(make_requests([other], **keys))
    with pytest.raises(InputError, match="picture 1 of prompt 7 at step 1 in another size: set data.max_pixels as it"):
        engine.check(make_requests([larger], **keys))
    with pytest.raises(InputError, match="has no sample 0 of prompt 7 at step 1"):
        engine.check(make_requests([PROMPT], **keys))


def routed_group(experts: npt.NDArray[Any]) -> PromptGroup:
    plain = group()
    trajectories = tuple(dataclasses.replace(t, routed_experts=experts) for t in plain.trajectories)
    return dataclasses.replace(plain, trajectories=trajectories)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_survive_a_file_exactly(tmp_path: Path, dtype: Any) -> None:
    recorded = routed_group(np.arange(24, dtype=dtype).reshape(4, 2, 3) * 10)
    back = to_group(read_step(write_step(tmp_path, 1, to_rows(recorded), -1).parent, 1))
    assert back == recorded and back.trajectories[0].routed_experts.dtype == dtype  # type: ignore[union-attr]
    assert "routed_experts" not in to_rows(group())[0]


MIXTURE = Mixture(frozenset({0, 2}), num_experts=4, experts_per_token=2, ffn_size=1, normalize_weights=True)
ROUTED = np.array([[[0, 1], [3, 2]]] * 4, np.uint8)


@pytest.mark.parametrize(
    ("experts", "mixture", "fault"),
    [
        (ROUTED, MIXTURE, None),
        (None, MIXTURE, "has no experts of sample 0 of prompt 7 at step 1"),
        (ROUTED, None, "another model's experts"),
        (ROUTED[:, :1], MIXTURE, "another model's experts"),
        (ROUTED + np.uint8(1), MIXTURE, "another model's experts"),  # there is no expert 4
        (ROUTED * np.uint8(0), MIXTURE, "another model's experts"),  # the same one twice
    ],
)
def test_replay_answers_with_the_experts_that_were_recorded(
    tmp_path: Path, experts: npt.NDArray[Any] | None, mixture: Mixture | None, fault: str | None
) -> None:
    recorded = group() if experts is None else routed_group(experts)
    write_step(tmp_path, 1, to_rows(recorded), -1)
    engine = ReplayEngine(tmp_path, mixture)
    engine.turn_to(0)
    keys: dict[str, Any] = {"n": 2, "step": 0, "seed": 0, "max_tokens": 4, "temperature": 1.0}
    assert tuple(engine.generate(make_requests([PROMPT], **keys))) == group().trajectories  # not asked for
    requests = make_requests([PROMPT], **keys, with_routing=True)
    if fault is None:
        assert tuple(engine.generate(requests)) == recorded.trajectories
        return
    with pytest.raises(InputError, match=f"{fault}.*rollout.routing_replay"):
        engine.check(requests)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no step_000001.jsonl"):
        ReplayEngine(tmp_path, None).turn_to(0)
    path = write_step(tmp_path, 1, to_rows(group()), -1)
    path.write_text(path.read_text() + '{"cut": ', encoding="utf-8")
    with pytest.raises(InputError, match=r"step_000001.jsonl:3 is not a recorded rollout"):
        read_step(tmp_path, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-0.5]},
        {"token_ids": [5, 2**40]},
        {"loss_mask": [0, 1], "spans": [], "turns": []},
        {"routed_experts": {"dtype": "uint8", "shape": [4, 2, 3], "data": "AAAA"}},
        {"routed_experts": {"dtype": "uint8", "shape": [3, 1, 1], "data": "AAAA"}},  # of too few tokens
        {"routed_experts": {"dtype": "object", "shape": [4, 1, 1], "data": "AAAAAA=="}},
        {"routed_experts": {"dtype": "uint8", "shape": [4, 1, 1], "data": "!"}},
        {"routed_experts": None},
    ],
)
def test_a_row_that_contradicts_itself_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_step(tmp_path, 1, [{**row, **changes} for row in to_rows(group())], -1)
    with pytest.raises(InputError, match=r"step_000001.jsonl:1 is not a recorded rollout"):
        read_step(tmp_path, 1)
