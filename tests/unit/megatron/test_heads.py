"""The table of heads."""

from __future__ import annotations

from typing import get_args

from mega_rl.megatron.heads import HEADS
from mega_rl.megatron.spec import Head


def test_every_head_that_a_spec_can_name_is_there() -> None:
    assert set(HEADS) == set(get_args(Head))
