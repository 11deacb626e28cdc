"""Pictures of data rows: where they are found, what becomes of their tokens, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.packing import pack
from mega_rl.data.pictures.image_processor import picture_reader
from mega_rl.data.pictures.pictures import PictureReader
from mega_rl.data.rows.rows import DataFiles, Row
from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape
from tests.models import vision_models

SIDE = vision_models.PATCH * vision_models.MERGE  # pixels of a token


def encoded(width: int, height: int, mode: str = "RGB", form: str = "PNG", **options: Any) -> bytes:
    random = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(random).convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.write(tmp_path_factory.mktemp("models") / "qwen2_5_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def reader(model: Path) -> PictureReader:
    tower = read_model_shape(model).tower
    assert tower is not None
    return picture_reader(model, tower, vision_models.tokenizer(), DataConfig())


@pytest.fixture
def read(reader: PictureReader, tmp_path: Path) -> Callable[..., ConversationDataset]:
    """Rows -> their data set."""

    def read(*rows: dict[str, Any], **settings: Any) -> ConversationDataset:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(**{"max_prompt_length": 400, **settings})
        return ConversationDataset.from_files(DataFiles([str(file)]), vision_models.tokenizer(), data, pictures=reader)

    return read


def url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def test_a_picture_becomes_its_tokens_positions_and_patches(
    read: Callable[..., ConversationDataset], tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(encoded(4 * SIDE, 3 * SIDE))
    (row,) = read({"prompt": "look: <image>what?", "response": "noise", "images": ["one.png"]}).sequences
    own = vision_models.tokenizer()
    token = own.convert_tokens_to_ids("<|image_pad|>")
    assert row.images is not None and row.position_ids is not None
    assert row.images.places.tolist() == [i for i, t in enumerate(row.token_ids.tolist()) if t == token]
    assert len(row.images.places) == 12 and row.loss_mask.sum() == len(own("noise<|im_end|>")["input_ids"])
    first = int(row.images.places[0])
    assert row.position_ids[:, :first].tolist() == [list(range(first))] * 3
    time, height, width = row.position_ids[:, row.images.places] - first
    assert time.tolist() == [0] * 12 and height.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert width.tolist() == [0, 1, 2, 3] * 3
    assert row.position_ids[:, first + 12].tolist() == [first + 4] * 3  # behind the larger side
    (picture,) = row.images.pictures
    assert picture.grid == (6, 8)
    assert picture.patches().shape == (48, 3 * 2 * vision_models.PATCH**2)


def test_patches_are_those_of_the_model_s_own_processor(model: Path, reader: PictureReader) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(model)
    for width, height, mode in ((40, 90, "RGB"), (17, 23, "L"), (300, 200, "RGBA"), (8, 8, "P")):
        image = Image.open(io.BytesIO(encoded(width, height, mode)))
        made = processor(images=[image.convert("RGB")], return_tensors="pt")
        _, rows, columns = made["image_grid_thw"][0].tolist()
        assert reader._grid(width, height) == (rows, columns)
        assert torch.equal(reader.patches(image, (rows, columns)), made["pixel_values"])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a <image> b", "images": [url(encoded(16, 16))]},
        {"prompt": "a <image> b", "image": {"bytes": None, "path": "one.png"}},
        {"messages": [{"role": "user", "content": "a <image> b"}], "images": ["one.png"]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a "},
                        {"type": "image_url", "image_url": {"url": url(encoded(16, 16))}},
                        {"type": "text", "text": " b"},
                    ],
                }
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b"}],
                }
            ],
            "images": ["one.png"],
        },
        {"conversations": [{"from": "human", "value": "a <image> b"}], "images": ["one.png"]},
    ],
    ids=["data url", "object", "messages", "parts with pictures", "parts", "sharegpt"],
)
def test_every_way_to_give_a_picture_is_the_same(
    row: dict[str, Any], read: Callable[..., ConversationDataset], tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(encoded(16, 16))
    answer = {"role": "assistant", "content": "c"}
    turns = {
        "messages": [*row.get("messages", []), answer],
        "conversations": [*row.get("conversations", []), {"from": "gpt", "value": "c"}],
    }
    given = {**row, **{key: value for key, value in turns.items() if key in row}}
    if "prompt" in row:
        given["response"] = "c"
    (found,) = read(given).sequences
    (plain,) = read({"prompt": "a <image> b", "response": "c", "images": ["one.png"]}).sequences
    assert torch.equal(found.token_ids, plain.token_ids) and torch.equal(found.loss_mask, plain.loss_mask)
    assert found.images is not None and plain.images is not None
    assert [p.key for p in found.images.pictures] == [p.key for p in plain.images.pictures]


def test_places_count_the_tokens_of_the_pack(read: Callable[..., ConversationDataset]) -> None:
    one, two = url(encoded(16, 16)), url(encoded(24, 16))
    rows = read(
        {"prompt": "no picture", "response": "x"},
        {"prompt": "<image><image>", "response": "y", "images": [one, two]},
        {"prompt": "then <image>", "response": "z", "images": [two]},
    ).sequences
    packed = pack(rows, [1, 0, 2], pad_to_multiple=16, pad_token_id=0)
    assert packed.images is not None and packed.position_ids.shape == (3, packed.num_tokens)
    token = vision_models.tokenizer().convert_tokens_to_ids("<|image_pad|>")
    assert packed.images.places.tolist() == (packed.token_ids == token).nonzero()[:, 0].tolist()
    assert [p.grid for p in packed.images.pictures] == [(4, 4), (4, 6), (4, 6)]
    assert pack(rows, [0], 1, 0).images is None and pack(rows, [0], 1, 0).position_ids.dim() == 1


def bomb() -> bytes:
    """A PNG that says that it has 60,000 x 60,000 pixels."""
    content = bytearray(encoded(8, 8))
    content[16:24] = (60000).to_bytes(4, "big") * 2
    return bytes(content)


def animated() -> bytes:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (encoded(64, 64)[:-400], "cannot be read"),
        (encoded(64, 64, form="JPEG")[:-500], "cannot be read"),
        (b"", "cannot be read"),
        (b"not a picture", "cannot be read"),
        (bomb(), "60000 x 60000 pixels, more than|cannot be read"),
        (animated(), "has 2 frames"),
        (encoded(16, 16, "CMYK", "JPEG"), "has the colours CMYK: convert it to RGB"),
        (encoded(1000, 4), "1000 x 4 pixels: one side is over 200 times the other; cut it"),
    ],
    ids=["cut png", "cut jpeg", "empty", "text", "bomb", "animated", "cmyk", "strip"],
)
def test_a_bad_picture_is_one_sentence(content: bytes, words: str, read: Callable[..., ConversationDataset]) -> None:
    row = {"prompt": "<image>", "response": "c", "images": [url(encoded(16, 16)), url(content)]}
    row["prompt"] = "<image><image>"
    with pytest.raises(InputError, match=f"rows.jsonl line 2, picture 2.*(?:{words})") as found:
        read({"prompt": "a", "response": "b"}, row)
    assert "\n" not in str(found.value)


def test_a_picture_that_becomes_a_strip_is_refused_before_an_engine_sees_it(tmp_path: Path) -> None:
    sizes = {"size": {"shortest_edge": SIDE**2, "longest_edge": 1 << 20}, "patch_size": SIDE // 2, "merge_size": 2}
    reader = PictureReader(Qwen2VLImageProcessorPil(**sizes), vision_models.MARK, 1, 1)

    def take(width: int, height: int) -> tuple[int, int]:
        fields = {"prompt": "<image>", "images": [encoded(width, height)]}
        ((_, (picture,)),) = reader.take([Row(tmp_path / "rows.parquet", 3, fields)], "data.train_files")
        return picture.grid

    assert take(200 * SIDE, SIDE) == (2, 400)
    with pytest.raises(InputError, match="row 3, picture 1 has 2200 x 11 pixels: .* rounded to whole tokens; cut it"):
        take(200 * 11, 11)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "<image><image>", "images": ["one.png"]}, "more places for pictures than pictures"),
        ({"prompt": "<image>", "images": ["one.png", "one.png"]}, "has 2 pictures but 1 places"),
        ({"prompt": "no place", "images": ["one.png"]}, "has 1 pictures but 0 places"),
        ({"prompt": "<image>" * 17, "images": ["one.png"] * 17}, "more than data.max_images 16"),
        ({"prompt": "<image>", "images": ["gone.png"]}, "gone.png is no file"),
        ({"prompt": "<image>", "images": ["https://example.org/a.png"]}, "nothing is downloaded"),
        ({"prompt": "<image>", "images": ["data:image/png;base64,??"]}, "is not base64"),
        ({"prompt": "<image>", "images": [7]}, "picture 1 is 7: give encoded bytes"),
        ({"prompt": "<image> and <|image_pad|>", "images": ["one.png"]}, "special token of a picture"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "videos are not trained on"),
    ],
)
def test_a_bad_row_is_one_sentence(
    row: dict[str, Any], words: str, read: Callable[..., ConversationDataset], tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(encoded(16, 16))
    with pytest.raises(InputError, match=f"rows.jsonl line 1.*{words}"):
        read({**row, "response": "c"})


@pytest.mark.parametrize("path", ["../one.png", "in/../../one.png", "{outside}/one.png"])
def test_a_path_leads_nowhere_outside_of_the_directory_of_the_data(
    path: str, read: Callable[..., ConversationDataset], tmp_path: Path
) -> None:
    outside = tmp_path.parent / "outside"
    outside.mkdir(exist_ok=True)
    for directory in (outside, outside.parent):
        (directory / "one.png").write_bytes(encoded(16, 16))
    row = {"prompt": "<image>", "response": "c", "images": [path.format(outside=outside)]}
    with pytest.raises(InputError, match=r"line 1, picture 1 is '.*one\.png', outside of the directory of its data"):
        read(row)
    (tmp_path / "link").symlink_to(outside)
    for inside in ("link/one.png", str(tmp_path / "link" / "one.png"), "in/../link/one.png"):
        assert read({**row, "images": [inside]}).sequences[0].images is not None


def test_a_file_that_changes_under_way_is_found(read: Callable[..., ConversationDataset], tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(encoded(16, 16))
    (row,) = read({"prompt": "<image>", "response": "c", "images": ["one.png"]}).sequences
    (tmp_path / "one.png").write_bytes(encoded(24, 24))
    assert row.images is not None
    with pytest.raises(InputError, match=re.escape("rows.jsonl line 1, picture 1 has changed")):
        row.images.pictures[0].patches()


def test_a_model_of_text_refuses_pictures(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "response": "b", "images": ["one.png"]}) + "\n")
    with pytest.raises(InputError, match="only stages sft and rl, and mega-rl eval, of .* read pictures"):
        ConversationDataset.from_files(DataFiles([str(file)]), vision_models.tokenizer(), DataConfig())
