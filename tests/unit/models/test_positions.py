"""Positions of pictures among text, against transformers' own."""

from __future__ import annotations

import random

import pytest
import torch

from mega_rl.models.positions import Placed, image_positions
from tests import families

NUM_LAYOUTS = 1000


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_random_layouts_of_pictures(family: str) -> None:
    """None to four pictures of any shape, side by side or with text between, before and behind them."""
    model = families.CONTRACT.new_model(family).model
    merge, drawn = families.TOWER["spatial_merge_size"], random.Random(7)
    for _ in range(NUM_LAYOUTS):
        placed, types = [], [0] * drawn.choice((0, 1, 7))
        for _ in range(drawn.randrange(1, 5)):
            rows, columns = (merge * drawn.randrange(1, 9) for _ in range(2))
            placed.append(Placed(len(types) + 1, rows, columns))
            types += [0, *[1] * (rows * columns // merge**2), *[0] * drawn.choice((1, 2, 20))]
        types_1T = torch.tensor([types])
        grids = torch.tensor([(1, one.rows, one.columns) for one in placed])
        expected, _ = model.get_rope_index(torch.zeros_like(types_1T), types_1T, image_grid_thw=grids)
        assert torch.equal(image_positions(len(types), placed, merge), expected[:, 0]), placed
