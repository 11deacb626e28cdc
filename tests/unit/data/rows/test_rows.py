"""Data files that are as they should be, and every way in which they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.pairs import LabelledDataset, PairDataset
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.rows import rows
from mega_rl.data.rows.rows import DataFiles, atomic_path, read_rows, write_jsonl, write_parquet
from mega_rl.data.texts import TextDataset
from mega_rl.errors import InputError
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer

RECORDS = [{"prompt": [{"role": "user", "content": "é?"}], "answer": "1"}, {"prompt": [], "answer": "2"}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    (write_jsonl if name.endswith("jsonl") else write_parquet)(path, RECORDS)
    rows = read_rows([str(path), str(path)], "data.train_files")
    assert [row.fields for row in rows] == RECORDS + RECORDS
    assert rows[3].where == f"{path} {'line' if name.endswith('jsonl') else 'row'} 2"
    assert [entry.name for entry in path.parent.iterdir()] == [name]


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n\n{"a": 2}')
    assert [row.number for row in read_rows([str(path)], "k")] == [2, 4]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "data.val_files: .*a.jsonl line 2 is no JSON"),
        ("a.jsonl", b'{"a": "\xff"}', "a.jsonl line 1 is no JSON"),
        ("a.jsonl", b"[1]", "a.jsonl line 1 is a JSON list, not an object"),
        ("a.jsonl", b"\n \n", "a.jsonl has no rows"),
        ("a.jsonl", b"", "a.jsonl has no rows"),
        ("a.parquet", b"", "a.parquet is truncated or no parquet file"),
        ("a.parquet", b'{"a": 1}', "a.parquet is truncated or no parquet file"),
        ("a.csv", b"a", "a.csv is neither .jsonl, .json nor .parquet"),
    ],
)
def test_malformed_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_rows([str(tmp_path / name)], "data.val_files")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0.05, 0.5, 0.95])
def test_a_truncated_parquet_file(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, RECORDS * 100)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(InputError, match="a.parquet is truncated or no parquet file .*write it again"):
        read_rows([str(path)], "data.train_files")


def test_a_damaged_parquet_page(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [{"a": f"{i * 7919:x}" * 3} for i in range(500)])
    whole = bytearray(path.read_bytes())
    whole[8:200] = bytes(192)
    path.write_bytes(whole)
    with pytest.raises(InputError, match="a.parquet is truncated or no parquet file"):
        read_rows([str(path)], "data.train_files")


def test_no_files_a_missing_one_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="data.train_files is empty"):
        read_rows([], "data.train_files")
    with pytest.raises(InputError, match="absent.jsonl is no file"):
        read_rows([str(tmp_path / "absent.jsonl")], "data.train_files")
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(InputError, match="dir.jsonl is no file"):
        read_rows([str(tmp_path / "dir.jsonl")], "data.train_files")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"a": 1}])
    with pytest.raises(TypeError):
        write_jsonl(path, [{"a": 2}, {"a": object()}])
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == '{"a": 1}\n'
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "error", [pyarrow.lib.ArrowTypeError(""), pyarrow.ArrowKeyError("no such column"), OSError("x")]
)
def test_whatever_arrow_raises_is_a_sentence(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", RECORDS)

    def opened(path: Path) -> None:
        raise error

    monkeypatch.setattr(rows.pq, "ParquetFile", opened)
    with pytest.raises(InputError, match=r"a.parquet is truncated or no parquet file \(.+\); write it again"):
        read_rows([str(tmp_path / "a.parquet")], "data.train_files")


def test_a_file_that_the_system_refuses_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", RECORDS)

    def refused(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InputError, match=r"a.parquet cannot be read \(.*Permission denied\); check its permissions"):
        read_rows([str(tmp_path / "a.parquet")], "data.train_files")


def test_an_array_is_looked_over_once_and_not_for_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    doubts = rows._doubts
    monkeypatch.setattr(rows, "_doubts", lambda text: looked_at.append(len(text)) or doubts(text))
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": "1+1=", "answer": "2"}] * 300))
    assert len(read_rows([str(path)], "data.train_files")) == 300
    assert looked_at == [path.stat().st_size]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_an_entry_takes_the_first_rows_of_its_file(tmp_path: Path, suffix: str) -> None:
    records: list[dict[str, Any]] = [{"a": place} for place in range(5)]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        (write_jsonl if suffix == ".jsonl" else write_parquet)(path, records)
    files = [f"{path}[:2]", str(path), f"{path}[:9]"]
    found = read_rows(files, "key")
    assert [row.get("a") for row in found] == [0, 1, *range(5), *range(5)]
    assert [row.where for row in found[:2]] == [row.where for row in found[2:4]]
    assert [row.get("a") for row in DataFiles(files, "key", 4).rows()] == [0, 1, 0, 1]
    for entry in (f"{path}[:0]", f"{path}[1:]", f"{path}[:x]", f"{path}[:10%]"):
        with pytest.raises(InputError, match=r"or write FILE\[:N\] for the first N rows"):
            read_rows([entry], "key")


EVERY_STAGE = {
    PromptDataset: {"prompt": "1+1=", "answer": "2"},
    ConversationDataset: {"prompt": "1+1=", "response": "2"},
    TextDataset: {"text": "1+1=2"},
    PairDataset: {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    LabelledDataset: {"prompt": "1+1=", "completion": "2", "label": True},
}


@pytest.mark.parametrize("kind", EVERY_STAGE)
def test_every_stage_reads_so_many_rows_of_each_file(tmp_path: Path, kind: Any) -> None:
    """And what a checkpoint knows the data by is that of a file cut to these rows."""
    records = [{**EVERY_STAGE[kind], "prompt": f"{place}+1="} for place in range(6)]
    if kind is TextDataset:
        records = [{"text": record["prompt"]} for record in records]
    for name, count in {"a.jsonl": 6, "b.jsonl": 6, "cut.jsonl": 3}.items():
        write_jsonl(tmp_path / name, records[:count])

    def read(*files: str) -> Any:
        given = DataFiles([str(tmp_path / name) for name in files])
        return kind.from_files(given, arithmetic_tokenizer(), DataConfig())

    assert len(read("a.jsonl")) == 6 and len(read("a.jsonl[:3]", "b.jsonl")) == 9
    assert len(read("a.jsonl[:1]", "b.jsonl[:2]")) == 3
    assert read("a.jsonl[:3]").fingerprint == read("cut.jsonl").fingerprint != read("a.jsonl[:4]").fingerprint
