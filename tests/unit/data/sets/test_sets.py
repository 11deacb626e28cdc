"""Published sets, in the columns in which they are published: what becomes of every row, and that none gets lost."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mega_rl.data.rows.columns import prompt_of, truth_of
from mega_rl.data.rows.rows import Row, read_rows, write_jsonl, write_parquet
from mega_rl.data.sets.problems import DAPO_AFTER, DAPO_BEFORE
from mega_rl.data.sets.table import SETS, Prepared, prepare, write
from mega_rl.errors import InputError

Record = Mapping[str, Any]
USER = {"role": "user", "content": "Why?"}
RIGHT, WRONG = {"role": "assistant", "content": "So."}, {"role": "assistant", "content": "No."}
PAIR = {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}


def file(path: Path, rows: Sequence[Record]) -> Path:
    """A data file of the kind that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        (write_parquet if path.suffix == ".parquet" else write_jsonl)(path, [dict(row) for row in rows])
    return path


def only(tmp_path: Path, name: str, *rows: Record) -> list[dict[str, Any]]:
    """What these rows of a set become, none of them held out."""
    prepared = prepare(name, [file(tmp_path / "rows.jsonl", rows)], num_validation=0)
    (made,) = prepared.files.values()
    return made


def dropped(tmp_path: Path, name: str, good: Record, *bad: Record) -> list[str]:
    """The reasons for which these rows are left out beside a good one, with every row accounted for."""
    prepared = prepare(name, [file(tmp_path / "rows.jsonl", [good, *bad])], num_validation=0)
    assert f"train: {1 + len(bad)} rows read, 1 kept" in prepared.lines
    found = [
        re.fullmatch(r"  (\d+) dropped: (.+); the first is .*rows.jsonl line (\d+)", line) for line in prepared.lines
    ]
    matches = [match for match in found if match]
    assert sum(int(match[1]) for match in matches) == len(bad) and all(int(match[3]) > 1 for match in matches)
    return [match[2] for match in matches]


# --- problems


def dapo_row(problem: str, truth: str) -> Record:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{DAPO_BEFORE}{problem}{DAPO_AFTER}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }


def test_dapo_is_deduplicated_against_itself_and_aime(tmp_path: Path) -> None:
    rows = [dapo_row("What is 1+1?", "2"), dapo_row("What is 2+2?", "4"), dapo_row("What is x?", "7")] * 100
    train = file(tmp_path / "dapo-math-17k.parquet", [*rows, dapo_row("What is y?", "1"), dapo_row("What is  Y?", "3")])
    aime = file(tmp_path / "aime.parquet", [{"id": 60, "problem": "What is x?", "solution": "", "answer": "7"}] * 2)
    prepared = prepare("dapo", [train], [aime])
    written = write(prepared, tmp_path / "out")
    assert [path.name for path in written] == ["train.parquet", "test.parquet"]
    kept, held = (read_rows([str(path)], "k") for path in written)
    assert [row.fields["reward_model"]["ground_truth"] for row in kept] == ["2", "4"]
    assert held[0].fields["prompt"] == dapo_row("What is x?", "7")["prompt"]
    assert (held[0].fields["data_source"], held[0].fields["extra_info"]) == ("aime_2024", {"split": "test", "index": 0})
    text = "\n".join(prepared.lines)
    assert "train: 302 rows read, 2 kept" in text and "validation: 2 rows read, 1 kept" in text
    assert f"297 dropped: duplicate; the first is {train} row 4" in text
    assert f"2 dropped: the same as another row, but for the answer; the first is {train} row 302" in text
    assert f"1 dropped: its problem is in the validation data too; the first is {train} row 3" in text
    assert "columns that are not used: id" in text
    with pytest.raises(InputError, match=r"1 rows of the training data have a problem .* row 3: .*--refuse-overlap"):
        prepare("dapo", [train], [aime], refuse_overlap=True)
    in_its_columns = file(tmp_path / "aime-2024.parquet", [dapo_row("What is z?", "7")])
    test = prepare("dapo", [train], [in_its_columns]).files["test.parquet"]
    assert [row["data_source"] for row in test] == ["aime_2024"]


