"""The order in which a run's parts take the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config import RunConfig
from mega_rl.megatron.offload import PARTS
from mega_rl.stages.parts import building


def test_the_actor_makes_room_while_the_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def engine(*_: Any, **__: Any) -> Any:
        done.append("built")
        return SimpleNamespace(sleep=lambda: done.append("asleep"))

    offload = SimpleNamespace(
        to_host=lambda *parts: done.append(("to host", parts)), to_device=lambda: done.append("to device")
    )
    monkeypatch.setattr(building, "VLLMEngine", engine)
    session: Any = SimpleNamespace(config=RunConfig(), device=SimpleNamespace(type="cpu"))
    actor: Any = SimpleNamespace(offload=offload)
    building.colocated_engine(session, actor)
    assert done == [("to host", PARTS), "built", "asleep", "to device"]
