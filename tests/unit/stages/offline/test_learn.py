"""One optimizer step of the stages that learn from files: what is on the device when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.megatron.optim.optimizer import OptimizerStats
from mega_rl.stages.offline import method
from mega_rl.stages.run.batch_share import Totals


def test_the_optimizer_is_away_while_there_are_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def noted(name: str, result: Any = None) -> Any:
        return lambda *arguments, **_: (calls.append((name, *arguments)), result)[1]

    model: Any = SimpleNamespace(
        offload=SimpleNamespace(to_host=noted("to_host"), to_device=noted("to_device")),
        forward_backward=noted("pass"),
        optimizer_step=noted("step", OptimizerStats(1.0, 0.1, skipped=False)),
        stepper=SimpleNamespace(skipped=SimpleNamespace(total=0)),
    )
    monkeypatch.setattr(method, "totals_of", lambda share, figures: Totals(sums={"loss": 2.0}))
    monkeypatch.setattr(method, "warn_if_skipped", lambda *arguments: None)
    session: Any = SimpleNamespace(share=None, say=None)
    loss: Any = None
    _, metrics = method.learn(session, model, method.PreparedBatch([], loss), is_read=True)
    assert metrics["loss"] == 2.0
    assert calls == [("to_host", "optimizer"), ("pass", [], None), ("to_device", "optimizer"), ("step",)]
