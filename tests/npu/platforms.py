"""Launches of one script on both platforms, by processes of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launching.launch import REPO, Launched, ranks, torchrun

CPU = {"MEGA_RL_PLATFORM": "cpu", "PYTHONPATH": str(REPO)}  # without the wheels on its path, as on any machine
NPU = {"MEGA_RL_PLATFORM": "npu"}
HAS_MINDSPEED = importlib.util.find_spec("mindspeed") is not None
NEEDS_MINDSPEED = pytest.mark.skipif(
    not HAS_MINDSPEED,
    reason="MindSpeed is not there, and on no package index: `make test-npu MINDSPEED=ITS_CHECKOUT`",
)


def on_npu(script: Path, *args: object, nproc: int, timeout: float = 600, env: Mapping[str, str] = NPU) -> Launched:
    return torchrun(script, *args, nproc=nproc, timeout=timeout, env={**NPU, **env})


def on_cpu(script: Path, *args: object, nproc: int, timeout: float = 600) -> Launched:
    return ranks(script, *args, nproc=nproc, timeout=timeout, env=CPU)
