"""tools/report.py: whatever a run directory that came from elsewhere says of its pictures, the page is made."""

from __future__ import annotations

import hashlib
import html
import json
from pathlib import Path
from typing import Any

import pytest

from tests.recorded.observed_run import leave_run
from tests.unit.data.pictures.test_bad_pictures import BAD
from tools import report


def page_of(directory: Path, files: Any, content: bytes) -> str:
    """Of a run whose first sample has this picture, and whose configuration says this of its data."""
    (directory / "config.yaml").write_text(json.dumps({"data": {"train_files": files}}))
    (rollouts,) = (directory / "rollouts").iterdir()
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    rows[0]["prompt"]["images"] = [{"key": f"{hashlib.sha256(content).hexdigest()}-2x2"}]
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report.main([str(directory)]) == 0
    return html.unescape((directory / "report.html").read_text())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_run(tmp_path_factory.mktemp("report") / "run", num_steps=2)


@pytest.mark.parametrize("files", [5, None, [5], "rows.jsonl"])
def test_files_that_are_no_list_of_paths_are_said(run_dir: Path, files: Any) -> None:
    text = page_of(run_dir, files, b"")
    assert f"data.train_files in config.yaml is {files!r}, not a list of paths" in text and "1 more not shown" in text


def test_a_picture_that_would_fill_the_memory_is_said(run_dir: Path) -> None:
    content = BAD["large png"][0]()
    (run_dir / "large.png").write_bytes(content)
    (run_dir / "rows.jsonl").write_text(json.dumps({"prompt": "<image>3+4=", "images": "large.png"}))
    text = page_of(run_dir, [str(run_dir / "rows.jsonl")], content)
    assert "picture 1 is not shown: " in text and "rows.jsonl line 1, picture 1 " in text and "data:image" not in text
