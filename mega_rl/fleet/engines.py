"""The life of an engine: started, loaded, serving, dead and started again, out of use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mega_rl.fleet.tickets import named


class Condition(Enum):
    STARTING = "starting"
    EMPTY = "without weights"
    LOADING = "loading weights"
    SERVING = "serving"
    GONE = "out of use"


@dataclass(frozen=True)
class EngineLimits:
    """What an engine may take, and how long."""

    slots: int = 256  # responses that an engine which does not say how many samples at a time
    progress_s: float = 600.0  # without a step while it has work
    start_s: float = 1800.0  # from the start of its process until it says so
    load_s: float = 1800.0  # for a load of weights, from when anything of them last came; it must say something
    restarts: int = 3  # of one engine; after so many it is out of use

    def __post_init__(self) -> None:
        assert self.slots >= 1 and self.restarts >= 0 and min(self.progress_s, self.start_s, self.load_s) > 0, self


@dataclass
class Engine:
    """What the scheduler knows of one engine."""

    number: int
    condition: Condition = Condition.STARTING
    life: int = 0
    num_restarts: int = 0
    version: int = -1  # of the weights that it holds; -1: none
    loading: int | None = None  # the version that it has been told to load
    bound: int | None = None  # the version that it takes as soon as it has no work: it is given no other
    load: int = 0  # responses under way
    slots: int = 0  # responses that it samples at a time; 0: it has not started yet
    num_steps: int = 0
    since_s: float = 0.0  # when it last showed progress, or was given something to do
    heard_s: float = 0.0  # when it last said anything, or was given something to do
    load_since_s: float = 0.0  # when it was last told to load weights, or more of them came to its node

    @property
    def serves(self) -> bool:
        """Whether it may be given work."""
        return self.condition is Condition.SERVING and self.loading is None

    @property
    def next_version(self) -> int:
        """The version that it has, or is on its way to."""
        if self.bound is not None:
            return self.bound
        return self.version if self.loading is None else self.loading

    def begin_life(self, life: int, now: float) -> None:
        self.condition, self.life, self.version = Condition.STARTING, life, -1
        self.loading, self.bound, self.load, self.num_steps, self.since_s = None, None, 0, 0, now
        self.heard_s = now

    def overdue(self, limits: EngineLimits, now: float) -> str | None:
        """What it has taken too long for, as a clause; None: for nothing.

        Weights may be late for reasons that are not the engine's, so while it loads it must only say something. It may
        sample on meanwhile, which is no progress of the load.
        """
        silent, stuck = now - self.heard_s, now - self.since_s
        if self.condition is Condition.STARTING:
            return f"{limits.start_s:g} s were not enough for it to start" if stuck > limits.start_s else None
        if self.loading is not None:
            doing = f"to load {named(self.loading)}"
            if silent > limits.progress_s:
                return f"it was {doing}, and has said nothing for {limits.progress_s:g} s"
            is_late = now - self.load_since_s > limits.load_s
            return f"{limits.load_s:g} s were not enough for it {doing}" if is_late else None
        if self.load and stuck > limits.progress_s:
            return f"{limits.progress_s:g} s were not enough for it to go on with {self.load} responses"
        return None
