"""Supervised and preference rows with tools: what is rendered, what is learnt, and what is refused by its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.pairs import LabelledDataset, PairDataset
from mega_rl.data.rows.rows import DataFiles, write_jsonl, write_parquet
from mega_rl.data.sets.table import prepare
from mega_rl.errors import InputError
from tests.models.chat_templates import tokenizer_of

RUN = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Runs code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "It."}}},
    },
}
ASKED = {"role": "user", "content": "2 + 2?"}


def calling(arguments: Any, content: str | None = None, name: str = "run", **more: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def answering(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def saying(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TALK = [ASKED, calling({"code": "print(2+2)"}), answering("4"), saying("It is 4.")]
CALL = '\n<tool_call>\n{"name": "run", "arguments": {"code": "print(2+2)"}}\n</tool_call><|im_end|>'
# In the form of ReTool's set: one text in which code and what the interpreter answers stand.
ONE_TEXT = (
    "I run it.\n<code>\n```python\nprint(2+2)\n```\n</code>\n<interpreter>\n4\n</interpreter>\n\n"
    "Again:\n<code>\n```python\nprint(4)\n```\n</code>\n<interpreter>\n4\n</interpreter>\n\n<answer>It is 4.</answer>"
)
RETOOL = {"messages": [{"role": "user", "content": "Use code.\n\n*user question:*\n2 + 2?"}, saying(ONE_TEXT)]}


def read(tmp_path: Path, *rows: Any, family: str = "qwen2.5", **data: Any) -> list[tuple[str, list[str]]]:
    """Of every sequence: its text, and the runs of it that are learnt from."""
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, list(rows))
    return parts(
        ConversationDataset.from_files(DataFiles([str(path)]), tokenizer_of(family), DataConfig(**data)), family
    )


def parts(dataset: ConversationDataset, family: str) -> list[tuple[str, list[str]]]:
    found = []
    for item in dataset.sequences:
        runs: list[list[int]] = [[]]
        for token, is_learnt in zip(item.token_ids[1:].tolist(), item.loss_mask.tolist(), strict=True):
            if is_learnt:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        decode = tokenizer_of(family).decode
        found.append((decode(item.token_ids), [decode(run) for run in runs if run]))
    return found


@pytest.mark.parametrize("tools", [[RUN], json.dumps([RUN]), [json.dumps(RUN)]], ids=["objects", "text", "texts"])
def test_calls_are_learnt_and_answers_of_tools_are_not(tmp_path: Path, tools: Any) -> None:
    ((text, learnt),) = read(tmp_path, {"messages": TALK, "tools": tools})
    assert learnt == [CALL, "\nIt is 4.<|im_end|>"] or learnt == [CALL.lstrip("\n"), "It is 4.<|im_end|>"]
    assert '"description": "Runs code."' in text and "<tool_response>\n4\n</tool_response>" in text
    as_text = [ASKED, calling('{"code": "print(2+2)"}', ""), *TALK[2:]]
    assert read(tmp_path, {"messages": as_text, "tools": tools}) == [(text, learnt)], "arguments as JSON text"
    flat = [ASKED, saying("", tool_calls=[TALK[1]["tool_calls"][0]["function"]]), *TALK[2:]]
    assert read(tmp_path, {"messages": flat, "tools": tools}) == [(text, learnt)]
    sharegpt = [("human", ASKED["content"]), ("function_call", json.dumps(flat[1]["tool_calls"][0]))]
    turns = [{"from": who, "value": said} for who, said in [*sharegpt, ("observation", "4"), ("gpt", "It is 4.")]]
    assert read(tmp_path, {"conversations": turns, "tools": tools}) == [(text, learnt)], "as LLaMA-Factory has them"


def test_a_turn_of_sharegpt_keeps_its_calls_its_thought_and_its_loss(tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    talk = [ASKED, calling({"code": "1"}, "Let me:", loss=0), answering("4"), saying("4.", reasoning_content="four")]
    turns = [{**message, "from": names[message["role"]], "value": message["content"]} for message in talk]
    turns = [{key: value for key, value in turn.items() if key not in ("role", "content")} for turn in turns]
    how: dict[str, Any] = {"family": "qwen3", "rewritten_history": "split"}
    expected = read(tmp_path, {"messages": talk, "tools": [RUN]}, **how)
    ((text, learnt),) = expected  # nothing of the first answer is learnt from
    assert "Let me:" in text and "<tool_call>" in text and learnt == ["<think>\nfour\n</think>\n\n4.<|im_end|>"]
    assert read(tmp_path, {"conversations": turns, "tools": [RUN]}, **how) == expected
    turns[1] |= {"from": "function_call", "value": ""}
    ((text, learnt),) = read(tmp_path, {"conversations": turns, "tools": [RUN]}, **how)
    assert '"name": "run"' in text and "Let me" not in text and len(learnt) == 1


def test_keys_that_parquet_fills_with_nulls_are_left_out(tmp_path: Path) -> None:
    """The union of all arguments and of all schemas is the type of their columns."""
    other = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"page": {"type": "x"}}}}}
    rows = [
        {"messages": TALK, "tools": [RUN]},
        {"messages": [ASKED, calling({"page": 3}, name="look"), answering("4"), saying("4.")], "tools": [other]},
    ]
    path = tmp_path / "rows.parquet"
    write_parquet(path, rows)
    call = read_back(path)[1]["messages"][1]["tool_calls"][0]["function"]
    assert call["arguments"] == {"code": None, "page": 3}, "what is tried here"
    found = parts(
        ConversationDataset.from_files(DataFiles([str(path)]), tokenizer_of("qwen2.5"), DataConfig()), "qwen2.5"
    )
    assert found == read(tmp_path, *rows)
    assert "null" not in found[0][0] + found[1][0] and "page" not in found[0][0]


def read_back(path: Path) -> list[dict[str, Any]]:
    return list(pyarrow.parquet.read_table(path).to_pylist())


@pytest.mark.parametrize("key", ["loss", "step_loss_mask", "weight"])
def test_a_message_says_whether_it_is_learnt_from(tmp_path: Path, key: str) -> None:
    talk = [ASKED, calling({"code": "1"}, **{key: 0}), answering("4"), saying("It is 4.", **{key: 1})]
    ((_, learnt),) = read(tmp_path, {"messages": talk, "tools": [RUN]}, system_prompt="Be brief.")
    assert [run.strip() for run in learnt] == ["It is 4.<|im_end|>"]
    with pytest.raises(InputError, match=f"line 1: a message has the {key} 2: give 0 or 1"):
        read(tmp_path, {"messages": [ASKED, saying("4", **{key: 2})]})
    with pytest.raises(InputError, match="line 1: nothing of the conversation is learnt from: see its loss, step"):
        read(tmp_path, {"messages": [ASKED, saying("4", **{key: False})]})


def test_spans_of_a_message_are_not_learnt_from(tmp_path: Path) -> None:
    """The set of ReTool as it is published: what the interpreter wrote is context."""
    spans = [["<interpreter>", "</interpreter>"]]
    ((text, learnt),) = read(tmp_path, RETOOL, mask_spans=spans)
    assert text.count("<interpreter>") == 2 and not any("interpreter" in run for run in learnt)
    first, second, last = learnt
    assert first.strip().startswith("I run it.") and first.endswith("</code>\n") and "print(4)" in second
    assert last == "\n\n<answer>It is 4.</answer><|im_end|>"
    ((_, whole),) = read(tmp_path, RETOOL)
    assert len(whole) == 1, "without the key all of it is learnt"
    open_end = {"messages": [ASKED, saying("a <interpreter> b")]}
    assert [run.strip() for run in read(tmp_path, open_end, mask_spans=spans)[0][1]] == ["a"], "to the end, and its end"
    plain = ConversationDataset.from_files(
        DataFiles([str(tmp_path / "rows.jsonl")]),
        tokenizer_of("vicuna"),
        DataConfig(chat_template="never", mask_spans=spans),
    )
    assert parts(plain, "vicuna")[0][1] == ["a ", "</s>"] or parts(plain, "vicuna")[0][1] == ["a "]


def test_the_set_of_retool_becomes_turns(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "rows.jsonl",
        [
            RETOOL,
            {"messages": [{"role": "user", "content": "x"}, saying("<code>1</code> and on")]},
            {"messages": [ASKED, saying("<code>1</code><interpreter>1</interpreter>")]},
            {"messages": [saying("x")]},
        ],
    )
    prepared = prepare("retool", [tmp_path / "rows.jsonl"], num_validation=0)
    (row,) = prepared.files["train.jsonl"]
    assert [message["role"] for message in row["messages"]] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert [message["content"] for message in row["messages"]] == [
        "2 + 2?",
        "I run it.",
        "4",
        "Again:",
        "4",
        "It is 4.",
    ]
    assert row["messages"][3]["tool_calls"][0]["function"]["arguments"] == {"code": "print(4)"}
    reasons = [line.split("dropped: ")[1].partition(";")[0] for line in prepared.lines if "dropped" in line]
    assert reasons == [
        "code that no answer of the interpreter follows, or an answer without code",
        "without a text after the last code",
        "not one message of the user and one of the assistant",
    ]
    ((text, learnt),) = read(tmp_path, row)
    assert "code_interpreter" in text and [run.strip()[:5] for run in learnt] == ["I run", "Again", "It is"]


THINKING = [
    ASKED,
    saying("<think>\nfour\n</think>\n\nIt is 4."),
    {"role": "user", "content": "Sure?"},
    saying("<think>\nyes\n</think>\n\nYes."),
]


def test_templates_that_leave_out_earlier_thoughts(tmp_path: Path) -> None:
    row = {"messages": THINKING}
    with pytest.raises(
        InputError, match="line 1: .* rewrites what stands before message 4; set data.rewritten_history"
    ):
        read(tmp_path, row, family="qwen3")
    thoughts = ["<think>\nfour\n</think>\n\nIt is 4.<|im_end|>", "<think>\nyes\n</think>\n\nYes.<|im_end|>"]
    first, second = read(tmp_path, row, family="qwen3", rewritten_history="split")
    assert (first[1], second[1]) == (thoughts[:1], thoughts[1:]), "each in its own context"
    asked, sure = "<|im_start|>user\n2 + 2?<|im_end|>\n", "<|im_start|>user\nSure?<|im_end|>\n"
    assert second[0] == f"{asked}<|im_start|>assistant\nIt is 4.<|im_end|>\n{sure}<|im_start|>assistant\n{thoughts[1]}"
    ((text, learnt),) = read(tmp_path, row, family="qwen3", rewritten_history="keep")
    assert learnt == thoughts
    assert text == "".join(
        [asked, f"<|im_start|>assistant\n{thoughts[0]}\n", sure, f"<|im_start|>assistant\n{thoughts[1]}"]
    )
    tool_use = [ASKED, calling({"code": "1"}, "<think>\nrun\n</think>\n\n"), answering("4"), THINKING[3]]
    together = read(tmp_path, {"messages": tool_use}, family="qwen3", rewritten_history="split")
    assert len(together) == 1 and len(together[0][1]) == 2, "turns that the template keeps stay in one row"


def test_thoughts_in_a_key_of_their_own(tmp_path: Path) -> None:
    row = {"messages": [ASKED, saying("It is 4.", reasoning_content="four")]}
    assert read(tmp_path, row, family="qwen3")[0][1] == ["<think>\nfour\n</think>\n\nIt is 4.<|im_end|>"]
    with pytest.raises(InputError, match="line 1: the tokenizer's chat template does not write reasoning_content"):
        read(tmp_path, row)


@pytest.mark.parametrize(
    ("row", "family", "words"),
    [
        ({"messages": TALK, "tools": "{"}, "qwen2.5", "line 1: tools is '{': give a list of objects"),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "qwen2.5", "give every tool a function with a name"),
        ({"messages": TALK, "tools": [RUN]}, "chatml", "chat template does not write tools"),
        ({"messages": TALK}, "gemma", "chat template does not write tool_calls"),
        ({"messages": [ASKED, ASKED, saying("4")]}, "gemma", "chat template refuses the messages (roles take turns)"),
        ({"messages": TALK}, "phi", "chat template does not write tool_calls"),
        ({"messages": [ASKED, calling({}, "Now:")]}, "mistral", "does not write content beside tool_calls"),
        ({"messages": [ASKED, calling("{1")]}, "qwen2.5", "the call of 'run' has the arguments '{1': give an object"),
        (
            {"messages": [ASKED, saying("", tool_calls=[{"function": {}}])]},
            "qwen2.5",
            "give every call a function with",
        ),
        (
            {"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": ""}]},
            "qwen2.5",
            "line 1 has the turn {'from': 'function_call', 'value': ''}: give its calls in value, and only there",
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"name": "a"}', "tool_calls": [{"name": "b"}]}]},
            "qwen2.5",
            "give its calls in value, and only there",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None, "function_call": {"name": "run"}}]},
            "qwen2.5",
            "a chat message has function_call, which is not read: write it as tool_calls, its newer form",
        ),
        ({"messages": [ASKED, saying("4", thinking="hm")]}, "qwen3", "has thinking, which is not read: name it reas"),
        (
            {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "4", "reasoning": "hm"}]},
            "qwen3",
            "has reasoning, which is not read: name it reasoning_content",
        ),
        ({"messages": [{**calling({}), "role": "user"}, saying("4")]}, "qwen2.5", "only the assistant calls tools"),
        ({"messages": [ASKED, saying("4", tool_call_id=3)]}, "qwen2.5", "the tool_call_id 3: make it text"),
        (
            {"messages": [ASKED, saying("4", loss=1, step_loss_mask=0)]},
            "qwen2.5",
            "loss and step_loss_mask that differ",
        ),
        ({"messages": [{**ASKED, "loss": True}, saying("4")]}, "qwen2.5", "a message of 'user' has loss 1"),
        ({"messages": [ASKED, saying("4", loss="no")]}, "qwen2.5", "a message has the loss 'no'"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "qwen2.5", "needs role and content, both text"),
    ],
)
def test_rows_that_cannot_be_learnt_from(tmp_path: Path, row: dict[str, Any], family: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, row, family=family)
    assert words in str(caught.value) and "rows.jsonl line 1" in str(caught.value) and "\n" not in str(caught.value)


def test_keys_that_are_not_read_may_be_null(tmp_path: Path) -> None:
    nulls = {"function_call": {"name": None, "arguments": None}, "thinking": None, "reasoning": ""}
    assert read(tmp_path, {"messages": [ASKED, saying("4", **nulls)]}) == read(
        tmp_path, {"messages": [ASKED, saying("4")]}
    )
    path = tmp_path / "pairs.jsonl"
    write_jsonl(path, [{"prompt": "?", "chosen": saying("4", thinking="hm"), "rejected": saying("5")}])
    with pytest.raises(InputError, match="line 1: chosen: a chat message has thinking, which is not read: name it"):
        PairDataset.from_files(DataFiles([str(path)]), tokenizer_of("qwen2.5"), DataConfig())


def test_tools_need_a_template(tmp_path: Path) -> None:
    for row in ({"messages": TALK[:2]}, {"messages": [ASKED, saying("4")], "tools": [RUN]}):
        with pytest.raises(InputError, match="line 1: tools and their calls need a chat template"):
            read(tmp_path, row, chat_template="never")


def test_preferences_between_calls(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good, bad = calling({"code": "print(2+2)"}), calling({"code": "print(22)"})
    row = {"prompt": [ASKED], "chosen": good, "rejected": [bad], "tools": [RUN]}
    after = {"prompt": TALK[:3], "chosen": "It is 4.", "rejected": "It is 22.", "tools": json.dumps([RUN])}
    write_jsonl(path, [row, after])
    first, second = PairDataset.from_files(DataFiles([str(path)]), tokenizer_of("qwen2.5"), DataConfig()).items
    judged = [
        {"messages": [ASKED, good], "kto_tag": True, "tools": [RUN]},
        {"prompt": TALK[:3], "completion": "It is 4.", "label": False, "tools": [RUN]},
    ]
    write_jsonl(path, judged)
    answers = [
        one.answer
        for one in LabelledDataset.from_files(DataFiles([str(path)]), tokenizer_of("qwen2.5"), DataConfig()).items
    ]
    write_jsonl(path, [{"messages": messages, "tools": [RUN]} for messages in (TALK[:2], [*TALK[:2], *TALK[2:]])])
    expected = ConversationDataset.from_files(DataFiles([str(path)]), tokenizer_of("qwen2.5"), DataConfig()).sequences
    decode = tokenizer_of("qwen2.5").decode
    for own in (first.chosen, answers[0]):
        assert own.token_ids.tolist() == expected[0].token_ids.tolist()
        assert own.loss_mask.tolist() == expected[0].loss_mask.tolist()
    for own in (second.chosen, answers[1]):
        assert decode(own.token_ids) == decode(expected[1].token_ids)
    assert "print(22)" in decode(first.rejected.token_ids)
    write_jsonl(path, [row | {"rejected": {**bad, "loss": 0}}])
    with pytest.raises(InputError, match="line 1 has an answer with loss, but an answer is judged as a whole"):
        PairDataset.from_files(DataFiles([str(path)]), tokenizer_of("qwen2.5"), DataConfig())
    write_jsonl(path, [row])
    with pytest.raises(InputError, match="line 1: tools and their calls need a chat template"):
        PairDataset.from_files(DataFiles([str(path)]), tokenizer_of("qwen2.5"), DataConfig(chat_template="never"))
