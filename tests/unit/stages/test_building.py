"""What the parts of a run are made of, and the order in which they take the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(("stage", "temperature"), [("rl", 0.7), ("sft", 1.0)])
def test_the_stage_decides_the_temperature_of_the_trainer(stage: str, temperature: float) -> None:
    config = RunConfig()
    config.trainer.stage, config.rollout.temperature = stage, 0.7
    config.model.dtype, config.trainer.logprob_chunk_tokens = "float32", 12
    spec = building.trainer_spec(config)
    assert spec.temperature == temperature and spec.head == "vocabulary"
    assert (spec.dtype, spec.chunk_tokens) == (torch.float32, 12)
    assert (spec.parallel, spec.memory) == (config.parallel, config.memory)
