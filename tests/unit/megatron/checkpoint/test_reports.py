"""What ranks report of a checkpoint against what rank 0 sees of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mega_rl.bridge.files.torch_dist import visible
from mega_rl.bridge.files.torch_dist.manifest import written
from mega_rl.megatron.checkpoint.saving import Report, difference

SHARDS = ("megatron/__0_0.distcp", "megatron/__1_0.distcp")


@pytest.fixture
def reports(tmp_path: Path) -> list[Report]:
    (tmp_path / "megatron").mkdir()
    for name in SHARDS:
        (tmp_path / name).write_bytes(name.encode())
    return [Report(f"rank {rank} on host{rank}", [], written(tmp_path, [tmp_path / name])) for rank, name in
            enumerate(SHARDS)]  # fmt: skip


def test_what_all_ranks_report_is_there(tmp_path: Path, reports: list[Report]) -> None:
    assert difference(tmp_path, reports) is None


def test_a_file_that_is_not_there(tmp_path: Path, reports: list[Report]) -> None:
    (tmp_path / SHARDS[1]).unlink()
    found = difference(tmp_path, reports)
    assert found is not None and found.startswith(f"rank 1 on host1 wrote {SHARDS[1]} of 21 bytes, and rank 0 on ")
    assert found.endswith("sees no such file there")


def test_a_file_of_another_size(tmp_path: Path, reports: list[Report]) -> None:
    (tmp_path / SHARDS[1]).write_bytes(b"half")
    found = difference(tmp_path, reports)
    assert found is not None and found.endswith("sees 4 bytes there")


def test_a_file_that_nobody_reports(tmp_path: Path, reports: list[Report]) -> None:
    assert difference(tmp_path, reports[:1]) == f"{SHARDS[1]} is there, which no rank reports"


def test_a_file_system_that_shows_files_late_is_waited_for(
    tmp_path: Path, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (tmp_path / SHARDS[1]).read_bytes()
    (tmp_path / SHARDS[1]).unlink()
    looks: list[str | None] = []

    def look() -> str | None:
        looks.append(difference(tmp_path, reports))
        if len(looks) == 2:
            threading.Thread(target=(tmp_path / SHARDS[1]).write_bytes, args=(content,)).start()
        return looks[-1]

    assert visible.patiently(look) is None
    assert len(looks) > 2 and looks[0] is not None
    monkeypatch.setattr(visible, "PATIENCE_S", 0.0)
    (tmp_path / SHARDS[1]).unlink()
    assert visible.patiently(lambda: difference(tmp_path, reports)) is not None
