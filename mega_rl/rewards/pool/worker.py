"""A reward worker: the process that runs reward functions, one call at a time. Imports no torch.

It reads calls from a socket and answers each with one line of JSON, so that nothing a reward does can make the trainer
unpickle or run anything. The pool cleans up whatever a reward does to the process: this file only makes that possible
(own session, memory limit, death with the parent, adoption of orphans) and notices leftovers.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from mega_rl.rewards.functions.registry import IMAGES, BoundReward, bind
from mega_rl.rewards.sandbox import launcher, sandbox

HEADER = struct.Struct("!Q")  # bytes of the pickled message that follows
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SCORE = "score"  # the entry of a dictionary that is the reward; the others are figures
MAX_FIGURES = 16  # of one value
MAX_FIGURE_NAME = 40  # characters
MAX_DETAIL_LENGTH = 300  # characters
MAX_REFUSAL_LENGTH = 4000  # characters; the text of an import error may be long
MAX_VALUE = 1e30  # its square and sums of many of them are still numbers: a larger one would end its group's deviation

# Why a value is not known; the metrics count by these.
RAISED = "raised"
TIMED_OUT = "timed_out"
EXITED = "exited"
OUT_OF_MEMORY = "out_of_memory"
NOT_A_NUMBER = "not_a_number"
LEFT_PROCESSES = "left_processes"
GARBLED = "garbled"
CAUSES = (RAISED, TIMED_OUT, EXITED, OUT_OF_MEMORY, NOT_A_NUMBER, LEFT_PROCESSES, GARBLED)

SAMPLE, ASYNC, BATCH = "sample", "async", "batch"  # how a reward takes its samples
KINDS = (SAMPLE, ASYNC, BATCH)

Sample = tuple[Any, ...]  # see BoundReward.arguments
T = TypeVar("T")
# A value, or a value with figures beside it (all under their names, the value under SCORE), or why it is not known:
# cause and detail.
Answer = float | dict[str, float] | tuple[str, str]


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to a worker."""

    rewards: tuple[tuple[str, dict[str, Any]], ...]  # name and options
    timeout_s: float
    memory_bytes: int


@dataclass(frozen=True)
class WorkerCall:
    number: int  # comes back with the answer, so that nothing else passes for it
    reward: int  # index in the setup
    samples: list[bytes]  # a pickled `Sample` each: nobody but the worker unpacks them


class WorkerProgress:
    """Where a worker stands in its call: memory that it shares with the pool, and that therefore outlives it.

    The size of the memory is sealed: if a reward could shrink it, reading the missing page would kill both processes.
    """

    SIZE = 16  # bytes: position in the call, an integer; when work on it began, CLOCK_MONOTONIC in seconds, a float

    def __init__(self, descriptor: int) -> None:
        """Map the sealed memory, and close the descriptor."""
        try:
            page = memoryview(mmap.mmap(descriptor, self.SIZE))
        finally:
            os.close(descriptor)
        self._position, self._since = page[:8].cast("q"), page[8:].cast("d")

    def begin(self, position: int) -> None:
        # One store each, the time first: whoever reads in between sees the sample before, with more time than it had.
        self._since[0] = time.monotonic()
        self._position[0] = position

    def read(self) -> tuple[int, float]:
        return self._position[0], self._since[0]


class UnfitError(Exception):
    """The process must not serve another call: cause and detail."""


def main(channel_fd: int, parent_pid: int, progress_fd: int) -> None:
    """Serve calls until the parent closes its end or dies."""
    isolate(parent_pid)
    channel, progress = socket.socket(fileno=channel_fd), WorkerProgress(progress_fd)
    setup: WorkerSetup = _receive(channel)
    resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_bytes, setup.memory_bytes))
    try:
        rewards = [bind(name, options) for name, options in setup.rewards]
    except ValueError as error:
        _send(channel, {"refused": str(error)[:MAX_REFUSAL_LENGTH]})
        return
    kinds = [BATCH if r.is_batch else ASYNC if r.is_async else SAMPLE for r in rewards]
    _send(channel, {"ready": kinds} | ({IMAGES: True} if any(r.takes_images for r in rewards) else {}))
    gc.freeze()  # what is loaded now stays: collections need not look at it again
    while True:
        call: WorkerCall = _receive(channel)
        try:
            samples: list[Sample] = [pickle.loads(sample) for sample in call.samples]
            answers = answer(rewards[call.reward], samples, setup.timeout_s, progress)
            _send(channel, {"number": call.number, "answers": answers})
        except UnfitError as error:
            _send(channel, {"number": call.number, "unfit": error.args})
            return


