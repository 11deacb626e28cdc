"""``run.log``: every rank's warnings and rank 0's messages, whole lines, bounded, and nothing else changed by it."""

from __future__ import annotations

import logging
import os
import re
import warnings
from pathlib import Path

import pytest

from mega_rl.observe import run_log
from mega_rl.observe.run_log import RunLog

ENTRY = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}) rank (\d+) ([A-Z]+) (.*)")


def entries(path: Path) -> list[tuple[int, str, str]]:
    """(rank, level, text) of every entry; a line that is neither an entry nor the rest of one fails."""
    found: list[tuple[int, str, str]] = []
    for line in path.read_text().splitlines():
        if line.startswith("    "):
            rank, level, text = found[-1]
            found[-1] = (rank, level, f"{text}\n{line[4:]}")
        else:
            match = ENTRY.fullmatch(line)
            assert match, line
            found.append((int(match[2]), match[3], match[4]))
    return found


def test_warnings_of_every_kind_are_taken_in(tmp_path, capsys):
    path, log = tmp_path / "run.log", RunLog()
    alone = logging.getLogger("test_run_log.alone")
    alone.propagate = False  # as vLLM's are
    log.say("lost: nothing is open")
    with log.opened(path, 0, 2), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of what another test has left
        logging.getLogger("test_run_log").warning("%d of %d", 3, 4)
        logging.getLogger("test_run_log").info("not this")
        alone.error("first line\nsecond line")
        warnings.warn("old key", FutureWarning, stacklevel=1)
        log.say("checkpoint: here")
        log.say("warning: slow")
    logging.getLogger("test_run_log").warning("after the end")
    found = entries(path)
    assert [(rank, level) for rank, level, _ in found] == [
        (0, "START"),
        (0, "WARNING"),
        (0, "ERROR"),
        (0, "WARNING"),
        (0, "MESSAGE"),
        (0, "WARNING"),
        (0, "END"),
    ]
    texts = [text for _, _, text in found]
    assert texts[1:3] == ["test_run_log: 3 of 4", "test_run_log.alone: first line\nsecond line"]
    assert texts[3].startswith("FutureWarning: old key (") and texts[4:6] == ["checkpoint: here", "warning: slow"]


def test_nothing_else_is_changed(tmp_path):
    before = (logging.getLogRecordFactory(), warnings.showwarning, list(logging.getLogger().handlers))
    with RunLog().opened(tmp_path / "run.log", 0, 1):
        assert logging.getLogger().handlers == before[2]
        record = logging.getLogger("x").makeRecord("x", logging.WARNING, "f", 1, "%d", ("no number",), None)
        assert record.args == ("no number",)
    assert (logging.getLogRecordFactory(), warnings.showwarning, list(logging.getLogger().handlers)) == before
    assert "'%d' (TypeError while it was put together)" in (tmp_path / "run.log").read_text()


def test_several_ranks_write_whole_lines_and_failures_are_there(tmp_path):
    path = tmp_path / "run.log"
    children = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            try:
                with RunLog().opened(path, rank, 3):
                    for number in range(100):
                        logging.getLogger("x").warning(f"{number} " + "long " * 50)  # noqa: G004 - origins differ
                    if rank == 2:
                        raise ValueError("it broke")
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    found = entries(path)
    assert [sum(level == "WARNING" for r, level, _ in found if r == rank) for rank in range(3)] == [100, 100, 100]
    assert [(rank, text) for rank, level, text in found if level == "ERROR"] == [(2, "ValueError: it broke")]


def test_what_repeats_is_counted(tmp_path, monkeypatch):
    path, log = tmp_path / "run.log", RunLog()
    monkeypatch.setattr(run_log, "MAX_ALIKE", 3)
    monkeypatch.setattr(run_log, "MAX_ORIGINS", 4)
    with log.opened(path, 1, 2):
        for number in range(9):
            logging.getLogger("x").warning("sample %d", number)
        for number in range(9):
            log.add("WARNING", f"place {number}", origin=number)
    texts = [text for _, _, text in entries(path)]
    assert texts[:3] == ["x: sample 0", "x: sample 1", "x: sample 2 (the last one from there that is written)"]
    assert [text for text in texts if "6 more entries like those from ('x'" in text]
    assert len([text for text in texts if text.startswith("place")]) < 9


def test_why_a_rank_ended_is_there_whatever_came_before(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "MAX_ALIKE", 3)
    monkeypatch.setattr(run_log, "MAX_ORIGINS", 4)
    path = tmp_path / "run.log"
    for max_bytes in (1 << 20, 4000):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(run_log, "MAX_BYTES", max_bytes)
        log = RunLog()
        with pytest.raises(ValueError, match="it broke"), log.opened(path, 1, 2):
            for number in range(50):
                log.add("WARNING", f"place {number}", origin=number)
            for number in range(50):
                log.say(f"{number} told")
            raise ValueError("it broke")
        found = entries(path)
        assert [text for _, level, text in found if level == "ERROR"] == ["ValueError: it broke"]
        assert sum("full, this rank" in text for _, _, text in found) == (max_bytes == 4000)
        assert max_bytes == 4000 or sum("told" in text for _, _, text in found) == 50


def test_the_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "MAX_BYTES", 4000)
    monkeypatch.setattr(run_log, "MAX_BYTES_BEFORE", 1000)
    path = tmp_path / "run.log"
    for _ in range(3):
        with RunLog().opened(path, 1, 2):
            for number in range(100):
                logging.getLogger("x").warning(f"{number} of many")  # noqa: G004 - origins differ
        assert path.stat().st_size < 3 * 1200
    assert "full, this rank writes no more entries" in path.read_text()
    with RunLog().opened(path, 0, 2):
        pass
    assert path.stat().st_size < 1000 and path.with_name("run.log.old").stat().st_size > 1000


@pytest.mark.parametrize("text", ["x" * 100_000, "\ud800\x00", ""])
def test_any_text_is_written(tmp_path, text):
    log = RunLog()
    with log.opened(tmp_path / "run.log", 0, 1):
        log.add("MESSAGE", text)
    assert (tmp_path / "run.log").stat().st_size < 9000
