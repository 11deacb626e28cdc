"""The receiver in the base classes of vLLM's versions, recorded here, and where engines may start."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pytest
import torch

from mega_rl import platform
from mega_rl.bridge.execute import Read, Write
from mega_rl.platform.cuda import CudaPlatform
from mega_rl.platform.npu import NpuPlatform
from mega_rl.rollout import fleet, receiver
from mega_rl.rollout.joint_group import MeetingPoint
from mega_rl.rollout.receiver import Link, Receiver
from mega_rl.rollout.receiving_engine import start_arguments
from mega_rl.types import InputError

LINK = Link(MeetingPoint("host", 1, "gloo", 2), 1, [[], []], [[], []], torch.float32, 1 << 16)
BOX = ((0, 2),)


class Base023(ABC):
    """``WeightTransferEngine`` of vLLM 0.23."""

    def __init__(self, config: Any, parallel_config: Any, model: torch.nn.Module) -> None:
        self.config, self.parallel_config, self.model = config, parallel_config, model

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any, load_weights: Callable[[list], None]) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Iterator, trainer_args: Any) -> None: ...


@dataclass
class UpdateInfo023:
    _: KW_ONLY
    update_kind: str = "dense"


class Base028(ABC):
    """The same of vLLM 0.28 to 0.32."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


@dataclass
class UpdateInfo028:
    """Empty."""


@dataclass
class InitInfo:
    link: Link


def update_023(model: torch.nn.Module) -> None:
    """The calls of 0.23's worker for weights in the engine's own format."""
    engine = type("Engine", (Receiver, Base023), {})("config", "parallel", model)
    engine.init_transfer_engine(InitInfo(LINK))
    engine.receive_weights(UpdateInfo023(), load_weights=None)
    engine.shutdown()


def update_028(model: torch.nn.Module) -> None:
    """The calls of 0.28's worker."""
    engine = type("Engine", (Receiver, Base028), {})("config", "vllm", torch.device("cpu"), model)
    engine.init_transfer_engine(InitInfo(LINK))
    engine.start_weight_update()
    engine.receive_weights(UpdateInfo028())
    engine.finish_weight_update()
    engine.shutdown()


class Sent:
    """Stands for the transfer: brings ones for the first two elements of ``bias``."""

    def run(self, read: Read, write: Write, dtype: torch.dtype) -> None:
        write("bias", "hf.bias", BOX, BOX, torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("update", [update_023, update_028])
def test_every_covered_version_can_use_the_receiver(
    update: Callable[[torch.nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = []
    monkeypatch.setattr(receiver, "join_group", lambda point, rank: joined.append((point, rank)))
    monkeypatch.setattr(Link, "transfer", lambda link, group, device: Sent())
    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        model.bias.zero_()
    update(model)
    assert model.bias.tolist() == [1, 1, 0]
    assert joined == [(LINK.point, 1)]


def test_only_the_old_start_is_told_the_format() -> None:
    def start_023(is_checkpoint_format: bool = True) -> None: ...

    def start_028() -> None: ...

    assert start_arguments(start_023) == {"is_checkpoint_format": False}
    assert start_arguments(start_028) == {}


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
