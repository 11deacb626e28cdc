"""Where engines in other processes may start."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from mega_rl import platform
from mega_rl.platform.cuda import CudaPlatform
from mega_rl.platform.npu import NpuPlatform
from mega_rl.rollout import fleet
from mega_rl.types import InputError


def test_without_ray_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"mega_rl\[separate\]"):
        fleet._connected_ray(1)


@pytest.mark.parametrize("device", [CudaPlatform(), NpuPlatform()], ids=["cuda", "npu"])
def test_engines_never_take_the_trainers_devices(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
    monkeypatch.setattr(platform, "_selected", device)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("a Ray of its own would hand out the trainer's devices"))
    with pytest.raises(InputError, match=f"{device.visible_devices_variable}.*RAY_ADDRESS"):
        fleet._connected_ray(1)
    assert "RAY_ADDRESS" not in os.environ
