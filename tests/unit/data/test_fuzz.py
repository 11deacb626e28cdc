"""Whatever stands in a data file, it is read or refused in a sentence, soon."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, strategies as st
from transformers import PreTrainedTokenizerFast

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.pairs import LabelledDataset, PairDataset
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.rows.rows import DataFiles, read_rows
from mega_rl.data.tokens import tokenizer
from mega_rl.errors import InputError
from mega_rl.microbatch import Sequence
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer, bpe_tokenizer
from tests.fuzzing import TEXTS, VALUES, accepted_or_sentence, cases
from tests.models.chat_templates import tokenizer_of

TOKENIZERS = (
    arithmetic_tokenizer(),
    bpe_tokenizer(["Hi there", "user", "assistant", "system"], 300),
    tokenizer_of("qwen3"),
    tokenizer_of("mistral"),
)
FIELDS = st.sampled_from(
    ["prompt", "answer", "response", "messages", "reward_model", "extra_info", "data_source", "ground_truth", "x"]
    + ["chosen", "rejected", "conversations", "label", "margin", "completion", "system", "tools"]
)
ARGUMENTS = st.sampled_from(['{"a": 1}', '{"a": ', "[]", "null", '"\\\\ud800"', "[" * 5000]) | VALUES
FUNCTIONS = st.fixed_dictionaries({"name": TEXTS | VALUES, "arguments": ARGUMENTS})
CALLS = st.lists(
    st.fixed_dictionaries({"function": FUNCTIONS | VALUES}, optional={"id": VALUES}) | FUNCTIONS, max_size=2
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | VALUES, "content": TEXTS | VALUES},
        optional={
            "name": VALUES,
            "tool_calls": CALLS | VALUES,
            "tool_call_id": VALUES,
            "reasoning_content": TEXTS | VALUES,
            "loss": VALUES,
            "step_loss_mask": st.sampled_from([0, 1]) | VALUES,
        },
    ),
    max_size=4,
)
TOOLS = st.lists(st.fixed_dictionaries({"type": TEXTS, "function": FUNCTIONS | VALUES}) | VALUES, max_size=2)
ROWS = st.dictionaries(
    FIELDS, VALUES | MESSAGES | TOOLS | TEXTS | st.fixed_dictionaries({"ground_truth": VALUES}), max_size=5
)
TALKS = st.fixed_dictionaries({"messages": MESSAGES}, optional={"tools": TOOLS | ARGUMENTS})


DATASETS = (PromptDataset, ConversationDataset, PairDataset, LabelledDataset)
NUMBERS = st.text("0123456789", min_size=1, max_size=8)  # every tokenizer has them as they are
# What may stand in a column that means nothing: half a surrogate pair, which VALUES has too, is refused everywhere.
UNREAD = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | NUMBERS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NUMBERS, inner, max_size=2),
    max_leaves=4,
)


def asked(text: str) -> st.SearchStrategy[dict[str, Any]]:
    """A prompt, in any of the columns that hold one."""
    messages = [{"role": "user", "content": text}]
    return st.sampled_from([{"prompt": text}, {"question": text}, {"prompt": messages}, {"instruction": text}])


@st.composite
def right_rows(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """What the rows of a file are, and two or three rows that are just that, with columns that mean nothing."""
    kind = draw(st.sampled_from(["answered", "talk", "pair", "judged"]))
    rows: list[dict[str, Any]] = []
    for place in range(draw(st.integers(2, 3))):
        prompt = f"{draw(NUMBERS)}{place}"  # no two rows have the same
        row = draw(asked(prompt)) | draw(st.dictionaries(st.sampled_from(["x", "index"]), UNREAD))
        if kind == "answered":
            row[draw(st.sampled_from(["answer", "response", "solution"]))] = draw(NUMBERS)
        elif kind == "talk":
            turns = [{"role": "user", "content": draw(NUMBERS)}, {"role": "assistant", "content": draw(NUMBERS)}]
            row = {"messages": turns}
        elif kind == "pair":
            answers = draw(st.lists(NUMBERS, min_size=2, max_size=2, unique=True))
            row |= dict(zip(("chosen", "rejected"), answers, strict=True))
        else:
            row |= {"completion": draw(NUMBERS), "label": draw(st.booleans())}
        rows.append(row)
    return kind, rows


def learnt(sequence: Sequence, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text that is learnt, without the marks that a template puts around an answer."""
    kept = [int(token) for token, mask in zip(sequence.token_ids[1:], sequence.loss_mask, strict=True) if mask]
    return str(tokenizer.decode(kept, skip_special_tokens=True)).replace("<think>\n\n</think>\n\n", "").strip()


