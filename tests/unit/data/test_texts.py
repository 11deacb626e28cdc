"""Documents become sequences without a token lost or learnt twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.rows.rows import DataFiles
from mega_rl.data.texts import TextDataset
from mega_rl.errors import InputError
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer, bpe_tokenizer

TOKENIZER = arithmetic_tokenizer()


def dataset(tmp_path: Path, texts: list[Any], tokenizer: Any = TOKENIZER, limit: int = 8, **more: Any) -> TextDataset:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return TextDataset.from_files(
        DataFiles([str(path)], **more), tokenizer, DataConfig(max_prompt_length=limit - 1, max_response_length=1)
    )


@pytest.mark.parametrize("length", [1, 6, 7, 8, 14, 15, 16, 40])
def test_every_token_but_the_first_is_predicted_once(tmp_path: Path, length: int) -> None:
    text = ("0123456789" * 4)[:length]
    found = dataset(tmp_path, [text])
    ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    assert [t for s in found.sequences for t in s.token_ids[1:].tolist()] == ids[1:]
    assert found.sequences[0].token_ids[0] == ids[0]
    assert all(
        2 <= s.token_ids.numel() <= 8 and s.loss_mask.tolist() == [1.0] * (len(s.token_ids) - 1)
        for s in found.sequences
    )
    assert sum(s.token_ids.numel() < 8 for s in found.sequences) <= 1, "only the last one is shorter"


def test_documents_do_not_run_into_each_other(tmp_path: Path) -> None:
    found = dataset(tmp_path, ["12", "", "3456"])
    assert [TOKENIZER.decode(s.token_ids) for s in found.sequences] == ["12<eos>", "3456<eos>"]
    assert (len(found), found.num_documents, found.num_empty) == (2, 2, 1)
    assert len(dataset(tmp_path, ["12", "34"], max_samples=1)) == 1


def test_no_template_is_applied(tmp_path: Path) -> None:
    chat = bpe_tokenizer(["Hi there"], 300)
    (found,) = dataset(tmp_path, ["Hi"], chat, limit=20).sequences
    assert chat.decode(found.token_ids) == "Hi<|im_end|>"


@pytest.mark.parametrize(
    ("text", "words"), [(7, "line 1: text is 7"), (None, "needs `text`"), ("", "documents are empty")]
)
def test_what_is_no_text(tmp_path: Path, text: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        dataset(tmp_path, [text])
    with pytest.raises(InputError, match="at least 2"):
        data = DataConfig(max_prompt_length=1, max_response_length=0)
        TextDataset.from_files(DataFiles(["x"]), TOKENIZER, data)
