"""The output directory of a run: one run at a time writes into it, and what is there is resumed from or set aside."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from mega_rl.bridge.files.torch_dist.visible import patiently
from mega_rl.config import RunConfig, save_resolved
from mega_rl.errors import InputError
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import free_bytes, sweep
from mega_rl.parallel.collectives import broadcast_object, gather_objects, is_first, own_name, together
from mega_rl.parallel.layout import ParallelLayout

CHECKPOINTS = "checkpoints"  # under the output directory
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR)
PROBE = ".probe_"  # begins the name of the directory in which the ranks look for each other as a run begins
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
            f"trainer.output_dir={output_dir}: {own_name()} cannot write {error.filename or 'there'} "
            f"({error.strerror}, {free_bytes(output_dir):,} bytes free); free the disk or choose another directory"
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


def take_output(
    config: RunConfig, layout: ParallelLayout, in_memory: int | None = None
) -> tuple[OutputLock | None, Path | None, list[str]]:
    """Make the output directory this run's own. All ranks call it.

    Args:
        in_memory: the step that the run goes on from without a checkpoint, if it does; then none is read.

    Returns:
        Rank 0's lock, the checkpoint to resume from, and sentences to tell the user.

    Raises:
        InputError: another run has it, the ranks do not share it, one cannot write there, or there is no checkpoint
            that can be resumed from; no checkpoint is touched then. The same sentence on all ranks.
    """
    output_dir = Path(config.trainer.output_dir)
    lock: OutputLock | None = None
    with together("preparing the output directory"), writing_to(output_dir):
        if is_first():
            output_dir.mkdir(parents=True, exist_ok=True)
            lock = OutputLock(output_dir)
            for left_over in output_dir.glob(f"{PROBE}*"):
                shutil.rmtree(left_over, ignore_errors=True)
            sweep(output_dir / CHECKPOINTS)
    check_shared(output_dir)
    choice = "never" if in_memory is not None else config.checkpoint.resume
    resume, warnings = checkpoint.find(output_dir / CHECKPOINTS, choice)
    with together("preparing the output directory"), writing_to(output_dir):
        if is_first():
            if resume is not None:
                checkpoint.check_layout(resume, layout)
            checkpoint.set_aside(output_dir / CHECKPOINTS, after=resume, step=in_memory or 0)
            save_resolved(config, output_dir / "config.yaml")
    return lock, resume, [*(lock.warnings if lock is not None else []), *warnings]


def check_shared(output_dir: Path) -> None:
    """Prove that all ranks have the same directory and can write into it. All ranks call it.

    Every rank reads what rank 0 writes, and rank 0 what every rank writes.

    Raises:
        InputError: they have not; the same sentence on all ranks.
    """
    names = gather_objects(own_name())
    token = broadcast_object(uuid.uuid4().hex)
    place = output_dir / f"{PROBE}{token}"
    rank = dist.get_rank() if dist.is_initialized() else 0
    try:
        with together("looking at the output directory"), writing_to(output_dir):
            if is_first():
                place.mkdir()
                _leave(place / "0", token)
        with together("looking at the output directory"), writing_to(output_dir):
            if not is_first():
                _expect(place / "0", token, output_dir, names[0])
                _leave(place / str(rank), token)
        with together("looking at the output directory"):
            for other, name in enumerate(names) if is_first() else ():
                _expect(place / str(other), token, output_dir, name)
    finally:
        if is_first():
            shutil.rmtree(place, ignore_errors=True)


def _leave(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _expect(path: Path, text: str, output_dir: Path, writer: str) -> None:
    def problem() -> str | None:
        try:
            os.listdir(output_dir)  # what asks the server of a network file system anew
            return None if path.read_text() == text else "something else is there"
        except OSError as error:
            return error.strerror or str(error)

    found = patiently(problem)
    if found is not None:
        raise InputError(
            f"trainer.output_dir={output_dir} is not one directory for all ranks: {own_name()} does not see there what "
            f"{writer} wrote ({found}); put it on a file system that all nodes share"
        )
