"""Drawn shapes: what the pictures show, what is asked about them, and the tiny model that reads them."""

from __future__ import annotations

import base64
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.pictures.image_processor import picture_reader
from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.rows.rows import DataFiles
from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape
from mega_rl.synthetic import shapes
from mega_rl.synthetic.shapes import BACKGROUND, PLACE_PIXELS, SHAPE_PIXELS, ShapesData, ShapesSpec, shapes_data
from tools import make_tiny_model, prepare_data

SPEC = ShapesSpec(num_train=300, num_val=60, num_sft=600)


@pytest.fixture(scope="module")
def data() -> ShapesData:
    return shapes_data(SPEC)


def pixels(row: dict[str, Any]) -> Image.Image:
    (url,) = row["images"]
    return Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))).convert("RGB")


def number_of_discs(row: dict[str, Any]) -> int:
    """Recounted from the pixels: squares fill their box, triangles have a row with two pixels, discs have neither."""
    image, size, count = np.asarray(pixels(row)), PLACE_PIXELS, 0
    is_drawn = (image != np.array(BACKGROUND)).any(-1)
    for place in is_drawn.reshape(SPEC.side, size, SPEC.side, size).transpose(0, 2, 1, 3).reshape(-1, size, size):
        rows = place.sum(1)[place.any(1)]
        assert len(rows) in (0, SHAPE_PIXELS), "a shape stands within its place"
        count += bool(len(rows)) and rows[0] == rows[-1] < SHAPE_PIXELS
    return count


def test_answers_are_what_the_pictures_show(data: ShapesData) -> None:
    for row in data.train + data.val:
        assert number_of_discs(row) == int(row["answer"]), row
    for row in data.sft:
        assert number_of_discs(row) == int(row["response"].lstrip("=+")), row
    assert 60 < sum(row["response"].isdigit() for row in data.sft) < 180  # a fifth of 600


def test_the_same_seed_draws_the_same_and_no_picture_twice(data: ShapesData) -> None:
    again, other = shapes_data(SPEC), shapes_data(ShapesSpec(num_train=300, num_val=60, num_sft=600, seed=1))
    seen = [pixels(row).tobytes() for row in data.train + data.val + data.sft]
    assert again == data and other.val != data.val
    assert len(set(seen)) == len(seen)


def test_without_the_picture_there_is_only_a_guess(data: ShapesData) -> None:
    """All rows ask the same, and the numbers are equally frequent."""
    answers = Counter((row["prompt"], row["answer"]) for row in data.train)
    assert len(answers) == SPEC.max_count and max(answers.values()) < 0.33 * len(data.train)


def test_nearly_every_picture_is_drawn_once_and_the_numbers_stay_equally_frequent() -> None:
    """With this few places most drawings are of old pictures, often with their shapes in another order."""
    few = ShapesSpec(side=2, max_count=2, num_train=600, num_val=600, num_sft=1, seed=1)
    data = shapes_data(few)
    held_out = {pixels(row).tobytes() for row in data.val}
    assert len(held_out) == 600 and held_out.isdisjoint(pixels(row).tobytes() for row in data.train)
    counts = Counter(row["answer"] for row in data.train + data.val)
    assert abs(counts["1"] - counts["2"]) < 60, "of this seed"


def test_more_rows_than_pictures_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """No end is as good as none: drawing goes on only while there are new ones."""
    monkeypatch.setattr(shapes, "_shapes", lambda count, *_: [shapes.Shape("disc", "red", count, 0)])
    with pytest.raises(InputError, match="fewer pictures exist than rows are asked for: after [1-4] of them.*--side"):
        shapes_data(ShapesSpec())


@pytest.mark.parametrize("changes", [{"side": 0}, {"num_val": 0}, {"plain_fraction": 1.5}, {"side": 2}, {"side": 17}])
def test_impossible_pictures_are_a_sentence(changes: dict[str, float]) -> None:
    with pytest.raises(InputError, match="--"):
        shapes_data(ShapesSpec(**changes))  # type: ignore[arg-type]


def test_a_model_that_sees_needs_the_tokens_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--out", str(tmp_path / "model"), "--family", "qwen2_5_vl"]
    assert make_tiny_model.main(options) == 2
    assert "choose --tokenizer shapes" in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_the_tiny_model_reads_a_picture_as_a_token_for_every_place(tmp_path: Path) -> None:
    model, data_dir = tmp_path / "model", tmp_path / "data"
    assert make_tiny_model.main(["--out", str(model), "--family", "qwen2_5_vl", "--tokenizer", "shapes"]) == 0
    few = ["--num-train", "5", "--num-val", "5", "--num-sft", "5"]
    assert prepare_data.main(["shapes", "--out", str(data_dir), *few]) == 0
    config, tokenizer = DataConfig(max_prompt_length=40, max_response_length=4), load_tokenizer(str(model))
    tower = read_model_shape(model).tower
    assert tower is not None
    picture_set = PictureSet(picture_reader(model, tower, tokenizer, config))
    prompts = PromptDataset.from_files(
        DataFiles([str(data_dir / "train.jsonl")]), tokenizer, config, picture_set=picture_set
    )
    assert [prompt.images[0].num_tokens for prompt in prompts] == [16] * 5 and len(picture_set.pictures) == 5
