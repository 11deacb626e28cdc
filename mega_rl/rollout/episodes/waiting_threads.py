"""Threads for functions that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class WaitingThreads(ThreadPoolExecutor):
    """Every call has a thread of its own that ends with it, and that the end of the process does not wait for.

    A pool of threads would be used up by calls that hang, and the interpreter waits for such a pool when it ends.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        result: Future[Any] = Future()

        def call() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - to whoever waits for it
                result.set_exception(error)

        threading.Thread(target=call, name="environment", daemon=True).start()
        return result
