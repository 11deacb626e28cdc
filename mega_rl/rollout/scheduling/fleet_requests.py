"""Questions to a run that goes on, and its answers, as files under its output directory.

A tool on any machine that sees the directory asks ``Mailbox.ask``; the run's rank 0 looks into it now and then. A file
is renamed into its place when it is whole. Who may write there is the file system's matter; no port is open for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mega_rl.errors import InputError

DIRECTORY = "fleet"  # under the output directory
LOCK = "open"  # in it: held by the run as long as it takes questions
QUESTION, ANSWER = ".question.json", ".answer.json"
MAX_BYTES = 1 << 16  # of a question
MAX_COUNT = 100_000
LOOK_S = 0.1  # between two looks for an answer
NUM_TRIES = 20  # to take the lock
PATIENCE_S = 60.0  # for an answer, beyond what the question itself takes


@dataclass(frozen=True)
class ControlQuestion:
    """What a run is asked."""

    command: Literal["status", "add", "remove"]
    count: int = 0  # engines
    engines: tuple[int, ...] = ()  # by their numbers
    wait_s: float = 0.0  # for room

    def __post_init__(self) -> None:
        if self.command not in ("status", "add", "remove"):
            raise InputError(f"there is no command {self.command!r}: ask for status, add or remove")
        for number in (self.count, *self.engines):
            if type(number) is not int or not 0 <= number <= MAX_COUNT:
                raise InputError(f"{number!r} is no number of engines: give whole numbers up to {MAX_COUNT}")
        if type(self.wait_s) not in (int, float) or not 0 <= self.wait_s <= 1e6:
            raise InputError(f"{self.wait_s!r} is no time to wait: give seconds")
        if self.command != "status" and not self.count and not self.engines:
            raise InputError("nothing is asked for: give a number of engines of at least 1")

    @classmethod
    def of(cls, found: Any) -> ControlQuestion:
        """
        Raises:
            InputError: these are not the values of a question.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or "command" not in found or not found.keys() <= names:
            raise InputError(f"a question to a run has a command, and of {', '.join(sorted(names))} no other keys")
        engines = found.get("engines", ())
        if not isinstance(engines, list | tuple):
            raise InputError(f"{engines!r} are no engines: give a list of their numbers")
        return cls(**{**found, "engines": tuple(engines)})


class Mailbox:
    """The run's side: one process opens it."""

    def __init__(self, output_dir: Path) -> None:
        """Throw away what was asked of an earlier start; OSError if the directory cannot be written."""
        self._directory = output_dir / DIRECTORY
        self._directory.mkdir(exist_ok=True)
        for suffix in (QUESTION, ANSWER):
            for left in self._directory.glob(f"*{suffix}"):
                left.unlink(missing_ok=True)
        self._lock = (self._directory / LOCK).open("w", encoding="utf-8")
        for _ in range(NUM_TRIES):  # who asks has it for a moment
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOOK_S)  # on a file system without locks a question waits to learn that nobody is there

    def questions(self) -> list[tuple[str, ControlQuestion]]:
        """What has been asked since the last call, each under a name; what is no question is answered with why."""
        found = []
        paths: list[Path] = []
        with suppress(OSError):  # a file system that is away for a while
            paths = sorted(self._directory.glob(f"*{QUESTION}"))
        for path in paths:
            name = path.name.removesuffix(QUESTION)
            try:
                with path.open("rb") as file:
                    text = file.read(MAX_BYTES + 1)
                path.unlink()
                if len(text) > MAX_BYTES:
                    raise InputError(f"a question has at most {MAX_BYTES} bytes")
                found.append((name, ControlQuestion.of(json.loads(text))))
            except InputError as error:
                self.refuse(name, str(error))
            except (ValueError, RecursionError) as error:  # no JSON, or no text
                self.refuse(name, f"the question cannot be read ({error})")
            except OSError:  # it was taken back
                continue
        return found

    def answer(self, name: str, found: Mapping[str, Any]) -> None:
        self._write(name, {"answer": found})

    def refuse(self, name: str, why: str) -> None:
        self._write(name, {"error": why})

    def close(self) -> None:
        """Take no more questions."""
        for name, _ in self.questions():
            self.refuse(name, "the run has just ended")
        self._lock.close()

    def _write(self, name: str, found: Mapping[str, Any]) -> None:
        with suppress(OSError):  # a full disk: the one who asks is told so by the wait
            _put(self._directory / f"{name}{ANSWER}", found)


def ask(output_dir: Path, question: ControlQuestion, patience_s: float = PATIENCE_S) -> Any:
    """Ask a run, and wait for what it answers.

    Raises:
        InputError: no run goes on there that could be asked, it does not answer, or it says why not.
    """
    directory = output_dir / DIRECTORY
    _check(output_dir, directory)
    name = f"{time.monotonic_ns():020}_{secrets.token_hex(4)}"
    asked, answered = directory / f"{name}{QUESTION}", directory / f"{name}{ANSWER}"
    try:
        _put(asked, asdict(question))
    except OSError as error:
        raise InputError(
            f"{directory} cannot be written ({error.strerror}): ask as the user whose run it is"
        ) from error
    until = time.monotonic() + question.wait_s + patience_s
    try:
        while not answered.exists():
            if not _is_held(directory / LOCK) and not answered.exists():
                raise InputError(f"the run in {output_dir} has ended before it answered")
            if time.monotonic() > until:
                waited = f"{question.wait_s + patience_s:g} s"
                raise InputError(f"the run in {output_dir} has not answered in {waited}: see whether it goes on")
            time.sleep(LOOK_S)
        found = json.loads(answered.read_text(encoding="utf-8"))
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if "error" in found:
        raise InputError(found["error"])
    return found["answer"]


def _check(output_dir: Path, directory: Path) -> None:
    """Raise InputError if no run can be asked there."""
    if not (output_dir / "config.yaml").is_file():
        raise InputError(f"{output_dir} is not the output directory of a run: it has no config.yaml")
    if not (directory / LOCK).is_file():
        raise InputError(
            f"the run in {output_dir} has no fleet: its engines can be asked about with rollout.mode=pinned or "
            "in_flight, from its first step on"
        )
    if not _is_held(directory / LOCK):
        raise InputError(f"no run goes on in {output_dir}: it has ended, or is not yet at its first step")


def _is_held(lock: Path) -> bool:
    """Whether a process has the lock; where there are none, it may be."""
    try:
        with lock.open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _put(path: Path, found: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(found), encoding="utf-8")
    fresh.replace(path)
