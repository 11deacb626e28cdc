"""Preference rows of every form become the same sequences, and what cannot be learnt from is refused by its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.pairs import LabelledAnswer, LabelledDataset, PairDataset
from mega_rl.data.rows.rows import DataFiles
from mega_rl.errors import InputError
from mega_rl.microbatch import Sequence
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer, bpe_tokenizer

PLAIN, CHAT = arithmetic_tokenizer(), bpe_tokenizer(["Hi there", "user", "assistant", "system"], 300)
DATA = DataConfig(max_prompt_length=60, max_response_length=20)
USER = {"role": "user", "content": "1+1="}
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "33"}
FORMS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
    {"prompt": [USER], "chosen": GOOD, "rejected": [BAD]},
    {"prompt": [USER], "chosen": {"from": "gpt", "value": "2"}, "rejected": "33"},
    {"conversations": [{"from": "human", "value": "1+1="}], "chosen": "2", "rejected": {"from": "gpt", "value": "33"}},
    {"messages": [USER], "chosen": "2", "rejected": "33"},
    {"question": "1+1=", "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": "1+1=", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
]
JUDGED: list[dict[str, Any]] = [
    {"prompt": "1+1=", "completion": "2", "label": True},
    {"prompt": [USER], "completion": [GOOD], "label": True},
    {"messages": [USER, GOOD], "kto_tag": True},
    {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}], "kto_tag": True},
    {"instruction": "1+1=", "output": "2", "kto_tag": True},
]


def write(tmp_path: Path, rows: list[dict[str, Any]]) -> DataFiles:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataFiles([str(path)])


def same(a: Sequence, b: Sequence) -> bool:
    return torch.equal(a.token_ids, b.token_ids) and torch.equal(a.loss_mask, b.loss_mask)


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT], ids=["plain", "chat"])
def test_all_forms_of_a_pair_are_the_same_sequences(tmp_path: Path, tokenizer: Any) -> None:
    pairs = PairDataset.from_files(write(tmp_path, FORMS), tokenizer, DATA)
    rows = [{"prompt": "1+1=", "response": answer} for answer in ("2", "33")]
    expected = ConversationDataset.from_files(write(tmp_path, rows), tokenizer, DATA).sequences
    assert [pair.index for pair in pairs.items] == list(range(len(FORMS))) and pairs.num_dropped == 0
    for pair in pairs.items:
        assert same(pair.chosen, expected[0]) and same(pair.rejected, expected[1])
        assert pair.chosen.token_ids[-1] == tokenizer.eos_token_id, "an answer learns to end"
        assert pair.chosen.loss_mask.tolist()[-2:] == [1.0, 1.0] and pair.chosen.loss_mask[0] == 0


def test_a_system_message_and_a_margin_are_taken(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "system": "Hi", "margin": 2}
    pair = PairDataset.from_files(write(tmp_path, [row]), CHAT, DATA)[0]
    assert "system\nHi" in CHAT.decode(pair.chosen.token_ids) and pair.margin == 2.0
    assert PairDataset.from_files(write(tmp_path, FORMS[:1]), CHAT, DATA)[0].margin is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "2"}, "chosen and rejected are equal"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": " "}, "rejected is empty"),
        ({"prompt": "1+1=", "chosen": "", "rejected": "2"}, "chosen is empty"),
        ({"prompt": "1+1=", "chosen": "2"}, "needs `prompt`"),
        ({"chosen": "2", "rejected": "3"}, "needs `prompt`"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "are equal"),
        ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "2+2="}, BAD]}, "differ before their last"),
        ({"prompt": "2+2=", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "not what chosen and rejected begin"),
        ({"prompt": "1+1=", "chosen": [GOOD, BAD], "rejected": "3"}, "one message of the assistant"),
        ({"prompt": "1+1=", "chosen": USER, "rejected": "3"}, "one message of the assistant"),
        ({"messages": [USER, GOOD], "chosen": "2", "rejected": "3"}, "must end with the user"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": "much"}, "margin is 'much'"),
        ({"prompt": "1+1=", "chosen": {**GOOD, "tool_calls": [1]}, "rejected": "3"}, "chosen: tool_calls is [1]: give"),
    ],
)
def test_a_pair_that_cannot_be_used_names_its_row(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    files = write(tmp_path, [FORMS[0], row])
    with pytest.raises(InputError) as error:
        PairDataset.from_files(files, CHAT, DATA)
    assert f"{files.paths[0]} line 2" in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


def test_pairs_with_an_answer_that_is_too_long_are_counted_or_refused(tmp_path: Path) -> None:
    rows = [FORMS[0], {"prompt": "1+1=", "chosen": "2", "rejected": "1" * 40}, {**FORMS[0], "chosen": "3" * 30_000}]
    data = DataConfig(max_prompt_length=8, max_response_length=8)
    found = PairDataset.from_files(write(tmp_path, rows), PLAIN, data)
    assert (len(found), found.num_dropped) == (1, 2)
    with pytest.raises(InputError, match=r"line 2 has 45 tokens"):
        PairDataset.from_files(
            write(tmp_path, rows),
            PLAIN,
            DataConfig(max_prompt_length=8, max_response_length=8, filter_overlong_prompts=False),
        )


def test_the_fingerprint_tells_chosen_from_rejected(tmp_path: Path) -> None:
    swapped = {"prompt": "1+1=", "chosen": "33", "rejected": "2"}
    one, two = (PairDataset.from_files(write(tmp_path, [row]), PLAIN, DATA) for row in (FORMS[0], swapped))
    assert one.fingerprint != two.fingerprint


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT], ids=["plain", "chat"])
def test_all_forms_of_a_verdict(tmp_path: Path, tokenizer: Any) -> None:
    other = {"prompt": "2+2=", "completion": "4", "label": False}
    found = LabelledDataset.from_files(write(tmp_path, [*JUDGED, other]), tokenizer, DATA).items
    rows = [
        {"prompt": "1+1=", "response": "2"},
        {"prompt": "1+1=", "response": "4"},
        {"prompt": "2+2=", "response": "2"},
    ]
    own, crossed, back = ConversationDataset.from_files(write(tmp_path, rows), tokenizer, DATA).sequences
    assert [item.is_good for item in found] == [True] * len(JUDGED) + [False]
    assert all(same(item.answer, own) and same(item.mismatched, crossed) for item in found[:-1])
    assert same(found[-1].mismatched, back), "the ring closes"


def test_a_mismatched_answer_is_cut_to_the_limit(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1=", "completion": "2" * 10, "label": True},
        {"prompt": "11111+1=", "completion": "2", "label": False},
    ]
    found: list[LabelledAnswer] = LabelledDataset.from_files(
        write(tmp_path, rows), PLAIN, DataConfig(max_prompt_length=8, max_response_length=7)
    ).items
    assert found[1].mismatched.token_ids.numel() == 15 and found[1].mismatched.loss_mask.sum() == 7


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "1+1=", "completion": "2"}], "needs `kto_tag` or `label`"),
        ([{"prompt": "1+1=", "completion": "2", "label": 1}], "true or false"),
        ([{"prompt": "1+1=", "completion": " ", "label": True}], "the answer is empty"),
        ([{"prompt": "1+1=", "label": True}], "needs `prompt`"),
        ([JUDGED[0], JUDGED[1]], "all rows have the same prompt"),
    ],
)
def test_a_verdict_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        LabelledDataset.from_files(write(tmp_path, rows), CHAT, DATA)
