"""Random input for the readers of what users give: few cases in the suite, many by ``make fuzz``.

Every case ends in one of two ways: it is accepted, or an ``InputError`` says in a sentence what is wrong. In the suite
the cases are the same every time, and the time limit of the suite is the only one. ``make fuzz`` sets
``MEGA_RL_FUZZ_EXAMPLES``: as many cases of each test, other ones every time, each within ``LIMIT``, and within
``CPU_LIMIT_S`` of a processor's time. At its end it says how many were accepted and refused, test by test.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import hypothesis
from hypothesis import strategies

from mega_rl.errors import MAX_LISTED, InputError

NUM_EXAMPLES = os.environ.get("MEGA_RL_FUZZ_EXAMPLES")
LIMIT = timedelta(seconds=60)  # of one case, also of one that waits, on a machine that does other things too
CPU_LIMIT_S = 1.0  # of one answer; what other programs do counts little in it
HANG_CPU_S = 20.0  # of one answer: it is taken for one that never comes
MAX_SENTENCE = 4000  # characters of one problem: a few values, and the choices for them

T = TypeVar("T")

TEXTS = strategies.one_of(
    strategies.text(max_size=20),
    strategies.text(strategies.characters(), max_size=5),  # halves of characters too
    strategies.sampled_from(
        ["", " ", "/", "..", "../x", "/dev/null", "/proc/x", "x" * 300, "x" * 5000, "a\0b", "\ud800", "${rollout.n}"]
        + ["${", "${x", "???", "null", "nan", "1e400", "true", "é\n", "{", "[", "*", "&a", "!!bool x", "%", "²", "auto"]
        + ["/etc", "x:y", "x:y:z", "os:system", "math.py:f", "[", "(", "a" * 40 + "!"]
    ),
)
SCALARS = strategies.one_of(
    strategies.none(),
    strategies.booleans(),
    strategies.integers(-2, 10),
    strategies.integers(),
    strategies.sampled_from([2**31, 2**32, 2**63, -(2**63), 10**30, 10**400]),
    strategies.floats(),
    TEXTS,
)
VALUES = strategies.recursive(
    SCALARS,
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def cases(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator above ``given``: the test runs with so many cases, or as many as ``make fuzz`` wants."""
    return hypothesis.settings(
        max_examples=int(NUM_EXAMPLES or number),
        derandomize=NUM_EXAMPLES is None,
        deadline=LIMIT if NUM_EXAMPLES else None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@dataclass
class Tally:
    """What became of the cases of one test; ``slowest_s`` is the longest answer, in seconds of a processor."""

    accepted: int = 0
    refused: int = 0
    traceback: int = 0
    slowest_s: float = 0.0


TALLIES: dict[str, Tally] = defaultdict(Tally)  # of each test, where ``make fuzz`` runs it


@cache
def keep_what_is_imported() -> None:
    """It is never garbage: no collection looks at all of it again in the time of an answer, which would be a second."""
    gc.collect()
    gc.freeze()


@contextmanager
def ended_if_it_hangs() -> Iterator[None]:
    """In ``make fuzz``, whose tests have no other limit, an answer that never comes is a failure with its stack."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"no answer after {HANG_CPU_S:.0f} s of a processor")

    if not NUM_EXAMPLES:
        yield
        return
    before = signal.signal(signal.SIGVTALRM, hangs)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def accepted_or_sentence(call: Callable[[], T]) -> T | None:
    """What ``call`` returns, or None if it refuses with an InputError whose text somebody can read."""
    if NUM_EXAMPLES:
        keep_what_is_imported()
    tally, begin = TALLIES[os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]], time.thread_time()
    try:
        with ended_if_it_hangs():
            result = call()
        tally.accepted += 1
        return result
    except InputError as error:
        tally.refused += 1
        first, *problems = str(error).split("\n  ")
        assert first and len(problems) <= MAX_LISTED + 1
        assert all(len(line) <= MAX_SENTENCE for line in (first, *problems)), str(error)[:10_000]
        str(error).encode()  # can be printed
        return None
    except Exception:
        tally.traceback += 1
        raise
    finally:
        seconds = time.thread_time() - begin
        tally.slowest_s = max(tally.slowest_s, seconds)
        assert not NUM_EXAMPLES or seconds <= CPU_LIMIT_S, f"the answer took {seconds:.1f} s of a processor"
