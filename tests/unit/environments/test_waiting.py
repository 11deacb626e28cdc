"""Values that must be closed: each goes to whoever waits for it, or is dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from mega_rl.environments.waiting import RaisedError, made

PATIENT_S = 120.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_on_time_it_is_not_dropped() -> None:
    dropped: list[str] = []
    assert asyncio.run(made(lambda a, b: a + b, PATIENT_S, dropped.append, "a ", "room")) == "a room"
    assert dropped == []


def test_after_the_limit_it_is_dropped() -> None:
    may_end, dropped = threading.Event(), list[str]()

    def slow() -> str:
        may_end.wait()
        return "a room"

    async def given_up() -> None:
        with pytest.raises(TimeoutError):
            await made(slow, 0.05, dropped.append)
        assert dropped == []
        may_end.set()

    asyncio.run(given_up())
    until(lambda: dropped == ["a room"])


def test_what_is_made_for_a_caller_that_was_cancelled_is_dropped() -> None:
    has_begun, may_end, dropped = threading.Event(), threading.Event(), list[str]()

    def slow() -> str:
        has_begun.set()
        may_end.wait()
        return "a room"

    async def cancelled() -> None:
        task = asyncio.ensure_future(made(slow, PATIENT_S, dropped.append))
        await asyncio.to_thread(has_begun.wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert dropped == []
        may_end.set()

    asyncio.run(cancelled())
    until(lambda: dropped == ["a room"])


def test_cancelled_at_any_moment_it_is_taken_or_dropped_once() -> None:
    begun, taken, dropped = list[int](), list[int](), list[int]()

    def make(number: int) -> int:
        begun.append(number)
        return number

    async def waiting(number: int) -> None:
        taken.append(await made(make, PATIENT_S, dropped.append, number))

    async def cancelled() -> None:
        for number in range(300):
            task = asyncio.ensure_future(waiting(number))
            for _ in range(number % 6):
                await asyncio.sleep(0)
            await asyncio.sleep(number % 7 / 20_000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    until(lambda: sorted(taken + dropped) == sorted(begun))


def test_what_raises_and_what_is_async_leave_nothing_to_drop() -> None:
    dropped: list[object] = []

    def fails() -> None:
        raise SystemExit(3)

    async def later() -> str:
        return "a room"

    with pytest.raises(RaisedError, match="SystemExit: 3"):
        asyncio.run(made(fails, PATIENT_S, dropped.append))
    assert asyncio.run(made(later, PATIENT_S, dropped.append)) == "a room"
    assert dropped == []
