"""What an agent sends, and what becomes of it in token space."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mega_rl.data.rows.messages import Message
from mega_rl.data.tokens.template import Tools
from mega_rl.errors import InputError
from mega_rl.rollout.collect.records import read_step, to_group
from mega_rl.rollout.collect.replay import ReplayEngine
from mega_rl.rollout.engine import Request
from mega_rl.serving import conversations
from mega_rl.serving.conversations import ConversationRenderer, Conversations, Opening, read_back
from mega_rl.serving.sessions import EndedSessionError, Recorder, Sessions, UnknownSessionError
from mega_rl.types import Prompt, Score, Trajectory
from tests.models.chat_templates import ends_of, tokenizer_of

FAMILY = "qwen2.5"
TOKENIZER = tokenizer_of(FAMILY)
RENDERER = ConversationRenderer(TOKENIZER, ends_of(FAMILY))
USER = {"role": "user", "content": "What is 2 + 2?"}
MORE = {"role": "user", "content": "and 3 + 3?"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def turn(found: Conversations, opening: Opening, text: str, version: int = 0, message: bool = True) -> list[int]:
    """Let the model say it; the tokens that it is given first. Its tokens are one per character."""
    opening.take()
    opening.render(RENDERER)
    ids = [*(TOKENIZER(letter)["input_ids"][0] for letter in text), TOKENIZER.eos_token_id]
    prompt = Prompt(0, tuple(opening.token_ids), "", "", "")
    sampled = Trajectory.single_turn(prompt, 0, ids, [-1.0] * len(ids), text, "stop", version)
    context = opening.token_ids
    found.finish(opening, sampled, read_back(said(text)) if message else None)
    return context


def talk(found: Conversations, messages: list[Message], text: str, tools: Tools = ()) -> list[int]:
    return turn(found, found.open(messages, tools), text)


def test_a_conversation_goes_on_from_the_tokens_that_were_sampled() -> None:
    found = Conversations()
    first = talk(found, [USER], "It is four")
    assert first == TOKENIZER.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    second = talk(found, [USER, said("It is four"), MORE], "six")
    (row,) = found.rows
    ids = [*(TOKENIZER(letter)["input_ids"][0] for letter in "It is four"), TOKENIZER.eos_token_id]
    assert second[: len(first) + len(ids)] == first + ids, "not as the tokenizer would write them"
    whole = TOKENIZER.apply_chat_template([USER, said("It is four"), MORE], add_generation_prompt=True, tokenize=False)
    assert TOKENIZER.decode(second) == whole and second != TOKENIZER(whole)["input_ids"]
    trajectory = row.trajectory(Prompt(5, (), "", "6", "agent"), 2)
    assert [t.role for t in trajectory.turns] == ["prompt", "assistant", "user", "assistant"]
    assert trajectory.prompt.token_ids == tuple(first) and trajectory.num_sampled == len(ids) + 4
    assert TOKENIZER.decode(trajectory.sampled_ids) == "It is four<|im_end|>six<|im_end|>"
    assert np.array_equal(trajectory.logprobs != 0, trajectory.loss_mask)


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([USER, said("It is five"), MORE], ()),
        ([{"role": "user", "content": "What is 2 + 3?"}, said("It is four"), MORE], ()),
        ([USER, said("It is four"), MORE], TOOLS),
        ([USER, said("It is four"), said("or not"), MORE], ()),
        ([MORE], ()),
        ([USER], ()),
    ],
)
def test_what_does_not_go_on_begins_a_row(messages: list[Message], tools: Tools) -> None:
    found = Conversations()
    talk(found, [USER], "It is four")
    context = talk(found, messages, "so", tools)
    rendered = TOKENIZER.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True)["input_ids"]
    assert len(found.rows) == 2 and context == rendered and found.rows[1].num_prompt == len(rendered)


def test_programs_may_write_the_same_messages_otherwise() -> None:
    found = Conversations()
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    opening = found.open([USER], TOOLS)
    opening.take()
    opening.render(RENDERER)
    ids = [7, 8, TOKENIZER.eos_token_id]
    sampled = Trajectory.single_turn(Prompt(0, tuple(opening.token_ids), "", "", ""), 0, ids, [-1.0] * 3, "", "stop", 0)
    found.finish(opening, sampled, read_back({"role": "assistant", "content": None, "tool_calls": [call]}))
    again = {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}
    messages = [USER, {"role": "assistant", "content": " ", "tool_calls": [again]}, {"role": "tool", "content": "3"}]
    talk(found, messages, "three", TOOLS)
    assert len(found.rows) == 1 and [t.role for t in found.rows[0].turns][2] == "tool"


def test_another_turn_of_an_earlier_point_has_its_tokens_but_learns_its_own_alone() -> None:
    found = Conversations()
    talk(found, [USER], "four")
    talk(found, [USER, said("four"), MORE], "six")
    context = talk(found, [USER, said("four"), MORE], "seven")
    first, second = found.rows
    assert context == first.token_ids[: len(context)] and second.num_prompt == len(context)
    assert [t.role for t in second.turns] == ["prompt", "assistant"]
    talk(found, [USER, said("four"), MORE, said("seven"), USER], "again")
    assert len(found.rows) == 2 and len(second.turns) == 4, "which of them goes on is seen by what was said"


def test_two_requests_at_once_do_not_share_a_row() -> None:
    found = Conversations()
    talk(found, [USER], "four")
    one, other = (found.open([USER, said("four"), MORE], ()) for _ in range(2))
    one.take()
    other.take()
    assert one.row is found.rows[0] and other.row is None
    one.leave()
    turn(found, other, "six")
    third = found.open([USER, said("four"), MORE], ())
    third.take()
    assert third.row is found.rows[0], "what was left can go on"


def test_tokens_go_on_from_tokens() -> None:
    found = Conversations()
    turn(found, found.open_tokens([5, 6]), "ab", message=False)
    (row,) = found.rows
    so_far = list(row.token_ids)
    turn(found, found.open_tokens([*so_far, 9, 9]), "c", message=False)
    turn(found, found.open_tokens([5, 6, 7]), "d", message=False)
    assert [[t.role for t in one.turns] for one in found.rows] == [
        ["prompt", "assistant", "user", "assistant"],
        ["prompt", "assistant"],
    ]
    assert row.token_ids[: len(so_far) + 2] == [*so_far, 9, 9]
    turn(found, found.open_tokens(list(row.token_ids)), "e", message=False)
    assert [t.role for t in row.turns][-2:] == ["assistant", "assistant"], "a turn may be gone on with"


def test_a_template_that_changes_earlier_turns_is_refused_unless_history_is_kept() -> None:
    with pytest.raises(InputError, match="is not append-only"):
        ConversationRenderer(tokenizer_of("qwen3"), ends_of("qwen3")).check()
    ConversationRenderer(tokenizer_of("qwen3"), ends_of("qwen3"), "keep").check()


def recorded(tmp_path: Path, step: int) -> tuple[Sessions, Recorder]:
    recorder = Recorder(tmp_path, step)
    return Sessions(TOKENIZER, recorder), recorder


def test_rewarded_sessions_are_rollouts_that_a_run_replays(tmp_path: Path) -> None:
    sessions, recorder = recorded(tmp_path, 3)
    for place in range(2):
        fields = {"session": f"s{place}", "prompt_index": 7, "sample_index": place, "ground_truth": "6"}
        session = sessions.open(fields)
        talk(session.conversations, [USER], "four")
        talk(session.conversations, [USER, said("four"), MORE], "six")
    talk(session.conversations, [MORE], "a second row")
    expected = [row for name in ("s0", "s1") for row in sessions.reward(name, 0.5, {"style": 1.0})]
    assert recorder.path.name == "step_000003.jsonl"
    group = to_group(read_step(tmp_path, 3))
    assert [one.token_ids.tolist() for one in group.trajectories] == [one.token_ids.tolist() for one in expected]
    assert {one.newest_version for one in group.trajectories} == {2}, "step 3 is sampled with the weights of version 2"
    assert group.scores == (Score(0.5, {"style": 1.0}),) * 3
    indices = [one.prompt.index for one in group.trajectories]
    assert indices[:2] == [7, 7] and indices[2] not in (7, 0), "a further row is a prompt of its own"
    assert [one.prompt.extra_info["row"] for one in group.trajectories] == [0, 0, 1]
    engine = ReplayEngine(tmp_path, None)
    engine.turn_to(2)
    requests = [Request(one.prompt, one.sample_index, 0, 99) for one in expected]
    assert [one.token_ids.tolist() for one in engine.generate(requests)] == [one.token_ids.tolist() for one in expected]
    assert (sessions.counts.rewarded, sessions.counts.rows, sessions.counts.turns) == (2, 3, 5)
    assert sessions.counts.rows_begun_anew == 1 and len(json.loads(recorder.path.read_text().split("\n")[0])) > 5
    with pytest.raises(InputError, match="is there already; choose another --record or --step"):
        Recorder(tmp_path, 3)


def test_a_reward_needs_a_turn_and_comes_once(tmp_path: Path) -> None:
    sessions, _ = recorded(tmp_path, 1)
    session = sessions.use("s")
    with pytest.raises(EndedSessionError, match="nothing was sampled"):
        sessions.reward("s", 1.0, {})
    talk(session.conversations, [USER], "four")
    session.num_under_way = 1
    with pytest.raises(EndedSessionError, match="under way"):
        sessions.reward("s", 1.0, {})
    session.num_under_way = 0
    for wrong in ("1", True, float("inf")):
        with pytest.raises(InputError, match="give a finite number"):
            sessions.reward("s", wrong, {})  # type: ignore[arg-type]
    sessions.reward("s", 1.0, {})
    for call in (sessions.find, sessions.use, sessions.drop):
        with pytest.raises(EndedSessionError):
            call("s")
    with pytest.raises(UnknownSessionError):
        sessions.reward("other", 1.0, {})


def test_sessions_are_bounded_and_idle_ones_go(tmp_path: Path) -> None:
    sessions = Sessions(TOKENIZER, Recorder(tmp_path, 1), max_sessions=2, idle_s=0.0)
    for name in ("a", "b"):
        sessions.use(name).num_under_way = 1
    with pytest.raises(InputError, match="2 sessions are open"):
        sessions.use("c")
    sessions.find("a").num_under_way = 0
    sessions.use("c")
    assert sessions.counts.dropped == 1 and len(sessions) == 2
    with pytest.raises(InputError, match="cannot be written down"):
        sessions.open({"ground_truth": "\ud800"})
    with pytest.raises(InputError, match="prompt_index is -1; give 0 or more"):
        sessions.open({"prompt_index": -1})


def test_a_session_keeps_only_so_many_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_ROWS", 2)
    found = Conversations()
    for text in ("one", "two"):
        talk(found, [{"role": "user", "content": text}], "yes")
    sentence = "the session has 2 conversations: give it its reward, or take another name"
    with pytest.raises(InputError, match=sentence):
        found.open([USER], ())
    with pytest.raises(InputError, match=sentence):
        found.open_tokens([1, 2])
