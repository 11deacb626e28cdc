"""Where engines in other processes may start."""

from __future__ import annotations

import importlib.util
import os
import socket
from typing import Any

import pytest
import torch.distributed as dist

from mega_rl import platform
from mega_rl.errors import InputError
from mega_rl.platform.cuda import CudaPlatform
from mega_rl.platform.npu import NpuPlatform
from mega_rl.rollout.remote import placement as fleet
from mega_rl.rollout.vllm.start.environment import is_external


def test_without_ray_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"mega_rl\[separate\]"):
        fleet.connected_ray(1)


@pytest.mark.parametrize("device", [CudaPlatform(), NpuPlatform()], ids=["cuda", "npu"])
def test_engines_never_take_the_trainers_devices(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
    monkeypatch.setattr(platform, "_selected", device)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("a Ray of its own would hand out the trainer's devices"))
    with pytest.raises(InputError, match=f"{device.visible_devices_variable}.*RAY_ADDRESS"):
        fleet.connected_ray(1)
    assert "RAY_ADDRESS" not in os.environ


def test_a_node_that_is_not_in_the_cluster_is_told_how_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun gives rank 0 to any of its nodes."""
    ray = pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")

    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    with pytest.raises(InputError, match=r"host node7, .*rank 0, is not in .*=auto \(Could not.*`ray start --address"):
        fleet.connected_ray(1)


@pytest.mark.parametrize(
    ("world_size", "local_rank", "expected"), [(0, "0", False), (1, "0", False), (1, "3", True), (2, "0", True)]
)
def test_an_engine_alone_finds_its_device_too(
    world_size: int, local_rank: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may show an actor every device of its node: then an engine of one process is not on the first one."""
    monkeypatch.setattr(dist, "is_initialized", lambda: world_size > 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert is_external() == expected
