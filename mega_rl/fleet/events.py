"""The words between the scheduler and whoever carries its decisions out.

An engine is a number, and each of its processes a *life* of it (0, 1, ...): what is said of an earlier life is late,
and has no effect.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mega_rl.fleet.tickets import Key

# What the scheduler is told.


class Started(NamedTuple):
    """The engine's process is there; it has no weights yet."""

    engine: int
    life: int
    slots: int | None = None  # responses that it samples at a time; None: it does not say


class Loaded(NamedTuple):
    """The engine holds these weights, and they have been proved."""

    engine: int
    life: int
    version: int


class Arriving(NamedTuple):
    """More of the weights that the engine was told to load has come to its node."""

    engine: int
    life: int
    version: int


class Missed(NamedTuple):
    """The weights that the engine was to load are gone, newer ones being there."""

    engine: int
    life: int
    version: int
    is_torn: bool = False  # it holds parts of several versions, and makes no step; False: what it held before


class Answered(NamedTuple):
    """A response has ended."""

    engine: int
    life: int
    attempt: int  # of the ``Issue``
    sample: int
    oldest_version: int  # of the weights that sampled its tokens
    result: Any


class Advanced(NamedTuple):
    """A part of a response, for an engine that dies before its end; of pinned tickets it is only progress."""

    engine: int
    life: int
    attempt: int
    sample: int
    prefix: Any  # all tokens so far, and the versions of the weights that sampled them


class Pulsed(NamedTuple):
    """The engine is alive and has made so many steps in this life."""

    engine: int
    life: int
    num_steps: int


class Died(NamedTuple):
    engine: int
    life: int
    why: str


class Scored(NamedTuple):
    """A group has its scores, and is learned from or dropped."""

    key: Key
    is_kept: bool


class Published(NamedTuple):
    """Step ``version - 1`` has been trained, and its weights can be fetched."""

    version: int


class Validate(NamedTuple):
    """The weights of a version as validation has them can be fetched, until ``Validated``: answer so many prompts."""

    version: int
    num_groups: int  # prompts
    group_size: int  # responses to each


class Saved(NamedTuple):
    """The trainer has saved its state at the newest version, which may not be published yet; ``Commit`` follows with
    what belongs to it."""

    version: int


class Joined(NamedTuple):
    """One more engine may be used: there is room for it."""

    engine: int


class Left(NamedTuple):
    """An engine is taken out of use; what it has in hand is sampled again by others."""

    engine: int


class Ticked(NamedTuple):
    """Nothing but time has passed; limits of time are looked at."""


Event = (
    Started
    | Loaded
    | Arriving
    | Missed
    | Answered
    | Advanced
    | Pulsed
    | Died
    | Scored
    | Published
    | Validate
    | Saved
    | Joined
    | Left
    | Ticked
)

# What the scheduler decides.


class Start(NamedTuple):
    """Start a process for the engine, where its last one was."""

    engine: int
    life: int


class Kill(NamedTuple):
    """End the engine's process, whatever it does; it is not waited for."""

    engine: int
    life: int
    why: str


class Release(NamedTuple):
    """The engine, which has been killed, is not started again: others may have its room."""

    engine: int


class Load(NamedTuple):
    """Fetch these weights, prove them and say ``Loaded``, or ``Missed``; requests that run go on with them."""

    engine: int
    life: int
    version: int


class Issue(NamedTuple):
    """Sample these responses."""

    engine: int
    life: int
    key: Key
    samples: tuple[int, ...]
    attempt: int  # different for every issue of a run's life
    prefixes: tuple[Any, ...]  # of each sample what an earlier engine had of it, or None


class ScoreGroup(NamedTuple):
    """All responses of a group have ended: score them and say ``Scored``."""

    key: Key
    results: tuple[Any, ...]


class Deliver(NamedTuple):
    """A step's batch is whole: its kept groups in the order of their tickets. Steps are delivered in order, once."""

    step: int
    groups: tuple[tuple[Key, tuple[Any, ...]], ...]


class Validated(NamedTuple):
    """A validation is whole: its groups in the order of their tickets. No engine will be asked to load its weights."""

    version: int
    groups: tuple[tuple[Key, tuple[Any, ...]], ...]


class Forget(NamedTuple):
    """No engine will be asked to load weights that are older."""

    oldest_version: int


class Commit(NamedTuple):
    """With this the saved state of a version is a checkpoint."""

    version: int
    state: dict[str, Any]


class Finish(NamedTuple):
    """There is nothing more to decide."""

    is_failure: bool
    sentence: str


Decision = Start | Kill | Release | Load | Issue | ScoreGroup | Deliver | Validated | Forget | Commit | Finish