def isolate(parent_pid: int) -> None:
    """Die with the parent, adopt what descendants leave behind, and connect standard input and output to nothing.

    The kernel sends the death signal when the *thread* that started this process ends: the pool starts it from a
    thread that lives as long as it does.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before the signal was asked for
        os._exit(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer(reward: BoundReward, samples: list[Sample], timeout_s: float, progress: WorkerProgress) -> list[Answer]:
    """One answer per sample.

    Raises:
        UnfitError: memory ran out, or processes of the reward are left.
    """
    if reward.is_batch:
        return _alone(lambda: _answer_batch(reward, samples))
    if reward.is_async:
        return _alone(lambda: _run(_answer_together(reward, samples, timeout_s)))
    answers: list[Answer] = []
    for position, sample in enumerate(samples):
        progress.begin(position)
        answers.append(_alone(partial(_call_one, reward, sample)))
    return answers


def _alone(call: Callable[[], T]) -> T:
    """The result of a call that may not leave processes behind."""
    process = os.getpid()
    try:
        result = call()
    finally:
        if os.getpid() != process:  # a child that the reward forked came back out of it
            os._exit(0)
    if _has_children():
        raise UnfitError(LEFT_PROCESSES, "left child processes running")
    return result


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    import asyncio  # twice the time that a worker takes to start, and most rewards do without

    return asyncio.run(coroutine)


def _answer_batch(reward: BoundReward, samples: list[Sample]) -> list[Answer]:
    def call() -> Any:
        result = reward.function(**reward.arguments(list(samples)))
        return _run(result) if reward.is_async else result

    failure: Answer | None = None
    values: list[Any] = []
    try:
        values = list(call())
        if len(values) != len(samples):
            failure = NOT_A_NUMBER, f"returned {len(values)} values for {len(samples)} samples"
    except BaseException as error:  # the user's code: whatever it raises costs the sample that it raises on
        failure = _failure(error)
    if failure is not None and len(samples) > 1:
        return [answer for sample in samples for answer in _answer_batch(reward, [sample])]
    if failure is not None:
        return [failure]
    return [_checked(value) for value in values]


async def _answer_together(reward: BoundReward, samples: list[Sample], timeout_s: float) -> list[Answer]:
    import asyncio

    async def one(sample: Sample) -> Answer:
        try:
            value = await asyncio.wait_for(reward.function(**reward.arguments([sample])), timeout_s)
        except TimeoutError:
            return TIMED_OUT, f"gave no value within {timeout_s:g} s"
        except BaseException as error:  # as above; cancellation too is the reward's own doing here
            return _failure(error)
        return _checked(value)

    return list(await asyncio.gather(*(one(sample) for sample in samples)))


def _call_one(reward: BoundReward, sample: Sample) -> Answer:
    try:
        return _checked(reward.function(**reward.arguments([sample])))
    except BaseException as error:  # the user's code: whatever it raises costs this sample only
        return _failure(error)


def _checked(value: Any) -> Answer:
    try:
        if isinstance(value, dict) and SCORE in value:
            return _with_figures(value)
        if isinstance(value, Real) and math.isfinite(value) and abs(float(value)) <= MAX_VALUE:
            return float(value)
        return NOT_A_NUMBER, f"returned {value!r:.60}"[:MAX_DETAIL_LENGTH]
    except BaseException as error:  # an object of the user's own
        return _failure(error)


def _with_figures(value: dict[Any, Any]) -> Answer:
    """The score of a dictionary and its other plain numbers, at most `MAX_FIGURES` of them; text and lists are left."""
    score = _checked(value[SCORE])
    if not isinstance(score, float):
        return score
    found = {SCORE: score}
    for name, figure in value.items():
        checked = _checked(figure) if isinstance(figure, Real) else None
        is_name = isinstance(name, str) and name.isidentifier() and len(name) <= MAX_FIGURE_NAME
        if is_name and isinstance(checked, float) and len(found) <= MAX_FIGURES:
            found.setdefault(name, checked)
    return found if len(found) > 1 else score


def _failure(error: BaseException) -> Answer:
    if isinstance(error, MemoryError):
        raise UnfitError(OUT_OF_MEMORY, "ran out of memory") from None
    try:
        return RAISED, f"raised {type(error).__name__}: {error}"[:MAX_DETAIL_LENGTH]
    except BaseException:  # its own __str__ raises
        return RAISED, f"raised {type(error).__name__}"[:MAX_DETAIL_LENGTH]


def _has_children() -> bool:
    """Whether a child still runs, but for those that programs are forked from; the ended ones are reaped."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                kept = sandbox.zygote_pids()
                return not kept or not kept.issuperset(launcher.children(os.getpid()))
        except ChildProcessError:
            return False


def _receive(channel: socket.socket) -> Any:
    (size,) = HEADER.unpack(_read(channel, HEADER.size))
    return pickle.loads(_read(channel, size))


def _read(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:  # the parent closed its end, or died
            os._exit(0)
        data += part
    return bytes(data)


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")
