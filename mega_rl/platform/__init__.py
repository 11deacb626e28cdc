"""Choosing the platform: the explicit key, else the environment variable, else what is there; no silent fallback."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
import torch.utils.deterministic

from mega_rl.config.schema.device import Kernels, MindSpeedConfig
from mega_rl.errors import InputError
from mega_rl.platform.contract import environment
from mega_rl.platform.contract.base import DeviceLoad, MemoryStats, Platform, ProcessRole, Setting
from mega_rl.platform.contract.environment import Applied
from mega_rl.platform.cpu import CpuPlatform
from mega_rl.platform.cuda import CudaPlatform
from mega_rl.platform.npu import NpuPlatform
from mega_rl.platform.operators.compiled import check_kernels, check_layers, fused
from mega_rl.platform.roles import engine_role, trainer_role

__all__ = [
    "PLATFORMS",
    "DeviceLoad",
    "MemoryStats",
    "Platform",
    "ProcessRole",
    "Setting",
    "check_layers",
    "count_devices",
    "current",
    "engine_role",
    "environment_report",
    "prepare",
    "select",
    "trainer_role",
    "use_kernels",
]

VARIABLE = "MEGA_RL_PLATFORM"
_KNOWN: tuple[Platform, ...] = (NpuPlatform(), CudaPlatform(), CpuPlatform())  # the first one present is the default
PLATFORMS = {p.name: p for p in _KNOWN}

_selected: Platform | None = None
_applied: list[Applied] = []  # its environment
_notes: list[str] = []
_mindspeed: MindSpeedConfig | None = None


def check_name(name: str, source: str = "platform.name") -> None:
    """InputError if ``name`` is neither a platform nor "auto"."""
    if name != "auto" and name not in PLATFORMS:
        raise InputError(f"{source} is {name!r}: choose one of auto, {', '.join(PLATFORMS)}")


def select(name: str = "auto", role: ProcessRole | None = None, mindspeed: MindSpeedConfig | None = None) -> Platform:
    """Fix the platform of this process, set its environment defaults and, if asked for, deterministic algorithms.

    Args:
        name: "cpu", "cuda", "npu", or "auto": the variable ``MEGA_RL_PLATFORM``, else the first one present.
        role: what this process is for; None: it trains, and there is no engine.
        mindspeed: what ``prepare`` is to do with MindSpeed; None: the defaults.

    Raises:
        InputError: unknown name, a platform that is not there or broken, a variable with which the run would fail, or a
            second, different choice in one process.
    """
    global _selected, _mindspeed
    source = "platform.name"
    if name == "auto" and os.environ.get(VARIABLE):
        name, source = os.environ[VARIABLE], f"the environment variable {VARIABLE}"
    check_name(name, source)
    if _selected is not None:
        if name not in ("auto", _selected.name):
            raise InputError(
                f"{source} is {name!r}, but this process already runs on {_selected.name!r}: start a new one"
            )
        return _selected
    role = role or ProcessRole()
    candidates = list(_KNOWN) if name == "auto" else [PLATFORMS[name]]
    for platform in candidates:
        if name != "auto":  # if a platform is only tried, its variables matter once it is known to be there
            platform.check_environment(role, os.environ)
        reason, applied = _try(platform, role)
        if reason is None:
            break
        if name != "auto":
            raise InputError(f"{source} is {name!r}, but {reason}")
    try:
        notes = platform.check_environment(role, os.environ)
    except InputError:
        environment.revert(applied, os.environ)
        raise
    _selected, _mindspeed = platform, mindspeed
    _applied[:], _notes[:] = applied, notes
    if role.is_deterministic:
        torch.use_deterministic_algorithms(True)
        # A pass over every new tensor that changes nothing.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return platform


def count_devices(name: str = "auto") -> int:
    """Devices of this host on the platform that ``select`` would choose; nothing is chosen or set.

    Raises:
        InputError: as ``select``.
    """
    if name == "auto":
        name = os.environ.get(VARIABLE) or "auto"
    check_name(name)
    candidates = list(_KNOWN) if name == "auto" else [PLATFORMS[name]]
    return next((platform.num_devices() for platform in candidates if platform.absence() is None), 1)


def _try(platform: Platform, role: ProcessRole) -> tuple[str | None, list[Applied]]:
    """Why a platform cannot be used, and its environment, which stands only if it can."""
    applied = environment.apply(platform.environment(role), os.environ)  # before the vendor's library is imported
    reason: str | None = "it is broken"
    try:
        reason = platform.absence()
    finally:
        if reason is not None:
            environment.revert(applied, os.environ)
    return reason, applied


def current() -> Platform:
    """The platform of this process, chosen automatically if ``select`` was not called before."""
    return _selected or select()


def environment_report() -> list[str]:
    """What ``select`` found and set in the environment, as lines for the log."""
    title = f"platform {current().name}: environment (a value of your own wins)"
    return [title, *environment.table(_applied), *(f"warning: {note}" for note in _notes)]


def use_kernels(kind: Kernels) -> None:
    """Compute norm, SwiGLU and rotary embedding as ``platform.kernels`` says, from now on.

    Raises:
        InputError: this platform, or this installation, does not have them.
    """
    here = current()
    check_kernels(kind, here.name)
    here.operators = fused(here.operators, kind)


@functools.cache
def prepare() -> Sequence[str]:
    """Make this process ready for Megatron-core, once; before anything imports ``megatron``.

    Returns:
        What was done to Megatron, as lines for the log.
    """
    return current().prepare(_mindspeed)
