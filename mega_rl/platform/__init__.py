"""Choosing the platform: the explicit key, else the environment variable, else what is there; no silent fallback."""

from __future__ import annotations

import os

from mega_rl.platform.base import MemoryStats, Platform
from mega_rl.platform.cpu import CpuPlatform
from mega_rl.platform.cuda import CudaPlatform
from mega_rl.platform.npu import NpuPlatform
from mega_rl.types import InputError

__all__ = ["MemoryStats", "Platform", "current", "select"]

VARIABLE = "MEGA_RL_PLATFORM"
_KNOWN: tuple[Platform, ...] = (NpuPlatform(), CudaPlatform(), CpuPlatform())  # the first one present is the default
PLATFORMS = {p.name: p for p in _KNOWN}

_selected: Platform | None = None


def check_name(name: str, source: str = "platform.name") -> None:
    """InputError where ``name`` is neither a platform nor "auto"."""
    if name != "auto" and name not in PLATFORMS:
        raise InputError(f"{source} is {name!r}: choose one of auto, {', '.join(PLATFORMS)}")


def select(name: str = "auto") -> Platform:
    """Fix the platform of this process and set its environment defaults.

    Args:
        name: "cpu", "cuda", "npu", or "auto": the variable ``MEGA_RL_PLATFORM``, else the first one present.

    Raises:
        InputError: unknown name, a platform that is not there, or a second, different choice in one process.
    """
    global _selected
    source = "platform.name"
    if name == "auto" and os.environ.get(VARIABLE):
        name, source = os.environ[VARIABLE], f"the environment variable {VARIABLE}"
    if name == "auto":
        name = _selected.name if _selected else next(p.name for p in PLATFORMS.values() if p.is_available())
    check_name(name, source)
    platform = PLATFORMS[name]
    if _selected is not None and _selected is not platform:
        raise InputError(f"{source} is {name!r}, but this process already runs on {_selected.name!r}: start a new one")
    if not platform.is_available():
        raise InputError(f"{source} is {name!r}, but no such device is usable here: install its driver, or choose cpu")
    for key, value in platform.environment().items():
        os.environ.setdefault(key, value)
    _selected = platform
    return platform


def current() -> Platform:
    """The platform of this process, chosen automatically where ``select`` was not called before."""
    return _selected or select()
