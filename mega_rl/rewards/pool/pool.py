"""A pool of reward workers: samples in, answers out, and whatever a reward does to its worker costs its sample only."""

from __future__ import annotations

import itertools
import pickle
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from mega_rl.rewards.pool.dispatch import PoolError, RewardDispatcher, SubmittedWork
from mega_rl.rewards.pool.worker import Answer, Sample, WorkerSetup
from mega_rl.rewards.sandbox.scratch import sweep

Answers = list[list[Answer]]  # [reward that was asked][sample]


class Pool(Protocol):
    """Reward workers, of this process or of another one of its machine."""

    @property
    def takes_images(self) -> bool:
        """Whether a reward takes the pictures of prompts."""
        ...

    def submit(self, samples: Sequence[bytes], rewards: Sequence[int] | None = None) -> Future[Answers]:
        """Start to score packed samples; what is submitted earlier is begun earlier, and nothing waits for its end.

        Args:
            rewards: the places, among those that the workers have, of the rewards that score them; None: all do.

        The future raises:
            PoolError: workers cannot be replaced, or their owner ended.
        """
        ...

    def close(self) -> None: ...


def pack(sample: Sample) -> bytes:
    """A sample as it goes to a worker: only the worker unpacks it."""
    return pickle.dumps(sample)


class WorkerPool:
    """Workers that load all rewards once and live until `close`, garbage collection or the end of this process.

    A thread of its own starts, feeds and watches them: they die with that thread.
    """

    def __init__(self, setup: WorkerSetup, num_workers: int) -> None:
        """Start the workers and wait until all have loaded the rewards.

        Raises:
            PoolError: a reward is refused, or its import ends or hangs the worker.
        """
        sweep()
        self._numbers = itertools.count()
        self._dispatcher = RewardDispatcher(setup)
        started: Future[None] = Future()
        thread = threading.Thread(target=_serve, args=(self._dispatcher, num_workers, started), daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _close, self._dispatcher, thread)
        started.result()

    @property
    def takes_images(self) -> bool:
        """See `Pool.takes_images`."""
        return self._dispatcher.takes_images

    def submit(self, samples: Sequence[bytes], rewards: Sequence[int] | None = None) -> Future[Answers]:
        """See `Pool.submit`."""
        work = SubmittedWork(next(self._numbers), samples, rewards)
        self._dispatcher.put(work)
        return work.result


def _serve(dispatcher: RewardDispatcher, num_workers: int, started: Future[None]) -> None:
    error: Exception = PoolError("rewards: the workers were closed")
    try:
        dispatcher.start(num_workers)
        started.set_result(None)
        dispatcher.serve()
    except Exception as raised:  # noqa: BLE001 - whoever waits for an answer raises it
        error = raised
    dispatcher.end(error)
    if not started.done():
        started.set_exception(error)


def _close(dispatcher: RewardDispatcher, thread: threading.Thread) -> None:
    dispatcher.close()
    if thread is not threading.current_thread():  # whose garbage collection may have come to the pool
        thread.join()