def test_math_of_one_file_per_problem_and_of_tables(tmp_path: Path) -> None:
    source = tmp_path / "MATH"
    right = {
        "problem": "1+1?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": r"\boxed{3}, no \boxed{\frac{4}{2}}.",
    }
    unboxed = {"problem": "Prove.", "level": "Level 5", "type": "Algebra", "solution": "Trivial."}
    held = {"problem": "Area?", "level": "Level 2", "type": "Geometry", "solution": r"It is \boxed{5}"}
    rows = {"train/algebra/1.json": right, "train/algebra/2.json": unboxed, "test/geometry/1.json": held}
    for name, row in rows.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(json.dumps(row))
    prepared = prepare("math", [source])
    (train,), (test,) = prepared.files["train.parquet"], prepared.files["test.parquet"]
    assert train["reward_model"]["ground_truth"] == r"\frac{4}{2}" and test["reward_model"]["ground_truth"] == "5"
    assert train["extra_info"] == {"split": "train", "index": 0, "level": "Level 1", "type": "Algebra"}
    assert train["prompt"][0]["content"].startswith("1+1? Let's think") and r"\boxed{}" in train["prompt"][0]["content"]
    another = prepare("math", [source], [source / "test" / "geometry" / "1.json"])
    assert another.files == prepared.files and "geometry" in another.lines[0]  # not trained on
    assert any("1 dropped: without answer" in line and "2.json row 1" in line for line in prepared.lines)
    table = tmp_path / "data"
    file(table / "train-00000-of-00001.parquet", [rows["train/algebra/1.json"]])
    file(
        table / "test-00000-of-00001.parquet", [{"problem": "Area?", "answer": "5", "subject": "Geometry", "level": 2}]
    )
    other = prepare("math", [table]).files
    assert other["train.parquet"] == [train]
    assert other["test.parquet"][0]["extra_info"] == {"split": "test", "index": 0, "level": "2", "type": "Geometry"}


def test_gsm8k_rows_that_cannot_be_used(tmp_path: Path) -> None:
    good = {"question": "How many?", "answer": "12*100\n#### 1,200"}
    bad = [good | {"question": "When?", "answer": "7"}, good | {"question": " "}, {**good, "question": "how  many?"}]
    assert dropped(tmp_path, "gsm8k", good, *bad) == ["without answer", "empty", "duplicate"]
    assert only(tmp_path, "gsm8k", good)[0]["reward_model"] == {"style": "rule", "ground_truth": "1200"}


# --- conversations


def test_alpaca_becomes_messages(tmp_path: Path) -> None:
    row = {"instruction": "Sum.", "input": "1 2", "output": "3", "text": "Below is an instruction"}
    more = {
        "instruction": "And?",
        "input": "",
        "output": "5",
        "system": "Brief.",
        "history": [["1?", "2"], ["3?", "4"]],
    }
    first, second = (made["messages"] for made in only(tmp_path, "alpaca", row, more))
    assert [message["content"] for message in first] == ["Sum.\n1 2", "3"]
    assert [message["content"] for message in second] == ["Brief.", "1?", "2", "3?", "4", "And?", "5"]
    assert [message["role"] for message in second] == ["system", *["user", "assistant"] * 3]
    assert dropped(tmp_path, "alpaca", row, row, row | {"output": " "}) == ["duplicate", "empty"]


def test_sharegpt_becomes_messages(tmp_path: Path) -> None:
    def row(*turns: tuple[str, str], **more: Any) -> Record:
        return {"conversations": [{"from": who, "value": said} for who, said in turns], **more}

    good = row(("human", "Why?"), ("gpt", "So."), system="Brief.")
    assert only(tmp_path, "sharegpt", good, {"messages": [USER, WRONG]}) == [
        {"messages": [{"role": "system", "content": "Brief."}, USER, RIGHT]},
        {"messages": [USER, WRONG]},
    ]
    bad = [
        row(("human", "Why?")),
        row(("gpt", "Hi."), ("human", "Why?"), ("gpt", "So.")),
        row(("human", "Why?"), ("gpt", "")),
        row(("human", "Why?"), ("observation", "3"), ("gpt", "So.")),
        row(("human", "Why?"), ("robot", "So.")),
        row(("human", "Why?"), ("gpt", "So."), tools="[{}]"),
        row(("human", "Why?"), ("gpt", "So."), images=["a.png"]),
    ]
    assert dropped(tmp_path, "sharegpt", good, *bad) == [
        "does not end with a message of the assistant",
        "user and assistant do not take turns, the user first",
        "empty",
        "with a message of a tool, but training reads such rows as they are, without this tool",
        "with a message of an unknown role",
        "with tools, but training reads such rows as they are, without this tool",
        "with images, but only stages sft and rl, and mega-rl eval, of a vision-language model read pictures",
    ]


