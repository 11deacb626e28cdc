"""What a pass over micro-batches computes of its pictures when a part of the tower is trained, on one rank.

Letters: P patches, C numbers of a patch, F merged patches, D hidden width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.megatron.layers import vision
from mega_rl.megatron.layers.vision import VisionTower
from mega_rl.models.shape import parse_config
from mega_rl.observe.heartbeat import HEART
from tests.models import families

READ: Counter[str] = Counter()  # pictures by their keys


@dataclass(frozen=True)
class Drawn:
    """A picture of random patches; a token of the language model is 2 x 2 of them."""

    key: str
    numbers: int
    grid: tuple[int, int] = (4, 4)

    def patches(self) -> Tensor:
        READ[self.key] += 1
        rows, columns = self.grid
        return torch.randn(rows * columns, self.numbers, generator=torch.Generator().manual_seed(ord(self.key)))


def tower_of(dtype: torch.dtype) -> VisionTower:
    tower = parse_config(families.CONTRACT.config("qwen3_vl"), "qwen3_vl").tower
    assert tower is not None
    config: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, pipeline_model_parallel_size=1)
    torch.manual_seed(0)
    made = VisionTower(tower, config, cache_bytes=0)
    for name, parameter in made.module.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        parameter.requires_grad_("merger" in name)
    READ.clear()
    return made


def drawn(tower: VisionTower, *names: str) -> list[list[Drawn]]:
    """The pictures of each micro-batch, a letter each."""
    numbers = tower._tower.patch_numbers
    return [[Drawn(key, numbers) for key in name] for name in names]


def upstream(levels: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(level.shape, generator=generator).to(level.dtype) for level in levels]


def learn(tower: VisionTower, seen: list[list[Drawn]], with_pass: bool = True) -> dict[str, Tensor]:
    """The gradients of a pass over these micro-batches; ``with_pass`` False: each computes all of its own."""
    if with_pass:
        tower.begin_pass(seen, with_gradient=True)
    for index, pictures in enumerate(seen):
        levels = tower(pictures)
        assert all(level.dtype == next(tower.module.parameters()).dtype for level in levels)
        torch.autograd.backward(levels, upstream(levels, index))
    if with_pass:
        tower.finish_pass(with_gradient=True)
    return {name: p.grad for name, p in tower.module.named_parameters() if p.grad is not None}


ALL, ONE, NONE = 1 << 30, 4 * 32 * 3 * 8, 0  # bytes: 4 tokens of a picture, 3 levels of width 32, value and gradient


@pytest.mark.parametrize(
    ("bound", "read"),
    [
        (ALL, {"a": 2, "b": 2, "c": 1}),  # at the beginning and at the end; what one micro-batch has in it alone
        (2 * ONE - 1, {"a": 3, "b": 2, "c": 1}),  # the more frequent one is kept
        (NONE, {"a": 3, "b": 4, "c": 1}),
    ],
)
def test_what_is_kept_is_bounded_and_changes_no_gradient(
    monkeypatch: pytest.MonkeyPatch, bound: int, read: dict[str, int]
) -> None:
    monkeypatch.setattr(vision, "MAX_KEPT_BYTES", bound)
    tower, plain = tower_of(torch.float32), tower_of(torch.float32)
    seen = drawn(tower, "ab", "cab", "bba", "b")
    beats = HEART.count
    own = learn(tower, seen)
    assert dict(READ) == read
    num_parts = {ALL: 1, NONE: 0}.get(bound, 1)
    assert HEART.count == beats + 2 * num_parts, "a part that is computed, before or after, is progress"
    expected = learn(plain, seen, with_pass=False)
    assert own.keys() == expected.keys() and len(own) == 18
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name], gradient, atol=1e-5 * float(gradient.abs().max()), rtol=0.0)
    assert not tower._of_pass and not tower._parts, "nothing stays behind"


def test_a_pass_without_gradient_computes_beforehand_only_what_several_micro_batches_have() -> None:
    tower = tower_of(torch.bfloat16)
    with torch.no_grad():
        tower.begin_pass(drawn(tower, "ab", "cb"), with_gradient=False)
        assert dict(READ) == {"b": 1} and tower._of_pass["b"][0].dtype == torch.bfloat16
        for pictures in drawn(tower, "ab", "cb"):
            tower(pictures)
        tower.finish_pass(with_gradient=False)
    assert dict(READ) == {"a": 1, "b": 1, "c": 1}


def test_gradients_of_micro_batches_are_added_up_in_float32() -> None:
    """In bfloat16, of 8 bits, a sum of 64 would lose up to 1 %."""
    tower = tower_of(torch.bfloat16)
    seen = drawn(tower, *["a"] * 64)
    with torch.no_grad():
        levels = tower(seen[0])
    parts = [upstream(levels, index)[0] for index in range(len(seen))]
    exact = torch.stack([part.double() for part in parts]).sum(0)
    running = torch.zeros_like(parts[0])
    for part in parts:
        running += part
    gradient = learn(tower, seen)["merger.linear_fc2.bias"].double()
    expected, coarse = exact.sum(0), running.double().sum(0)
    scale = expected.abs().max()
    rounded = exact.bfloat16().double().sum(0)
    assert float((gradient - rounded).abs().max() / scale) < 2**-8  # of the sum over tokens, rounded once
    assert float((gradient - expected).norm()) < 0.5 * float((coarse - expected).norm())