def answer_of(row: dict[str, Any]) -> Any:
    return next(row[name] for name in ("answer", "solution", "response") if name in row)


def check_right(kind: str, rows: list[dict[str, Any]], dataset: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Every row is there, in its order, and says what it said in the file."""
    assert len(dataset) == len(rows) and dataset.num_dropped == 0
    if isinstance(dataset, PromptDataset):
        for row, prompt in zip(rows, dataset.prompts, strict=True):
            text = next(row[name] for name in ("prompt", "question", "instruction") if name in row)
            assert (text if isinstance(text, str) else text[0]["content"]) in prompt.text
            assert prompt.ground_truth == answer_of(row)
        return
    for row, item in zip(rows, (dataset[place] for place in range(len(rows))), strict=True):
        if kind == "pair":
            assert [learnt(s, tokenizer) for s in item.sequences] == [row["chosen"], row["rejected"]]
        elif kind == "judged":
            assert learnt(item.answer, tokenizer) == row["completion"] and item.is_good == row["label"]
        else:
            answer = row["messages"][1]["content"] if kind == "talk" else answer_of(row)
            assert learnt(item, tokenizer) == answer


KINDS = {"answered": DATASETS[:2], "talk": DATASETS[1:2], "pair": DATASETS[2:3], "judged": DATASETS[3:]}


def outcomes(path: Path, tokenizer: PreTrainedTokenizerFast, does_filter: bool) -> dict[type, Any]:
    """What each kind of data set makes of a file; None where it refuses it."""
    data = DataConfig(
        max_prompt_length=64,
        max_response_length=64,
        filter_overlong_prompts=does_filter,
        mask_spans=[["a", "e"], ["\\0", "("]],
        rewritten_history="keep" if does_filter else "split",
    )
    return {
        dataset: accepted_or_sentence(lambda kind=dataset: kind.from_files(DataFiles([str(path)]), tokenizer, data))
        for dataset in DATASETS
    }


@cases(120)
@given(st.lists(ROWS | TALKS, min_size=1, max_size=3), st.sampled_from(TOKENIZERS), st.booleans())
def test_rows_of_json(
    tmp_path: Path, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, does_filter: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcomes(path, tokenizer, does_filter)


def test_right_rows_of_json_and_those_with_a_change(tmp_path: Path) -> None:
    """Right rows are accepted and say what they said; with one value changed, no row is lost without a word."""
    path, tally = tmp_path / "rows.jsonl", Counter[tuple[str, str]]()

    @cases(150)
    @given(
        right_rows(),
        st.none() | st.tuples(st.integers(0, 1), st.integers(0, 9), VALUES | MESSAGES),
        st.sampled_from(TOKENIZERS),
        st.booleans(),
    )
    def check(
        given_rows: tuple[str, list[dict[str, Any]]],
        change: tuple[int, int, Any] | None,
        tokenizer: PreTrainedTokenizerFast,
        does_filter: bool,
    ) -> None:
        kind, rows = given_rows
        if change is not None:
            place, column, value = change
            names = sorted(rows[place])
            rows[place] = rows[place] | {names[column % len(names)]: value}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for dataset, found in outcomes(path, tokenizer, does_filter).items():
            tally[dataset.__name__, "refused" if found is None else "accepted"] += 1
            assert (
                found is None or isinstance(found, ConversationDataset) or len(found) + found.num_dropped == len(rows)
            )
            if change is None and dataset in KINDS[kind]:
                assert found is not None, f"{dataset.__name__} refused {rows}"
                check_right(kind, rows, found, tokenizer)

    check()
    wanted = {(dataset.__name__, answer) for dataset in DATASETS for answer in ("accepted", "refused")}
    assert wanted <= tally.keys(), tally


@cases(120)
@given(st.binary(max_size=40), st.integers(0, 60), st.integers(0, 60))
def test_lines_with_bytes_changed(tmp_path: Path, noise: bytes, start: int, end: int) -> None:
    path = tmp_path / "rows.jsonl"
    good = b'{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'
    path.write_bytes(good[:start] + noise + good[end:])
    outcomes(path, TOKENIZERS[0], True)


@cases(60)
@given(st.data())
def test_parquet_with_bytes_changed(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "rows.parquet"
    rows = [
        {"prompt": [{"role": "user", "content": "é+1="}], "answer": "2", "extra_info": {"index": i}} for i in (1, 2)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="none")
    whole = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[place] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(whole))
    outcomes(path, TOKENIZERS[0], True)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1 is no JSON"),
        (b'{"a": ' + b'{"b": ' * 100 + b"1" + b"}" * 101, "line 1 is nested more than 64 deep"),
        (b'{"prompt": "\\ud800", "answer": "1"}', "line 1 has half of a character"),
        (b'{"prompt": "1", "answer": "\\uDC00"}', "line 1 has half of a character"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "line 1 is no JSON"),
    ],
)
def test_a_line_that_nothing_could_take(tmp_path: Path, line: bytes, part: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line)
    with pytest.raises(InputError) as caught:
        read_rows([str(path)], "data.train_files")
    assert part in str(caught.value) and len(str(caught.value)) < 500


def test_both_halves_of_a_character_are_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "😀"}))
    assert "\\ud83d" in path.read_text()
    (row,) = read_rows([str(path)], "data.train_files")
    assert row.get("prompt") == "😀"


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([2**31 - 1], pyarrow.int32()).cast(pyarrow.date32()),
        pyarrow.StringArray.from_buffers(
            1, pyarrow.array([0, 1], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xff")
        ),
    ],
)
def test_parquet_values_that_python_has_not(tmp_path: Path, column: pyarrow.Array) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), path)
    with pytest.raises(InputError, match="is truncated or no parquet file"):
        read_rows([str(path)], "data.train_files")


@pytest.mark.parametrize("dataset", [PromptDataset, ConversationDataset])
def test_a_text_of_ten_megabytes_is_not_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: type[PromptDataset | ConversationDataset]
) -> None:
    path, encode = tmp_path / "rows.jsonl", tokenizer.encode
    path.write_text(json.dumps({"prompt": "1" * 10_000_000, "answer": "2"}) + '\n{"prompt": "1+1=", "answer": "2"}\n')
    found = dataset.from_files(DataFiles([str(path)]), TOKENIZERS[0], DataConfig(max_prompt_length=512))
    assert len(found) == 1 and found.num_dropped == 1
    # So many tokens would take ten million characters; the first of them tell that it has more.
    encoded: list[int] = []

    def counting(of: PreTrainedTokenizerFast, text: str, **options: bool) -> list[int]:
        encoded.append(len(text))
        return encode(of, text, **options)

    monkeypatch.setattr(tokenizer, "encode", counting)
    found = dataset.from_files(
        DataFiles([str(path)]), TOKENIZERS[0], DataConfig(max_prompt_length=40_000, max_response_length=1)
    )
    assert len(found) == 1 and found.num_dropped == 1 and max(encoded) < 1_000_000
    with pytest.raises(InputError, match=r"line 1 has .*1000000\d characters.*data.filter_overlong_prompts"):
        dataset.from_files(DataFiles([str(path)]), TOKENIZERS[0], DataConfig(filter_overlong_prompts=False))


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
TEMPLATES = {
    "{% for a in range(10 ** 9) %}x{% endfor %}": "Range too big",
    ENDLESS: "takes more than 2000000 steps for one row",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}": "refuses the messages",
    "{{ 'x' * 10 ** 18 }}": "refuses the messages",
    "{{ messages[9].content }}": "refuses the messages",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_does_not_end(template: str) -> None:
    """It is a program that comes with a model."""
    hostile = bpe_tokenizer(["Hi"], 300)
    hostile.chat_template = template
    with pytest.raises(InputError, match=TEMPLATES[template]) as caught:
        tokenizer.render_prompt(hostile, "Hi")
    assert len(str(caught.value)) < 500 and "chat template" in str(caught.value)


def test_a_pipe_beside_a_tokenizer_is_not_opened(tmp_path: Path) -> None:
    bpe_tokenizer(["Hi"], 300).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(InputError, match="has chat_template.jinja, which is no regular file: copy the model again"):
        tokenizer.load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_data_that_is_no_file_is_not_opened(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    os.mkfifo(path)
    with pytest.raises(InputError, match="is no file"):
        read_rows([str(path)], "data.train_files")