# --- preferences

PUBLISHED_PAIRS: dict[str, Record] = {
    "TRL, explicit prompt": {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
    "TRL, conversational": PAIR,
    "TRL, implicit prompt": {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    "TRL, implicit prompt of text": {"chosen": "Why? So.", "rejected": "Why? No."},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "Why?"}],
        "chosen": {"from": "gpt", "value": "So."},
        "rejected": {"from": "gpt", "value": "No."},
    },
    "LLaMA-Factory, alpaca": {"instruction": "Why?", "input": "", "chosen": "So.", "rejected": "No."},
    "UltraFeedback-binarized": {
        "prompt": "Why?",
        "prompt_id": "5ee9",
        "chosen": [USER, RIGHT],
        "rejected": [USER, WRONG],
        "messages": [USER, RIGHT],
        "score_chosen": 8.0,
        "score_rejected": 3.5,
    },
    "HH-RLHF": {"chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "\n\nHuman: Why?\n\nAssistant: No."},
    "HH-RLHF with the prompt apart": {"prompt": "\n\nHuman: Why?\n\nAssistant:", "chosen": " So.", "rejected": " No."},
    "a column of another name": {"system": "", "question": "Why?", "chosen": "So.", "rejected": "No."},
}


@pytest.mark.parametrize("form", PUBLISHED_PAIRS)
def test_every_published_form_of_a_pair_becomes_the_same(tmp_path: Path, form: str) -> None:
    (made,) = only(tmp_path, "pairs", PUBLISHED_PAIRS[form])
    stripped = {name: [{**m, "content": m["content"].strip()} for m in made[name]] for name in made}
    assert stripped == PAIR


def test_the_prompt_of_a_pair_is_all_that_both_begin_with(tmp_path: Path) -> None:
    before = "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant: "
    (made,) = only(tmp_path, "pairs", {"chosen": f"{before}So.", "rejected": f"{before}So not.", "system": "Brief."})
    assert [message["content"] for message in made["prompt"]] == ["Brief.", "Hi.", "Hello.", "Why?"]
    (made,) = only(tmp_path, "pairs", {"chosen": "It is blue.", "rejected": "It is black."})  # not "bl"
    assert [made[name][0]["content"] for name in PAIR] == ["It is", "blue.", "black."]


def test_a_pair_keeps_its_margin(tmp_path: Path) -> None:
    made = only(tmp_path, "pairs", PAIR | {"margin": 0.5}, PAIR | {"prompt": "How?", "margin": None})
    assert [row.get("margin") for row in made] == [0.5, None] and "margin" not in made[1]


def test_pairs_that_cannot_be_used(tmp_path: Path) -> None:
    bad = [
        PAIR | {"rejected": [RIGHT]},
        {"chosen": [USER, RIGHT], "rejected": [{"role": "user", "content": "How?"}, WRONG]},
        {"chosen": "So.", "rejected": "No."},
        PAIR | {"chosen": [RIGHT, USER, RIGHT]},
        PAIR | {"chosen": [{"role": "assistant", "content": ""}]},
        PAIR,
        PAIR | {"prompt": [RIGHT]},
    ]
    assert dropped(tmp_path, "pairs", PAIR, *bad) == [
        "equal pair: chosen and rejected are the same",
        "chosen and rejected do not answer the same prompt",
        "without prompt",
        "the responses are not one message of the assistant each",
        "empty",
        "duplicate",
        "does not end with a message of the user",
    ]
    other = {"prompt": "How?", "chosen": "So.", "rejected": "No."}
    turned = {"prompt": "Why?", "chosen": "No.", "rejected": "So."}
    assert only(tmp_path, "pairs", PAIR, other, turned) == [{**PAIR, "prompt": [{"role": "user", "content": "How?"}]}]


