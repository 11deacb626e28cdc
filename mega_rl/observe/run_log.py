"""``run.log``: what every rank of a run warned of and what it told the user, with rank and time, in one file."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

FILE = "run.log"  # under the output directory
MAX_ENTRY_CHARACTERS = 8000  # the middle of a longer one is left out
MAX_ALIKE = 5  # entries of one origin, in one process
MAX_ORIGINS = 1000  # that are told apart; all further ones count as one
MAX_BYTES = 32 << 20  # that all ranks of one start may add together
MAX_BYTES_BEFORE = 32 << 20  # of earlier starts: a larger file is moved away, to run.log.old


class RunLog:
    """The entries of this process. Between ``opened`` and its end the file is written, else nothing happens.

    An entry is one line ``2026-11-22T13:55:01+0000 rank 3 WARNING vllm.engine: text``; further lines of its text
    are indented. It is one ``write`` to a file in append mode, so entries of several processes stand whole beside each
    other (on a network file system two that come at the same moment may cover each other).
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._rank = 0
        self._room = 0  # bytes that this process may still write
        self._alike: Counter[Hashable] = Counter()
        self._lock = threading.RLock()

    @contextmanager
    def opened(self, path: Path, rank: int, num_ranks: int) -> Iterator[None]:
        """Take in every Python warning and every record of ``logging`` from WARNING on, whoever handles it.

        Records are looked at where they are made: loggers, handlers and what they print stay as they are. If the block
        raises, the last entry says what.

        Raises:
            OSError: the file cannot be written when it is opened; later entries are then lost in silence.
        """
        if rank == 0 and path.exists() and path.stat().st_size > MAX_BYTES_BEFORE:
            path.replace(path.with_name(f"{path.name}.old"))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._rank, self._room, self._alike = rank, MAX_BYTES // (2 * num_ranks), Counter()
        if rank == 0:
            self._room += MAX_BYTES // 2
            self.add("START", f"process {os.getpid()} of {num_ranks} ranks")
        make_record, show_warning = logging.getLogRecordFactory(), warnings.showwarning

        def recorded(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make_record(*args, **kwargs)
            if record.levelno >= logging.WARNING:
                self._add_record(record)
            return record

        def shown(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            self.add("WARNING", f"{category.__name__}: {message} ({filename}:{lineno})", (category, filename, lineno))
            show_warning(message, category, filename, lineno, file, line)

        logging.setLogRecordFactory(recorded)
        warnings.showwarning = shown
        try:
            yield
            if rank == 0:
                self.add("END", "of the run")
        except BaseException as error:
            self.add("ERROR", "".join(traceback.format_exception_only(error)).strip())
            raise
        finally:
            if logging.getLogRecordFactory() is recorded:
                logging.setLogRecordFactory(make_record)
            if warnings.showwarning is shown:
                warnings.showwarning = show_warning
            self._close()

    def add(self, level: str, text: str, origin: Hashable | None = None) -> None:
        """One entry; does nothing while no file is open.

        Args:
            origin: of more than ``MAX_ALIKE`` entries with one origin only the number is written; None: no limit. An
                ERROR without one, which says why the rank ended, is written to a full file too.
        """
        with self._lock:
            if self._descriptor is None:
                return
            if origin is not None and origin not in self._alike and len(self._alike) >= MAX_ORIGINS:
                origin = "all other places"
            self._alike[origin] += 1
            if origin is not None and self._alike[origin] > MAX_ALIKE:
                return
            note = (
                " (the last one from there that is written)"
                if origin is not None and self._alike[origin] == MAX_ALIKE
                else ""
            )
            self._write(level, shortened(text) + note, is_final=level == "ERROR" and origin is None)

    def say(self, sentence: str) -> None:
        """An entry for something that the user is told."""
        self.add("WARNING" if sentence.startswith("warning:") else "MESSAGE", sentence)

    def _add_record(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception as error:  # noqa: BLE001 - arguments that do not fit are for logging itself to complain of
            text = f"{record.msg!r} ({type(error).__name__} while it was put together)"
        self.add(record.levelname, f"{record.name}: {text}", (record.name, record.lineno, str(record.msg)[:200]))

    def _write(self, level: str, text: str, is_final: bool = False) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        body = "\n    ".join(text.splitlines())
        entry = f"{stamp} rank {self._rank} {level} {body}\n".encode(errors="backslashreplace")
        was_full = self._room <= 0
        if (was_full and not is_final) or self._descriptor is None:
            return
        self._room -= len(entry)
        if self._room <= 0 and not was_full:
            entry += f"{stamp} rank {self._rank} WARNING run.log: full, this rank writes no more entries\n".encode()
        try:
            os.write(self._descriptor, entry)
        except OSError:  # a full disk must not end a run that has other troubles then
            self._room = 0

    def _close(self) -> None:
        with self._lock:
            for origin, number in self._alike.items():
                if origin is not None and number > MAX_ALIKE:
                    self._write("WARNING", f"run.log: {number - MAX_ALIKE} more entries like those from {origin}")
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None


def shortened(text: str) -> str:
    """The text, without the middle of a long one."""
    half = MAX_ENTRY_CHARACTERS // 2
    return text if len(text) <= MAX_ENTRY_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _with_new_lock() -> None:
    RUN_LOG._lock = threading.RLock()


RUN_LOG = RunLog()  # of this process
os.register_at_fork(after_in_child=_with_new_lock)  # another thread of the parent may have held it
