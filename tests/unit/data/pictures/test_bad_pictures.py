"""Pictures that nobody can learn from, in rows of both stages: one sentence with row and number, in little memory."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.pictures.image_processor import picture_reader
from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.data.pictures.pictures import PictureReader
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.rows.rows import DataFiles
from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape
from tests.launching.launch import run_copy
from tests.models import vision_models

LARGE, HUGE = 60_000, 1 << 20  # pixels of a side
BOMB = 128 << 20  # bytes of what is packed
ROOM = 32 << 20  # bytes that looking at a bomb may take
DATA = DataConfig(max_prompt_length=400)


def saved(image: Image.Image, form: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A grey picture of ten rows, whatever its header says, with these chunks before its pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 10 * (min(width, 8) + 1))
    parts = [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    made = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


@cache
def packed() -> bytes:
    """``BOMB`` zeros, a thousandth as long as they were."""
    packer = zlib.compressobj()
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(BOMB >> 20)) + packer.flush()


def overwritten(content: bytes, start: int, numbers: bytes) -> bytes:
    return content[:start] + numbers + content[start + len(numbers) :]


def jpeg(width: int, height: int) -> bytes:
    content = saved(Image.new("RGB", (16, 16)), "JPEG")
    return overwritten(content, content.index(b"\xff\xc0") + 5, struct.pack(">HH", height, width))


def tiff(width: int, height: int, tile: int = 0, pixels: bytes = b"\0" * 64) -> bytes:
    """Grey, of one strip, or in squares of ``tile`` pixels that are packed."""
    where, size = 8, len(pixels)
    tags = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 8 if tile else 1), (262, 3, 1), (277, 3, 1)]
    tags += (
        [(322, 4, tile), (323, 4, tile), (324, 4, where), (325, 4, size)] if tile else [(273, 4, where), (279, 4, size)]
    )
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in sorted(tags))
    table = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    return struct.pack("<2sHI", b"II", 42, where + size) + pixels + table


def animated(form: str) -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green")]
    frames[0].save(buffer, form, save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def gif(width: int, height: int) -> bytes:
    return overwritten(saved(Image.new("P", (8, 8)), "GIF"), 6, struct.pack("<HH", width, height))


def bmp(width: int, height: int) -> bytes:
    return overwritten(saved(Image.new("RGB", (8, 8)), "BMP"), 18, struct.pack("<ii", width, height))


TOO_LARGE = "pixels, more than anything needs: store it smaller|cannot be read"
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut": (lambda: saved(Image.effect_noise((64, 64), 90), "PNG")[:-400], "cannot be read"),
    "no width": (lambda: png(0, 10), "has 0 x 10 pixels: leave it out|cannot be read"),
    "no pixels": (lambda: png(8, 10)[:33], "cannot be read"),
    "cmyk": (lambda: saved(Image.new("CMYK", (16, 16)), "JPEG"), "has the colours CMYK: convert it to RGB"),
    "16 bits": (lambda: saved(Image.new("I;16", (16, 16)), "PNG"), "has the colours I;16: convert it to RGB"),
    "gif of frames": (lambda: animated("GIF"), "has 3 frames: store one of them"),
    "webp of frames": (lambda: animated("WEBP"), "has 3 frames: store one of them"),
    "png of frames": (lambda: animated("PNG"), "has 3 frames: store one of them"),
    "tiff of pages": (lambda: animated("TIFF"), "has 3 frames: store one of them"),
    "strip": (lambda: saved(Image.new("L", (1001, 5)), "PNG"), "one side is over 200 times the other; cut it"),
    "other kind": (lambda: saved(Image.new("RGB", (8, 8)), "PPM"), "cannot be read"),
    "large png": (lambda: png(LARGE, LARGE), TOO_LARGE),
    "huge png": (lambda: png(HUGE, HUGE), TOO_LARGE),
    "large jpeg": (lambda: jpeg(LARGE, LARGE), TOO_LARGE),
    "large gif": (
        lambda: overwritten(saved(Image.new("P", (8, 8)), "GIF"), 6, struct.pack("<HH", LARGE, LARGE)),
        TOO_LARGE,
    ),
    "large bmp": (lambda: bmp(LARGE, LARGE), TOO_LARGE),
    "large tiff": (lambda: tiff(LARGE, LARGE), TOO_LARGE),
    "large squares": (lambda: tiff(16, 16, 16_384, packed()), "has tiles of 16384 x 16384 pixels"),
    "packed text": (lambda: png(8, 10, (b"zTXt", b"a\0\0" + packed())), "cannot be read"),
    "packed colours": (lambda: png(8, 10, (b"iCCP", b"a\0\0" + packed())), "cannot be read"),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PictureReader:
    model = vision_models.write(tmp_path_factory.mktemp("model"), "qwen2_5_vl")
    tower = read_model_shape(model).tower
    assert tower is not None
    return picture_reader(model, tower, vision_models.tokenizer(), DATA)


@pytest.mark.parametrize("stage", ["sft", "rl"])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_picture_is_one_sentence(kind: str, stage: str, reader: PictureReader, tmp_path: Path) -> None:
    make, words = BAD[kind]
    (tmp_path / "bad").write_bytes(make())
    Image.new("RGB", (16, 16)).save(tmp_path / "good.png")
    row = {"prompt": "<image><image>", "answer": "c", "images": ["good.png", "bad"]}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in ({"prompt": "a", "answer": "b"}, row)))
    with pytest.raises(InputError, match=f"rows.jsonl line 2, picture 2.*(?:{words})") as found:
        if stage == "rl":
            PromptDataset.from_files(
                DataFiles([str(file)]), vision_models.tokenizer(), DATA, picture_set=PictureSet(reader)
            )
        else:
            ConversationDataset.from_files(DataFiles([str(file)]), vision_models.tokenizer(), DATA, pictures=reader)
    assert "\n" not in str(found.value)


LOOK = """
import sys
from pathlib import Path
from PIL import Image
from mega_rl.data.pictures.pictures import is_usable
from mega_rl.data.rows.rows import DataFiles

def memory(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) << 10

Image.init()
for path in sys.argv[1:]:
    content = Path(path).read_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the highest use so far is forgotten
    before = memory("VmRSS")
    print(is_usable(content), memory("VmHWM") - before, path, flush=True)
"""


def test_bombs_take_little_memory(tmp_path: Path) -> None:
    Image.new("L", (9_000, 5_000)).save(tmp_path / "good.png")
    names = [name for name in BAD if name.startswith(("large", "huge", "packed"))]
    for name in names:
        (tmp_path / name).write_bytes(BAD[name][0]())
    lines = run_copy(LOOK, *(tmp_path / name for name in ("good.png", *names))).check().stdout.splitlines()
    looked = [(line.split()[0] == "True", int(line.split()[1])) for line in lines]
    assert looked[0][0] and looked[0][1] > ROOM, "what is learnt from may take it"
    assert len(looked) == len(names) + 1
    for name, (is_usable, num_bytes) in zip(names, looked[1:], strict=True):
        assert not is_usable and num_bytes < ROOM, (name, num_bytes)
