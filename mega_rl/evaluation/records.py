"""The directory of an evaluation: one JSON line per problem, appended as it is answered, and put in order at the end.

While it is under way, every rank that has answers appends to a file of its own under ``parts``, in the order in which
they come. A problem is there with all its answers or not at all: a line is one write, and what a killed process has
left half-written is cut off by the next one, which answers only what is missing. The last step makes ``results.jsonl``
of all lines, by the problems' numbers; so it does not depend on when and how often the evaluation was cut, nor on how
many engines answered.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from mega_rl.data.rows.rows import atomic_path
from mega_rl.errors import InputError, shown
from mega_rl.evaluation.evaluate import AnsweredPrompt, EvaluationRow
from mega_rl.rollout.collect.records import row_of_outcome

RESULTS, SUMMARY, SETTINGS, PARTS = "results.jsonl", "summary.json", "settings.json", "parts"
LOCK = ".lock"
GREEDY, SAMPLED = "greedy", "sampled"  # kinds of responses


class _Line(NamedTuple):
    """Where a problem stands."""

    file: Path
    start: int  # bytes
    size: int  # bytes


def record(answered: AnsweredPrompt) -> dict[str, Any]:
    """What is kept of a problem and its answers; of an episode also who said what, and how it ended.

    ``token_ids`` of an episode are those that the model wrote; ``prompt`` is without what its environment began with.
    ``images`` is there only if the prompt has pictures: their keys and places.
    """
    prompt = answered.prompt
    images = {"images": [asdict(image) for image in prompt.images]} if prompt.images else {}
    return {
        "problem": prompt.index,
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "ground_truth": prompt.ground_truth,
        "num_prompt_tokens": len(prompt.token_ids),
        **images,
        "responses": [_response(row) for row in answered.rows],
    }


def _response(row: EvaluationRow) -> dict[str, Any]:
    trajectory, score = row.trajectory, row.score
    response = {
        "kind": GREEDY if row.is_greedy else SAMPLED,
        "sample": trajectory.sample_index,
        "seed": row.seed,
        "text": trajectory.text,
        "token_ids": trajectory.sampled_ids.tolist(),
        "num_tokens": trajectory.num_sampled,
        "finish_reason": trajectory.finish_reason,
        "score": score.value if score.is_known else None,
        "parts": dict(score.parts),
        "unknown": {name: f"{unknown.cause}: {unknown.detail}" for name, unknown in score.unknown.items()},
    }
    if trajectory.episode is None:
        return response
    summary = trajectory.summary()
    return response | {
        "turns": [{"role": turn.role, "text": turn.text} for turn in trajectory.turns[1:]],
        "num_reply_tokens": summary.num_tokens - summary.num_prompt - summary.num_sampled,
        "episode": row_of_outcome(trajectory.episode),
    }


class Directory:
    """The output directory, held by this process until it ends."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Make it, or go on in it.

        Args:
            settings: everything that an answer or its score depends on, as JSON has it.

        Raises:
            InputError: another process has it, it holds something else, or an evaluation with other settings.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._refuse_strangers()
            self._lock = _locked(path)
            self._compare(settings)
            if not self.is_complete:
                (path / PARTS).mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {path} cannot be written ({error.strerror}): choose another directory") from error

    def _refuse_strangers(self) -> None:
        names = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
        if names and SETTINGS not in names:
            raise InputError(
                f"--out {self.path} is not empty and no evaluation (it has {shown(names[0])}): choose another directory"
            )

    def _compare(self, settings: Mapping[str, Any]) -> None:
        file = self.path / SETTINGS
        if not file.is_file():
            with atomic_path(file) as fresh:
                fresh.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
            return
        there, here = dict(_leaves(read_settings(self.path))), dict(_leaves(json.loads(json.dumps(settings))))
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise InputError(
                    f"--out {self.path} holds an evaluation with other settings: {name} is {shown(there.get(name))} "
                    f"there and {shown(here.get(name))} here; choose another directory, or remove this one"
                )

    @property
    def is_complete(self) -> bool:
        return (self.path / RESULTS).is_file()

    def done(self) -> set[int]:
        """The problems that are answered; what a killed process left half-written is cut off."""
        return set(self._lines())

    def merge(self) -> None:
        """Write the results in the order of the problems' numbers, and remove the parts."""
        lines = self._lines()
        with atomic_path(self.path / RESULTS) as fresh, fresh.open("wb") as out:
            for index in sorted(lines):
                file, start, size = lines[index]
                with file.open("rb") as part:
                    part.seek(start)
                    out.write(part.read(size))
        shutil.rmtree(self.path / PARTS)

    def _lines(self) -> dict[int, _Line]:
        found: dict[int, _Line] = {}
        for file in sorted((self.path / PARTS).glob("*.jsonl")):
            start = 0
            with file.open("rb") as lines:
                for line in lines:
                    if not line.endswith(b"\n") or (index := _problem(line)) is None:
                        break
                    found[index] = _Line(file, start, len(line))
                    start += len(line)
            if start < file.stat().st_size:
                os.truncate(file, start)
        return found

    def release(self) -> None:
        self._lock.close()


def _locked(path: Path) -> TextIO:
    lock = (path / LOCK).open("a", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise InputError(f"--out {path} is in use by another evaluation: wait for its end, or end it") from None
    except OSError:  # a file system without locks
        pass
    return lock


def _problem(line: bytes) -> int | None:
    """The number of the problem of a line; None for a line that was not written to its end."""
    try:
        index = json.loads(line)["problem"]
    except (ValueError, KeyError, TypeError):
        return None
    return index if isinstance(index, int) else None


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of everything in it that is no section."""
    if not isinstance(tree, dict) or not tree:
        yield name, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


class RecordPart:
    """The file of one rank, to which it appends."""

    def __init__(self, directory: Path, rank: int) -> None:
        path = directory / PARTS / f"rank_{rank:05d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.num_problems = 0
        self.num_tokens = 0  # sampled

    def append(self, answered: AnsweredPrompt) -> None:
        """Raises OSError if there is no room for the whole line."""
        line = json.dumps(record(answered), ensure_ascii=False).encode() + b"\n"
        written = os.write(self._file, line)
        if written < len(line):
            raise OSError(f"{written} of {len(line)} bytes were written: the disk is full")
        self.num_problems += 1
        self.num_tokens += sum(row.trajectory.num_sampled for row in answered.rows)

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)


def read_settings(directory: Path) -> dict[str, Any]:
    """
    Raises:
        InputError: the directory holds no evaluation.
    """
    try:
        found = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{directory} holds no evaluation ({SETTINGS} cannot be read): name one") from error
    assert isinstance(found, dict)
    return found


def read_results(directory: Path) -> Iterator[dict[str, Any]]:
    """The records of a complete evaluation, in order; without the token ids, which take most of the memory.

    Raises:
        InputError: the evaluation is not complete, or its file is damaged.
    """
    try:
        with (directory / RESULTS).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    found = json.loads(line)
                    for response in found["responses"]:
                        del response["token_ids"]
                except (ValueError, KeyError, TypeError) as error:
                    raise InputError(f"{directory / RESULTS} line {number} is damaged: evaluate again") from error
                yield found
    except FileNotFoundError:
        raise InputError(f"{directory} has no {RESULTS}: finish it with the command that began it") from None
