"""The table of heads."""

from __future__ import annotations

from typing import get_args

from mega_rl.megatron.model.heads import HEADS
from mega_rl.models.shape import SUFFIXES, Head


def test_every_head_that_a_shape_can_name_is_there() -> None:
    assert set(HEADS) == set(SUFFIXES) == set(get_args(Head))
