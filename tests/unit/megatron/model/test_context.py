"""Which of a rank's tokens the head is asked about."""

from __future__ import annotations

import pytest
import torch

from mega_rl.megatron.model.context import learnt_tokens
from mega_rl.parallel.zigzag import PADDING


@pytest.mark.parametrize(
    ("mask", "sources", "expected"),
    [
        ([0, 1, 1, 0], None, [1, 2]),
        ([1, 0.5, 1, 1], None, None),
        ([0, 0, 0, 0], None, [0]),  # a gradient that is zero, where none would leave others waiting
        ([0, 1, 1, 0], [3, 2, PADDING, 1], [1, 3]),
        ([1, 0, 0, 0], [PADDING, PADDING, 0], [2]),
        ([1, 0, 0, 0], [1, 2], [0]),
        ([1, 1, 0, 0], [1, 0], None),
    ],
)
def test_learnt_tokens(mask: list[float], sources: list[int] | None, expected: list[int] | None) -> None:
    found = learnt_tokens(torch.tensor(mask), None if sources is None else torch.tensor(sources))
    assert (None if found is None else found.tolist()) == expected
