"""Prompts with pictures: their tokens, what is learnt from them, and what is written of them."""

from __future__ import annotations

import base64
import io
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.packing import sequence_of
from mega_rl.data.pictures.image_processor import picture_reader
from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.rows.rows import DataFiles
from mega_rl.errors import InputError
from mega_rl.models.positions import Placed, image_positions
from mega_rl.models.shape import read_model_shape
from mega_rl.rollout.collect.records import row_of_trajectory, trajectory_of_row, write_step
from mega_rl.rollout.collect.replay import Records
from mega_rl.rollout.engine import Request
from mega_rl.types import Trajectory
from tests.models import vision_models

DATA = DataConfig(max_prompt_length=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.write(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def picture_set_of(model: Path) -> PictureSet:
    tower = read_model_shape(model).tower
    assert tower is not None
    return PictureSet(picture_reader(model, tower, vision_models.tokenizer(), DATA))


def read(directory: Path, picture_set: PictureSet, *rows: dict[str, object], data: DataConfig = DATA) -> PromptDataset:
    for name, size in {"a.png": (24, 40), "b.png": (90, 16)}.items():
        Image.effect_noise(size, 90).convert("RGB").save(directory / name)
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return PromptDataset.from_files(DataFiles([str(file)]), vision_models.tokenizer(), data, picture_set=picture_set)


def trajectory(picture_set: PictureSet, prompts: PromptDataset, response: list[int]) -> Trajectory:
    return Trajectory.single_turn(prompts[0], 0, response, [-1.0] * len(response), "x", "stop", 0)


def test_a_picture_has_its_tokens_and_a_text_none(model: Path, tmp_path: Path) -> None:
    picture_set = picture_set_of(model)
    both = {"prompt": "<image>and<image>?", "images": ["a.png", "b.png"]}
    prompts = read(tmp_path, picture_set, both, {"prompt": "<image>?", "images": ["a.png"]}, {"prompt": "text"})
    token = picture_set.reader.token
    for prompt, count in zip(prompts.prompts, (2, 1, 0), strict=True):
        assert len(prompt.images) == count
        places = [p for image in prompt.images for p in range(image.first, image.first + image.num_tokens)]
        assert [place for place, one in enumerate(prompt.token_ids) if one == token] == places
    first, again = prompts[0].images[0], prompts[1].images[0]
    assert first.key == again.key and len(picture_set.pictures) == 2
    rows, columns = picture_set.pictures[first.key].grid
    assert first.num_tokens == rows * columns // vision_models.MERGE**2


def test_other_pictures_of_the_same_size_are_other_data(model: Path, tmp_path: Path) -> None:
    for colour in ("red", "blue"):
        Image.new("RGB", (24, 40), colour).save(tmp_path / f"{colour}.png")
    red, again, blue = (
        read(tmp_path, picture_set_of(model), {"prompt": "<image>?", "images": [f"{colour}.png"]})
        for colour in ("red", "red", "blue")
    )
    assert red[0].token_ids == blue[0].token_ids
    assert red.fingerprint == again.fingerprint != blue.fingerprint


def test_what_is_resized_for_engines_has_the_same_patches(model: Path, tmp_path: Path) -> None:
    picture_set = picture_set_of(model)
    read(tmp_path, picture_set, {"prompt": "<image><image>", "images": ["a.png", "b.png"]})
    for picture in picture_set.pictures.values():
        resized = picture.resized()
        assert resized.size == tuple(vision_models.PATCH * size for size in reversed(picture.grid))
        assert torch.equal(picture_set.reader.patches(resized, picture.grid), picture.patches())
        limits = picture_set.reader.pixel_limits
        assert limits["shortest_edge"] <= resized.width * resized.height <= limits["longest_edge"]


def test_a_token_of_a_picture_in_a_response_is_text(model: Path, tmp_path: Path) -> None:
    picture_set = picture_set_of(model)
    prompts = read(tmp_path, picture_set, {"prompt": "<image>?<image>", "images": ["a.png", "b.png"]})
    picture_set.learn_from(prompts.prompts)
    made = trajectory(picture_set, prompts, [3, picture_set.reader.token, 4])
    sequence = picture_set.seeing(sequence_of(made, 1.0), 0)
    images, num_prompt = prompts[0].images, len(prompts[0].token_ids)
    assert sequence.images is not None and sequence.position_ids is not None
    assert [picture.key for picture in sequence.images.pictures] == [image.key for image in images]
    assert int(sequence.images.places.max()) < num_prompt and len(sequence.images.places) == sum(
        image.num_tokens for image in images
    )
    placed = [Placed(image.first, *picture_set.pictures[image.key].grid) for image in images]
    wanted = image_positions(len(made.token_ids) - 1, placed, vision_models.MERGE)
    assert torch.equal(sequence.position_ids, wanted)
    assert torch.equal(sequence.loss_mask, sequence_of(made, 1.0).loss_mask)


def test_a_record_holds_no_pixels_and_comes_back(model: Path, tmp_path: Path) -> None:
    picture_set = picture_set_of(model)
    prompts = read(tmp_path, picture_set, {"prompt": "<image>?<image>", "images": ["a.png", "b.png"]})
    made = trajectory(picture_set, prompts, [3, picture_set.reader.token, 4])
    row = row_of_trajectory(made)
    text = json.dumps(row)
    assert trajectory_of_row(json.loads(text)) == made
    alone = {**row, "prompt": {key: value for key, value in row["prompt"].items() if key != "images"}}
    assert len(text) <= len(json.dumps(alone)) + 300 * 2
    assert len(row["prompt"]["token_ids"]) == len(made.prompt.token_ids) - sum(
        image.num_tokens - 1 for image in made.prompt.images
    )


def test_a_replay_knows_the_pictures_that_it_was_recorded_with(model: Path, tmp_path: Path) -> None:
    row = {"prompt": "<image>?<image>", "images": ["a.png", "b.png"]}
    picture_set = picture_set_of(model)
    made = trajectory(picture_set, read(tmp_path, picture_set, row), [3, 4])
    write_step(tmp_path, 1, [row_of_trajectory(made)], num_kept=-1)
    records = Records(tmp_path, None)
    records.read(1)
    assert records.find(1, Request(made.prompt, 0, seed=0, max_tokens=2)) == made
    (changed,) = read(tmp_path, picture_set_of(model), row).prompts  # the same sizes, other pixels
    same = replace(changed, images=(made.prompt.images[0], changed.images[1]))
    for prompt, number in ((changed, 1), (same, 2)):
        with pytest.raises(
            InputError, match=f"has other pictures than the data: picture {number} of prompt 0 at step 1"
        ):
            records.find(1, Request(prompt, 0, seed=0, max_tokens=2))


def test_what_is_sent_of_a_picture_needs_no_file(model: Path, tmp_path: Path) -> None:
    picture_set = picture_set_of(model)
    prompts = read(tmp_path, picture_set, {"prompt": "<image>?<image>", "images": ["a.png", "b.png"]}).prompts
    sent = pickle.loads(pickle.dumps(picture_set.encoded([*prompts, *prompts])))
    assert list(sent) == [image.key for image in prompts[0].images]
    wanted = {key: picture_set.pictures[key].resized().tobytes() for key in sent}
    files = [(tmp_path / name).stat().st_size for name in ("a.png", "b.png")]
    assert [len(picture.content) for picture in sent.values()] == files, "encoded, not pixels"
    request = Request(prompts[0], 0, seed=0, max_tokens=2)
    text = replace(request, prompt=replace(prompts[0], images=()))
    assert len(pickle.dumps(request)) <= len(pickle.dumps(text)) + 300 * 2, "what is broadcast has digests and places"
    (tmp_path / "a.png").unlink()
    assert {key: picture.resized().tobytes() for key, picture in sent.items()} == wanted
    with pytest.raises(InputError, match="line 1, picture 1: .*a.png is no file"):
        picture_set.encoded(prompts)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "<image>?", "images": []}, "more places for pictures than pictures"),
        ({"prompt": "?", "images": ["a.png"]}, "1 pictures but 0 places"),
        ({"prompt": "<image>?", "images": ["c.png"]}, "line 1, picture 1: .*c.png is no file"),
        ({"prompt": "<|image_pad|>"}, "line 1: a text has the special token of a picture"),
    ],
)
def test_rows_that_nobody_can_learn_from(row: dict[str, object], words: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        read(tmp_path, picture_set_of(model), row)


def test_a_prompt_with_pictures_is_never_cut(model: Path, tmp_path: Path) -> None:
    rows = ({"prompt": "<image><image>", "images": ["a.png", "b.png"]}, {"prompt": "text"})
    short = DataConfig(max_prompt_length=40, filter_overlong_prompts=False)
    with pytest.raises(InputError, match="line 1 has a prompt of .* tokens but data.max_prompt_length is 40"):
        read(tmp_path, picture_set_of(model), *rows, data=short)
    picture_set = picture_set_of(model)
    kept = read(tmp_path, picture_set, *rows, data=DataConfig(max_prompt_length=40, filter_overlong_prompts=True))
    assert [prompt.index for prompt in kept.prompts] == [1] and not picture_set.pictures


def test_bytes_are_as_good_as_files(model: Path, tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.new("RGB", (24, 24), "red").save(content, "PNG")
    (tmp_path / "red.png").write_bytes(content.getvalue())
    url = "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
    picture_set = picture_set_of(model)
    prompts = read(tmp_path, picture_set, *({"prompt": "<image>", "images": [one]} for one in ("red.png", url)))
    assert prompts[0].images == prompts[1].images and len(picture_set.pictures) == 1