def test_kto_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Why?", "completion": "So.", "label": True},
        {"prompt": [USER], "completion": [WRONG], "label": False},
        {"conversations": [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}], "kto_tag": 1},
    ]
    made = only(tmp_path, "kto", *rows)
    assert made[0] == {"prompt": [USER], "completion": [RIGHT], "label": True}
    assert made[1] == {"prompt": [USER], "completion": [WRONG], "label": False}
    assert made[2] == {"prompt": [{"role": "user", "content": "How?"}], "completion": [RIGHT], "label": True}
    good, other = rows[:2]
    bad = [{**other, "label": None}, good, {**other, "completion": ""}]
    bad += [{**other, "completion": None, "messages": [USER]}, {"prompt": None, "completion": None, "label": True}]
    assert dropped(tmp_path, "kto", good, *bad) == ["without label", "duplicate", "empty"]


# --- files and splits


def pairs_of(number: int) -> list[Record]:
    return [{"prompt": f"{index}?", "chosen": "So.", "rejected": other} for index in range(number) for other in "ab"]


def prompts(prepared: Prepared, name: str) -> list[str]:
    return [row["prompt"][0]["content"] for row in prepared.files[name]]


def test_held_out_problems_depend_on_the_seed_alone(tmp_path: Path) -> None:
    rows = pairs_of(100)
    first = prepare("pairs", [file(tmp_path / "a.jsonl", rows)], num_validation=10)
    turned = prepare("pairs", [file(tmp_path / "b.jsonl", rows[::-1])], num_validation=10)
    other = prepare("pairs", [file(tmp_path / "c.jsonl", rows)], num_validation=10, seed=1)
    assert sorted(prompts(first, "val.jsonl")) == sorted(prompts(turned, "val.jsonl"))
    assert set(prompts(first, "val.jsonl")) != set(prompts(other, "val.jsonl"))
    assert len(prompts(first, "val.jsonl")) == 20 and len(prompts(first, "train.jsonl")) == 180
    assert not set(prompts(first, "val.jsonl")) & set(prompts(first, "train.jsonl"))
    assert "validation: 20 of the kept rows held out, 10 of 100 problems (seed 0)" in first.lines
    assert len(prompts(prepare("pairs", [tmp_path / "a.jsonl"]), "val.jsonl")) == 4  # 2 % of the problems
    with pytest.raises(InputError, match="--val-rows is 100, but there are 100 different problems"):
        prepare("pairs", [tmp_path / "a.jsonl"], num_validation=100)


