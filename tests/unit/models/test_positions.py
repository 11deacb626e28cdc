"""Positions of pictures among text, against transformers' own and against the engine's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.models.positions import Placed, image_positions
from tests.models import families

NUM_LAYOUTS = 1000
MERGE = families.TOWER["spatial_merge_size"]


def layouts() -> Iterator[tuple[list[Placed], list[int]]]:
    """One to four pictures of any shape, side by side or with text between, before and behind them.

    With them 1 for every token of a picture and 0 for one of text.
    """
    drawn = random.Random(7)
    for _ in range(NUM_LAYOUTS):
        placed, types = [], [0] * drawn.choice((0, 1, 7))
        for _ in range(drawn.randrange(1, 5)):
            rows, columns = (MERGE * drawn.randrange(1, 9) for _ in range(2))
            placed.append(Placed(len(types) + 1, rows, columns))
            types += [0, *[1] * (rows * columns // MERGE**2), *[0] * drawn.choice((1, 2, 20))]
        yield placed, types


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_random_layouts_of_pictures(family: str) -> None:
    model = families.CONTRACT.new_model(family).model
    for placed, types in layouts():
        types_1T = torch.tensor([types])
        grids = torch.tensor([(1, one.rows, one.columns) for one in placed])
        expected, _ = model.get_rope_index(torch.zeros_like(types_1T), types_1T, image_grid_thw=grids)
        assert torch.equal(image_positions(len(types), placed, MERGE), expected[:, 0]), placed


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None or find_spec("torchvision") is None, reason="no engine for pictures here")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_random_layouts_in_the_engine(family: str) -> None:
    """vLLM's own function, with picture tokens in the text too, as a model may write them itself."""
    ids = families.picture_tokens(131)
    for placed, types in layouts():
        features: list[Any] = [
            SimpleNamespace(
                modality="image",
                mm_position=SimpleNamespace(offset=one.first, length=one.rows * one.columns // MERGE**2),
                data={"image_grid_thw": SimpleNamespace(data=torch.tensor([1, one.rows, one.columns]))},
            )
            for one in placed
        ]
        tokens = [ids["image_token_id"] if is_picture else 5 for is_picture in types]
        tokens[-1] = ids["image_token_id"]  # of text: a place of no picture
        expected, delta = _engine_model(family, ids).get_mrope_input_positions(tokens, features)
        own = image_positions(len(types), placed, MERGE)
        assert torch.equal(own, expected) and int(own.max()) + 1 - len(types) == delta, placed


def _engine_model(family: str, ids: dict[str, int]) -> Any:
    """vLLM's class without weights: positions read only its configuration."""
    from vllm.model_executor.models import qwen2_5_vl, qwen3_vl

    kind = {
        "qwen2_5_vl": qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": qwen3_vl.Qwen3VLForConditionalGeneration,
    }[family]
    model = kind.__new__(kind)
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE), **ids)
    object.__setattr__(model, "config", config)
    return model
