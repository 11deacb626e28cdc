"""The output directory of a run: one run at a time writes into it, and what is there is resumed from or set aside."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mega_rl.config import RunConfig, save_resolved
from mega_rl.errors import InputError
from mega_rl.megatron import checkpoint
from mega_rl.megatron.checkpoint import free_bytes
from mega_rl.parallel.layout import ParallelLayout

CHECKPOINTS = "checkpoints"  # under the output directory
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR)
LOCK = ".lock"  # a file of the output directory that stays; which process has it locked is what counts
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # what file systems without locks answer


@contextmanager
def writing_to(output_dir: Path) -> Iterator[None]:
    """Wraps a block that writes there: if the disk is full or cannot be written, the error is one sentence.

    Raises:
        InputError: in the place of the OSError.
    """
    try:
        yield
    except OSError as error:
        is_there = error.filename is None or Path(os.fsdecode(error.filename)).is_relative_to(output_dir)
        if error.errno not in DISK_ERRORS or not is_there:
            raise
        raise InputError(
            f"trainer.output_dir={output_dir}: cannot write {error.filename or 'there'} ({error.strerror}, "
            f"{free_bytes(output_dir):,} bytes free); free the disk or choose another directory"
        ) from error


class OutputLock:
    """The output directory belongs to this process until ``release``, or until the process has ended, however it ends.

    A forked checkpoint writer shares the lock: a run that begins while one still writes is refused too.
    """

    def __init__(self, output_dir: Path) -> None:
        """
        Raises:
            InputError: another run has the directory.
        """
        self.warnings: list[str] = []  # a sentence if the file system has no locks
        self._file = (output_dir / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "a process that is starting"
            self._file.close()
            raise InputError(
                f"trainer.output_dir={output_dir} is in use by another run ({holder}); wait for its end, end it, or "
                "choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.warnings.append(
                f"warning: {output_dir / LOCK} cannot be locked ({error.strerror}): nothing keeps a second run out"
            )
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def take_output(config: RunConfig, layout: ParallelLayout) -> tuple[OutputLock, Path | None, list[str]]:
    """Make the output directory this run's own; only one process of the run calls it.

    Returns:
        The lock, the checkpoint to resume from, and sentences to tell the user.

    Raises:
        InputError: another run has it, or there is no checkpoint that can be resumed from; nothing is changed then.
    """
    output_dir = Path(config.trainer.output_dir)
    with writing_to(output_dir):
        return _take(config, output_dir, layout)


def _take(config: RunConfig, output_dir: Path, layout: ParallelLayout) -> tuple[OutputLock, Path | None, list[str]]:
    output_dir.mkdir(parents=True, exist_ok=True)
    lock = OutputLock(output_dir)
    resume, warnings = checkpoint.find(output_dir / CHECKPOINTS, config.checkpoint.resume)
    if resume is not None:
        checkpoint.check_layout(resume, layout)
    checkpoint.set_aside(output_dir / CHECKPOINTS, after=resume)
    save_resolved(config, output_dir / "config.yaml")
    return lock, resume, [*lock.warnings, *warnings]