def test_files_of_another_use_are_told_apart(tmp_path: Path) -> None:
    data = tmp_path / "ultrafeedback_binarized" / "data"
    for name in ("train_prefs", "train_sft", "train_gen", "test_prefs", "test_sft", "test_gen"):
        file(data / f"{name}-00000-of-00001.parquet", [{**PAIR, "prompt": name}])
    (data / ".cache.jsonl").write_text("{")
    prepared = prepare("pairs", [tmp_path / "ultrafeedback_binarized"])
    assert prompts(prepared, "train.jsonl") == ["train_prefs"] and prompts(prepared, "val.jsonl") == ["test_prefs"]
    assert prepared.lines[0].count("parquet") == 4 and "train_sft" in prepared.lines[0]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "dapo",
            [{"question": "?", "answer": "7"}],
            "line 1 has answer, question but needs `prompt` and `reward_model",
        ),
        ("math", [{"question": "?", "answer": "7"}], "line 1 has answer, question but needs `problem`, text"),
        ("alpaca", [{"messages": []}], "needs `instruction` and `output`, text"),
        ("sharegpt", [{"prompt": "?"}], "needs `conversations` or `messages`"),
        ("pairs", [{"prompt": "?", "chosen": "a"}], "has chosen, prompt but needs `chosen` and `rejected`"),
        ("kto", [{"prompt": "?", "completion": "a", "label": "good"}], "needs `label`, true for"),
        ("kto", [{"completion": "a", "label": True}], "needs `prompt` and `completion`"),
        ("pairs", [{**PAIR, "rejected": [RIGHT]}] * 2, r"of 2 rows in 1 files none is left \(2 dropped: equal pair"),
        ("alpaca", [{"instruction": "?", "output": "a", "history": "b"}], "line 1 has the history 'b': give pairs"),
    ],
)
def test_files_of_another_set_are_refused(tmp_path: Path, name: str, rows: list[Record], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        prepare(name, [file(tmp_path / "rows.jsonl", rows)], num_validation=0)
    assert "\n" not in str(caught.value)


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--source .*absent is neither a file nor a directory"):
        prepare("pairs", [tmp_path / "absent"])
    (tmp_path / "hh").mkdir()
    with pytest.raises(InputError, match="has no .jsonl, .json or .parquet file: give another"):
        prepare("pairs", [tmp_path / "hh"])
    (tmp_path / "hh" / "train.jsonl.gz").write_text("")
    with pytest.raises(InputError, match="unpack .*train.jsonl.gz first"):
        prepare("pairs", [tmp_path / "hh"])
    with pytest.raises(InputError, match="has no file for training"):
        prepare("pairs", [file(tmp_path / "test.jsonl", [PAIR])])


def test_every_set_says_where_its_files_come_from() -> None:
    assert all(len(data_set.about) > 100 and data_set.columns for data_set in SETS.values())


def test_rows_of_problems_are_those_that_training_reads(tmp_path: Path) -> None:
    made = only(tmp_path, "dapo", dapo_row("1+1?", "2"))[0]
    row = Row(tmp_path, 1, made)
    assert (prompt_of(row), truth_of(row)) == (made["prompt"], "2")


# --- pictures


def drawing(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(buffer, "PNG")
    return buffer.getvalue()


def test_geo3k_keeps_its_pictures(tmp_path: Path) -> None:
    red, blue = ({"bytes": drawing(colour), "path": None} for colour in ("red", "blue"))
    ask = {"problem": "<image>Find x.", "answer": "\\frac{3}{2}"}
    rows = [
        {"images": [red], **ask},
        {"images": [blue], **ask},  # another problem in the same words
        {"images": [red], **ask},
        {"images": [red], "problem": "Find x.", "answer": "3"},
        {"images": [red], "problem": "<image>Find y.", "answer": " "},
    ]
    source = tmp_path / "data"
    file(source / "train-00000-of-00001.parquet", rows)
    file(source / "test-00000-of-00001.parquet", [{"images": [blue], "problem": "<image>Find  X.", "answer": "7"}])
    prepared = prepare("geo3k", [source])
    train, test = write(prepared, tmp_path / "out")
    (kept,), (held,) = (read_rows([str(path)], "k") for path in (train, test))
    assert kept.fields["images"] == [red] and held.fields["images"] == [blue]
    assert str(prompt_of(kept)[-1]["content"]).startswith("<image>Find x. Let's think")
    assert truth_of(kept) == "\\frac{3}{2}" and kept.fields["data_source"] == "hiyouga/geometry3k"
    text = "\n".join(prepared.lines)
    for reason in ("duplicate", "more or fewer pictures than places", "empty", "in the validation data too"):
        assert f"1 dropped: {reason}" in text or reason in text, text


def test_geo3k_drops_a_picture_that_cannot_be_read_and_takes_none_from_elsewhere(tmp_path: Path) -> None:
    row = {"images": [{"bytes": drawing("red"), "path": None}], "problem": "<image>?", "answer": "1"}
    cut = {**row, "images": [{"bytes": drawing("red")[:40], "path": None}]}
    prepared = prepare("geo3k", [file(tmp_path / "data" / "rows.parquet", [row, cut])])
    (line,) = [line for line in prepared.lines if "a picture that cannot be decoded" in line]
    assert "1 dropped" in line and "rows.parquet row 2" in line
    (tmp_path / "own.png").write_bytes(drawing("blue"))
    for path in ("../own.png", str(tmp_path / "own.png")):
        other = {**row, "images": [{"bytes": None, "path": path}]}
        with pytest.raises(InputError, match=r"rows.parquet row 1, picture 1 is '.*own.png', outside of the directory"):
            prepare("geo3k", [file(tmp_path / "data" / "rows.parquet", [other])])
