"""Waiting for functions of the user's, plain or ``async``: whatever they raise, the event loop goes on."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any


class RaisedError(Exception):
    """A function raised something, `SystemExit` and the like included: its name and its words."""

    def __init__(self, error: BaseException) -> None:
        try:
            words = str(error)
        except Exception:  # noqa: BLE001 - its own __str__ raises
            words = ""
        super().__init__(f"{type(error).__name__}: {words}")


async def result_of(function: Callable[..., Any], timeout_s: float, *arguments: Any, **named: Any) -> Any:
    """What a function returns; a plain one runs in a thread, which it keeps if it runs out of time.

    Raises:
        TimeoutError: nothing came within the limit.
        RaisedError: the function raised.
    """

    def plain() -> tuple[Any, BaseException | None]:
        try:
            return function(*arguments, **named), None
        except BaseException as error:  # noqa: BLE001 - the user's code; a future cannot carry every exception
            return None, error

    async def coroutine() -> tuple[Any, BaseException | None]:
        try:
            return await function(*arguments, **named), None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # out of time, or the caller was cancelled
                raise
            return None, error  # of the function's own
        except BaseException as error:  # noqa: BLE001 - as above
            return None, error

    work = coroutine() if inspect.iscoroutinefunction(function) else asyncio.to_thread(plain)
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()  # not waited for: the user's code may catch it, and go on
    if not done:
        raise TimeoutError
    value, error = task.result()
    if error is not None:
        raise RaisedError(error)
    return value


async def made(make: Callable[..., Any], timeout_s: float, drop: Callable[[Any], None], *arguments: Any) -> Any:
    """``result_of`` for a value that somebody must close: what a plain function makes too late goes to ``drop``.

    Too late is after the limit, or when the caller was cancelled. ``drop`` runs in a thread. An ``async`` function is
    told of its end itself.
    """
    if inspect.iscoroutinefunction(make):
        return await result_of(make, timeout_s, *arguments)
    values: list[Any] = []
    first = threading.Lock()  # taken by the thread that has made the value, or by the caller that gives up: once

    def making() -> Any:
        values.append(make(*arguments))
        if not first.acquire(blocking=False):
            drop(values[0])
        return values[0]

    try:
        return await result_of(making, timeout_s)
    except BaseException:
        if not first.acquire(blocking=False):  # it was made in this moment
            threading.Thread(target=drop, args=values, name="dropped environment", daemon=True).start()
        raise
