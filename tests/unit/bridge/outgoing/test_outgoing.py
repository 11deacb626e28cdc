"""Outgoing transforms: their order, what they note, and the noise as one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from mega_rl.bridge.outgoing.noise import AqnNoise, AqnTransform
from mega_rl.bridge.outgoing.transform import Changed, fold
from mega_rl.bridge.reshard.execute import Read
from mega_rl.bridge.slices import Box, indices
from mega_rl.config.schema.sampling import AqnConfig

NORM, LINEAR = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight"
SHAPES: dict[str, tuple[int, ...]] = {NORM: (8,), LINEAR: (4, 8)}
ROLES = {NORM: "input_layernorm", LINEAR: "linear"}


class Step:
    """``value * factor + addend``, and a note of the version."""

    def __init__(self, name: str, factor: float, addend: float, sigma: float = 0.0) -> None:
        self.name, self.factor, self.addend, self.sigma = name, factor, addend, sigma

    def for_sync(self, read: Read, version: int) -> Changed:
        def changed(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
            return read(local_name, hf_name, hf_box, local_box) * self.factor + self.addend

        return Changed(changed, self.sigma, lambda: {self.name: float(version)})


def ones(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
    return torch.ones(SHAPES[hf_name])[indices(hf_box)]


def whole(name: str) -> Box:
    return tuple((0, n) for n in SHAPES[name])


def test_transforms_are_applied_in_their_order() -> None:
    box = whole(NORM)
    for steps, value in (
        ([Step("a", 2, 0), Step("b", 1, 3)], 5.0),
        ([Step("b", 1, 3), Step("a", 2, 0)], 8.0),
    ):
        assert fold(steps, ones, 0).read("l", NORM, box, box).tolist() == [value] * 8


def test_without_transforms_the_reader_is_the_trainers_own() -> None:
    outgoing = fold((), ones, 4)
    assert outgoing.read is ones and outgoing.sigma == 0.0
    assert outgoing.metrics() == {}


def test_every_transform_is_asked_for_its_figures() -> None:
    outgoing = fold([Step("a", 1, 0), Step("b", 1, 0, sigma=0.25)], ones, 7)
    assert outgoing.metrics() == {"a": 7.0, "b": 7.0} and outgoing.sigma == 0.25


class Masters:
    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        self.asked.append(sorted(names))
        return {name: torch.full(SHAPES[name], 1.5) for name in names}


def noisy(masters: Masters, dtype: torch.dtype = torch.float32, **keys: Any) -> AqnTransform:
    noise = AqnNoise(AqnConfig(enabled=True, num_stages=2, sigma_start=0.5, sigma_end=0.5, **keys), total_steps=10)
    return AqnTransform(noise, SHAPES, ROLES, masters, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_are_their_masters_with_noise_and_the_rest_passes(dtype: torch.dtype) -> None:
    masters = Masters()
    transform = noisy(masters, dtype)
    outgoing = fold([Step("a", 3, 0), transform], ones, 6)
    assert masters.asked == [[NORM]] and outgoing.sigma == 0.5
    box = whole(LINEAR)
    assert torch.equal(outgoing.read("l", LINEAR, box, box), torch.full((4, 8), 3.0))
    part = ((2, 7),)
    sent = outgoing.read("l", NORM, part, ((0, 5),))
    expected = transform.noise.for_sync(6, 0.5).apply(NORM, torch.full((5,), 1.5), (8,), part, dtype)
    assert sent.dtype == dtype and torch.equal(sent, expected) and not torch.equal(sent, torch.full((5,), 1.5))
    metrics = outgoing.metrics()
    assert metrics["aqn/num_tensors"] == 1.0 and metrics["aqn/effective_sigma"] > 0


def test_a_stage_without_noise_reads_no_masters_and_tells_nothing() -> None:
    masters = Masters()
    outgoing = fold([noisy(masters)], ones, 4)
    assert outgoing.read is ones and outgoing.sigma == 0.0 and masters.asked == []
    assert outgoing.metrics() == {}
