"""``rollout.weight_update``: what decides between writing in place and the engine's own loader, and what is said."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.series import slices_of
from mega_rl.errors import InputError
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.rollout.vllm.versions import undo_wake_up
from mega_rl.stages.parts.weight_sync import WeightSync
from tests.distributed.test_bridge_execute import SHAPE, local_parameters

ODD = "model.layers.0.mlp.down_proj.weight"


class Engine(VLLMEngine):
    """The live parameters of one, and no vLLM behind them."""

    def __init__(self, shape: ModelShape) -> None:
        self.live = local_parameters(slices_of(vllm_series(shape, 1, 0)), None, torch.bfloat16)
        self._loaded, self._is_live = None, True

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.live


def choose(
    engine: Engine,
    weight_update: str,
    verify: str,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    shape: ModelShape = SHAPE,
    device: str = "cpu",
) -> bool:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    sync = WeightSync.__new__(WeightSync)
    sync.rollout, sync.dtype = engine, torch.bfloat16
    rollout, bridge = SimpleNamespace(weight_update=weight_update), SimpleNamespace(verify=verify)
    config = SimpleNamespace(rollout=rollout, bridge=bridge)
    session = SimpleNamespace(config=config, say=lines.append, device=SimpleNamespace(type=device))
    return sync._choose_way(session, [vllm_series(shape, 1, 0)])  # type: ignore[arg-type]


@pytest.mark.parametrize("weight_update", ["auto", "live"])
def test_an_engine_as_the_mapping_says_is_written_in_place(weight_update, monkeypatch) -> None:
    lines: list[str] = []
    engine = Engine(SHAPE)
    assert choose(engine, weight_update, "all", monkeypatch, lines) and engine._is_live and lines == []


def test_a_transposed_weight_goes_through_the_loader_and_says_so(monkeypatch) -> None:
    lines: list[str] = []
    engine = Engine(SHAPE)
    engine.live[ODD] = engine.live[ODD].t().contiguous()
    assert not choose(engine, "auto", "off", monkeypatch, lines) and not engine._is_live
    (line,) = lines
    assert "own loader" in line and ODD in line and str(list(engine.live[ODD].shape)) in line


@pytest.mark.parametrize(
    ("weight_update", "verify", "words"),
    [
        ("live", "off", "rollout.weight_update=live cannot write .*down_proj.*rollout.weight_update=reload"),
        ("auto", "sample", "bridge.verify=sample can prove only .*down_proj.*bridge.verify=off"),
    ],
)
def test_what_was_asked_for_and_cannot_be_is_refused(weight_update, verify, words, monkeypatch) -> None:
    engine = Engine(SHAPE)
    engine.live[ODD] = engine.live[ODD].t().contiguous()
    with pytest.raises(InputError, match=words):
        choose(engine, weight_update, verify, monkeypatch, [])
    assert engine._is_live


# The second weight of these experts is square: turned it has the shape that it had.
SQUARE = replace(SHAPE, mixture=Mixture(frozenset(range(SHAPE.num_layers)), 4, 2, SHAPE.hidden_size, True))


@pytest.mark.parametrize(("device", "shape", "is_live"), [("cpu", SQUARE, True), ("npu", SHAPE, True)])
def test_only_experts_on_ascend_are_taken_for_transposed(device, shape, is_live, monkeypatch) -> None:
    assert choose(Engine(shape), "auto", "off", monkeypatch, [], shape, device) == is_live


def test_experts_on_ascend_go_through_the_loader_whatever_their_shapes(monkeypatch) -> None:
    lines: list[str] = []
    engine = Engine(SQUARE)
    assert not choose(engine, "auto", "off", monkeypatch, lines, SQUARE, "npu") and not engine._is_live
    (line,) = lines
    assert "own loader" in line and "routed_experts.w13_weight" in line and "transposed on Ascend" in line
    with pytest.raises(InputError, match=r"live cannot write .*w13_weight.*rollout\.weight_update=reload"):
        choose(Engine(SQUARE), "live", "off", monkeypatch, [], SQUARE, "npu")


def test_reload_asks_the_engine_nothing(monkeypatch) -> None:
    assert not choose(None, "reload", "off", monkeypatch, [])  # type: ignore[arg-type]


def test_a_wake_up_of_ascend_is_undone_before_a_reload() -> None:
    """As vllm-ascend 0.23 does it: the layer works on [E, hidden, rows] and wakes up with a transposed view of that."""
    layer = torch.nn.Module()
    layer.experts, layer.other = torch.nn.Module(), torch.nn.Linear(3, 5)
    working = torch.arange(24.0).reshape(2, 3, 4)
    layer.experts.w13_weight = torch.nn.Parameter(working.transpose(1, 2), requires_grad=False)
    undo_wake_up(layer)
    undo_wake_up(layer)  # what is as it should be stays
    assert layer.experts.w13_weight.data_ptr() == working.data_ptr() and layer.experts.w13_weight.is_contiguous()
    assert torch.equal(layer.experts.w13_weight, working) and layer.other.weight.shape == (5, 3)
