"""What a check answers, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mega_rl.doctor.host import Host
from mega_rl.platform.contract.base import ProcessRole
from mega_rl.platform.cpu import CpuPlatform
from mega_rl.platform.cuda import CudaPlatform
from mega_rl.platform.npu import NpuPlatform

CPU, CUDA, NPU = CpuPlatform.name, CudaPlatform.name, NpuPlatform.name
STATES = ("ok", "warn", "fail", "skip")


@dataclass(frozen=True)
class CheckAnswer:
    """One thing that a check found.

    Example: ``fail("ASCEND_HOME_PATH is not set", "source /usr/local/Ascend/cann/set_env.sh")``
    """

    state: str  # one of STATES
    found: str  # what was found; if the state is "skip", why there was nothing to look for
    fix: str = ""  # a command or a key, wherever the state is "warn" or "fail"

    def __post_init__(self) -> None:
        assert self.state in STATES and bool(self.fix) == (self.state in ("warn", "fail")), self


def ok(found: str) -> CheckAnswer:
    return CheckAnswer("ok", found)


def skip(why: str) -> CheckAnswer:
    return CheckAnswer("skip", why)


def warn(found: str, fix: str) -> CheckAnswer:
    return CheckAnswer("warn", found, fix)


def fail(found: str, fix: str) -> CheckAnswer:
    return CheckAnswer("fail", found, fix)


# The processes of stage rl as most recipes have them: trainer and engine in one, or an engine of its own.
USUAL_ROLES = (
    ProcessRole(samples=True, engine_sleeps=True, replays_graphs=True),
    ProcessRole(trains=False, samples=True, replays_graphs=True, may_share_device=True),
)


@dataclass(frozen=True)
class Wanted:
    """What the machine is to be used for."""

    platform: str  # CPU, CUDA or NPU
    num_nodes: int = 1
    output_dir: Path = field(default_factory=lambda: Path("runs"))
    ports: tuple[int, ...] | None = None  # None: those that a run takes by default
    quick: bool = False  # no trial that starts a process
    roles: tuple[ProcessRole, ...] = USUAL_ROLES  # of the run's processes, the trainer's first
    shows_pictures: bool = False  # the run's engines answer about pictures


@dataclass(frozen=True)
class Check:
    name: str
    area: str  # "software", "devices", "environment", "machine" or "trials"
    examine: Callable[[Host, Wanted], Iterator[CheckAnswer]]  # at least one answer
    platforms: tuple[str, ...] = (CPU, CUDA, NPU)


@dataclass(frozen=True)
class Finding:
    """An answer with the check that gave it: one row of the table."""

    area: str
    check: str
    state: str
    found: str
    fix: str
