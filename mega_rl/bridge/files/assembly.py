"""An output directory whose files are laid out before their content arrives: resumable, and named only when whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mega_rl.errors import InputError
from mega_rl.observe.heartbeat import HEART

JOB = ".job.json"  # a file of the unfinished directory: which job it belongs to, and how far that job is
LOCK = ".lock"


@dataclass(frozen=True)
class FileImage:
    """A file before its tensors arrive: its size and what is known of its bytes; the rest reads as zero."""

    size: int  # bytes
    literals: tuple[tuple[int, bytes], ...]  # (offset, content)

    def create(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for offset, content in self.literals:
                file.seek(offset)
                file.write(content)
            file.truncate(self.size)


def literal_file(content: bytes | str) -> FileImage:
    data = content.encode() if isinstance(content, str) else content
    return FileImage(len(data), ((0, data),))


def fsync(path: Path) -> None:
    """Wait until the file or directory is on its disk, however slow that is: every one is progress of this process."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    HEART.mark()


def disk_error(out_dir: Path, error: OSError) -> InputError:
    return InputError(f"{out_dir}: cannot write ({error.strerror or error}); free the disk or choose another")


class Assembly:
    """One output directory under way: ``.NAME.unfinished`` beside ``out_dir`` until ``publish`` renames it.

    A process that dies leaves the unfinished directory, and the same job continues it: ``num_done`` counts the steps
    that are in the files. After a crash of the machine, which may lose written pages, it starts again.

    Example::

        with Assembly("out", job, images) as assembly:
            for number in range(assembly.num_done, num_steps):
                ...  # write into assembly.root
                assembly.record(number + 1)
            assembly.publish()
    """

    def __init__(self, out_dir: str | Path, job: Mapping[str, Any], images: Mapping[str, FileImage]) -> None:
        """
        Args:
            job: JSON that tells this job from any other; equal jobs must write equal bytes.
            images: every file by its relative path.

        Raises:
            InputError: ``out_dir`` exists, another job has left or is writing its unfinished directory, the disk.
        """
        self.out_dir, self._images = Path(os.path.abspath(out_dir)), dict(images)
        if os.path.lexists(self.out_dir):
            raise InputError(f"{self.out_dir} exists; choose another output directory or remove it")
        self.root = self.out_dir.parent / f".{self.out_dir.name}.unfinished"
        self._job = json.loads(json.dumps({**job, "boot": _boot_id()}))
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise disk_error(self.out_dir, error) from error
        try:
            self._take_lock()
            self.num_done = self._continue_or_create()
        except BaseException:
            os.close(self._lock)
            raise

    def record(self, num_done: int) -> None:
        """The first ``num_done`` steps are in the files, as far as a killed process is concerned."""
        self.num_done = num_done
        content = json.dumps({"job": self._job, "num_done": num_done})
        fresh = self.root / f"{JOB}.new"
        try:
            fresh.write_text(content, encoding="utf-8")
            fresh.replace(self.root / JOB)
        except OSError as error:
            raise self.disk_error(error) from error

    @property
    def names(self) -> list[str]:
        """The files, by relative path."""
        return list(self._images)

    def add(self, name: str, image: FileImage) -> None:
        """One more file, written at once."""
        try:
            image.create(self.root / name)
        except OSError as error:
            raise self.disk_error(error) from error
        self._images[name] = image

    def publish(self) -> None:
        """Make everything durable and give the directory its name."""
        try:
            directories = {self.root}
            for name in self._images:
                fsync(self.root / name)
                directories.add((self.root / name).parent)
            for name in (JOB, LOCK):
                (self.root / name).unlink()
            for directory in directories:
                fsync(directory)
            os.rename(self.root, self.out_dir)
            fsync(self.out_dir.parent)
        except OSError as error:
            raise self.disk_error(error) from error

    def disk_error(self, error: OSError) -> InputError:
        return InputError(
            f"{self.out_dir}: cannot write ({error.strerror or error}); free the disk and run the same command to "
            f"continue, or remove {self.root}"
        )

    def __enter__(self) -> Assembly:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self.out_dir}: another process is writing it; wait for it or choose another") from None

    def _continue_or_create(self) -> int:
        job_file = self.root / JOB
        if job_file.is_file():
            found = json.loads(job_file.read_text(encoding="utf-8"))
            if {**found["job"], "boot": None} != {**self._job, "boot": None}:
                raise InputError(
                    f"{self.root} is left from another conversion to {self.out_dir.name}; remove it, or run the "
                    "command that it is from to finish it"
                )
            if found["job"] == self._job:
                return int(found["num_done"])
        try:
            for leftover in self.root.iterdir():
                if leftover.name != LOCK:
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            free, needed = shutil.disk_usage(self.root).free, sum(image.size for image in self._images.values())
            if free < needed:
                raise InputError(
                    f"{self.out_dir}: {needed:,} bytes are needed and {free:,} free; free the disk or choose another"
                )
            for name, image in self._images.items():
                image.create(self.root / name)
        except OSError as error:
            raise self.disk_error(error) from error
        self.record(0)
        return 0


def _boot_id() -> str:
    """Changes with every start of the machine; empty if the system does not tell."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else ""
