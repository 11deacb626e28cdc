"""Pictures beside samples: small whatever they were, and only those that the run had."""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from mega_rl.data.pictures.thumbnails import MAX_PICTURES, MAX_SIDE, RecordedPictures, thumbnail
from mega_rl.errors import InputError
from tests.unit.data.pictures.test_bad_pictures import BAD


def encoded(size: tuple[int, int], mode: str = "RGB", kind: str = "PNG") -> bytes:
    made = io.BytesIO()
    Image.effect_noise(size, 90).convert(mode).save(made, kind)
    return made.getvalue()


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "JPEG"), ("RGBA", "PNG"), ("P", "GIF"), ("1", "BMP"), ("LA", "PNG")]
)
def test_a_thumbnail_is_small(mode: str, kind: str) -> None:
    made = thumbnail(encoded((900, 300), mode, kind), "it")
    with Image.open(io.BytesIO(made)) as image:
        assert (image.format, image.size) == ("JPEG", (MAX_SIDE, MAX_SIDE // 3))
    assert len(made) < 20_000, "noise is the worst case"


def test_recorded_pictures_are_found_again_by_their_digests(tmp_path: Path) -> None:
    contents = [encoded((20 + number, 20)) for number in range(MAX_PICTURES + 1)]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.png").write_bytes(content)
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    names = [f"{number}.png" for number in range(len(contents))]
    part = {"role": "user", "content": [{"type": "image", "image": "1.png"}, {"type": "text", "text": "?"}]}
    rows = [{"prompt": "text"}, {"prompt": "<image>" * len(names), "images": names}, {"prompt": [part]}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = RecordedPictures([str(file)], "data.train_files", {1, 2, 3})
    assert recorded.of(1, digests) == [thumbnail(content, "") for content in contents[:MAX_PICTURES]]
    assert recorded.of(2, digests[1:2]) == [thumbnail(contents[1], "")]
    (tmp_path / "1.png").write_bytes(contents[0])
    assert recorded.of(1, digests[:2]) == [thumbnail(contents[0], ""), "it has changed since the run, or is gone"]
    with pytest.raises(InputError, match="line 3: its pictures have changed since the run"):
        recorded.of(2, digests[1:2])
    with pytest.raises(InputError, match="no row 4"):
        recorded.of(3, digests)


@pytest.mark.parametrize("kind", ["large png", "large squares", "cut", "gif of frames"])
def test_a_picture_that_no_run_takes_has_a_sentence_in_its_place(kind: str, tmp_path: Path) -> None:
    make, words = BAD[kind]
    contents = [make(), encoded((20, 20))]
    for name, content in zip(("bad", "good.png"), contents, strict=True):
        (tmp_path / name).write_bytes(content)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "<image><image>", "images": ["bad", "good.png"]}))
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    said, shown = RecordedPictures([str(file)], "data.train_files", {0}).of(0, digests)
    assert isinstance(said, str) and re.search(f"line 1, picture 1.*(?:{words})", said)
    assert shown == thumbnail(contents[1], "")


def test_only_the_rows_that_are_shown_are_kept(tmp_path: Path) -> None:
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file in files:
        file.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    files[1].write_text(files[1].read_text() + "no JSON")
    recorded = RecordedPictures([str(file) for file in files], "data.train_files", {2})
    assert recorded.of(2, []) == []
    with pytest.raises(InputError, match="no row 2"):
        recorded.of(1, [])
    with pytest.raises(InputError, match="line 4 is no JSON"):
        RecordedPictures([str(file) for file in files], "data.train_files", {2, -1, 10**30})
