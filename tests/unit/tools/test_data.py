"""The command lines that make data and models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.pairs import PairDataset
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.rows.rows import DataFiles, read_rows
from mega_rl.data.texts import TextDataset
from mega_rl.data.tokens.tokenizer import load_tokenizer
from tests.launching.launch import run_copy
from tools import make_tiny_model, prepare_data

TINY = ["--hidden-size", "16", "--num-layers", "1", "--num-heads", "2", "--num-kv-heads", "1", "--ffn", "8"]
ROW = {"question": "How many?", "answer": "12 * 100 = <<12*100=1200>>1200\n#### 1,200"}


def write_source(directory: Path, **rows: object) -> Path:
    directory.mkdir()
    for split in ("train", "test"):
        (directory / f"{split}.jsonl").write_text(json.dumps(rows.get(split, ROW)) + "\n")
    return directory


def test_gsm8k_becomes_parquet_with_the_common_fields(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", train=ROW | {"question": "When?"})
    assert prepare_data.main(["gsm8k", "--source", str(source), "--out", str(tmp_path / "out")]) == 0
    (row,) = read_rows([str(tmp_path / "out" / "test.parquet")], "k")
    assert row.fields == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'How many? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {"split": "test", "index": 0, **ROW},
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]


def test_the_real_gsm8k_is_converted_whole(tmp_path: Path, gsm8k_dir: Path) -> None:
    assert prepare_data.main(["gsm8k", "--source", str(gsm8k_dir), "--out", str(tmp_path)]) == 0
    rows = {split: read_rows([str(tmp_path / f"{split}.parquet")], "k") for split in ("train", "test")}
    assert {split: len(of_split) for split, of_split in rows.items()} == {"train": 7473, "test": 1319}
    truths = [row.fields["reward_model"]["ground_truth"] for of_split in rows.values() for row in of_split]
    assert all(truth.removeprefix("-").isdigit() for truth in truths)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"test": {"question": "?"}}, "test.jsonl line 1 has question but needs `question` and `answer`"),
        ({"train": {"question": "?", "answer": "7"}}, "of 1 rows in 1 files none is left (1 dropped: without answer"),
        ({"train": 3}, "train.jsonl line 1 is a JSON int, not an object"),
    ],
)
def test_a_malformed_source_leaves_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: dict[str, object], message: str
) -> None:
    source = write_source(tmp_path / "source", **rows)
    assert prepare_data.main(["gsm8k", "--source", str(source), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and message in printed and printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_arithmetic_files_and_the_model_that_reads_them(tmp_path: Path) -> None:
    out = str(tmp_path / "data")
    assert (
        prepare_data.main(["arithmetic", "--out", out, "--num-train", "30", "--num-val", "8", "--num-sft", "50"]) == 0
    )
    assert make_tiny_model.main(["--out", str(tmp_path / "model"), "--family", "qwen3", *TINY]) == 0
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    data = DataConfig(max_prompt_length=8, max_response_length=4, filter_overlong_prompts=False)
    assert len(PromptDataset.from_files(DataFiles([f"{out}/train.jsonl"]), tokenizer, data)) == 30
    assert len(PromptDataset.from_files(DataFiles([f"{out}/val.jsonl"]), tokenizer, data)) == 8
    assert len(ConversationDataset.from_files(DataFiles([f"{out}/sft.jsonl"]), tokenizer, data)) == 50
    assert len(PairDataset.from_files(DataFiles([f"{out}/pairs.jsonl"]), tokenizer, data)) == 2000
    assert len(PairDataset.from_files(DataFiles([f"{out}/pairs_val.jsonl"]), tokenizer, data)) == 8
    long = DataConfig(max_prompt_length=80, max_response_length=1)
    assert [
        len(TextDataset.from_files(DataFiles([f"{out}/{name}.jsonl"]), tokenizer, long))
        for name in ("texts", "texts_val")
    ] == [2000, 1]


def test_a_bpe_model_of_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("banana banana\n" * 9)
    source = write_source(tmp_path / "source")
    files = [str(tmp_path / "a.txt"), str(source / "train.jsonl")]
    options = ["--tokenizer", "bpe", "--bpe-text", *files, "--vocab-size", "270", "--untied", *TINY]
    assert make_tiny_model.main(["--out", str(tmp_path / "model"), *options]) == 0
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert (config.vocab_size, config.tie_word_embeddings, config.model_type) == (270, False, "qwen2")
    assert len(load_tokenizer(str(tmp_path / "model"))("banana")["input_ids"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-heads", "3"], "--num-heads 3 does not divide"),
        (["--tokenizer", "bpe"], "--tokenizer bpe needs --bpe-text"),
        (["--vocab-size", "300"], "belong to --tokenizer bpe"),
        (["--tokenizer", "bpe", "--bpe-text", "absent.txt"], "absent.txt cannot be read"),
        (["--tokenizer", "bpe", "--bpe-text", "absent.jsonl"], "absent.jsonl is no file"),
        (["--tokenizer", "bpe", "--bpe-text", __file__, "--vocab-size", "5"], "--vocab-size is 5"),
    ],
)
def test_bad_model_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert make_tiny_model.main(["--out", str(tmp_path / "model"), *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and message in printed and printed.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_an_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert prepare_data.main(["arithmetic", "--out", str(tmp_path / "file")]) == 2
    assert make_tiny_model.main(["--out", str(tmp_path / "file" / "model"), *TINY]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2 and all("cannot be written" in line for line in printed)


@pytest.mark.parametrize("tool", ["prepare_data.py", "make_tiny_model.py"])
def test_help(tool: str) -> None:
    assert "usage" in run_copy(Path("tools") / tool, "--help").check().stdout
