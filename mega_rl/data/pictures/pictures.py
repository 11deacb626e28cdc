"""Pictures of data rows: found, checked by their first bytes, and read only where they are learnt from.

A row brings them in the column ``images`` (or ``image``), or in the content parts of its messages; where they stand is
``<image>`` in the text, or the part. A picture is encoded bytes, a path within the directory of the data file, or a
data URL. What is kept of it until it is needed is that alone: rows, batches and checkpoints never hold pixels.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mega_rl.data.rows.rows import Row
from mega_rl.errors import InputError, shortened, shown
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import gather_objects, together, work_shared

COLUMNS = ("images", "image")
MARK = "<image>"  # stands for a picture in a text
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # others run programs, or are hardly ever read
MODES = ("RGB", "RGBA", "L", "LA", "P", "1")  # whose colours nobody has to guess
MAX_FILE_BYTES = 1 << 28
MAX_SIDE_PIXELS = 1 << 16
MAX_PIXELS = 1 << 27  # of a picture before it is made smaller: more is a mistake, or meant to fill the memory
TILE_WIDTH, TILE_LENGTH = 322, 323  # tags of a TIFF
MAX_RATIO = 200  # of the longer side to the shorter one, as the image processors have it
CONTENTS = ("system", "messages", "conversations", "prompt", "question", "instruction", "input")


@dataclass(frozen=True)
class FilePicture:
    """A ``Picture`` as its encoded bytes or its file, with the grid of patches that it becomes."""

    where: str  # for messages: the row and the number of the picture in it
    source: bytes | Path
    digest: str  # of the encoded bytes
    grid: tuple[int, int]
    reader: PictureReader

    @property
    def key(self) -> str:
        return f"{self.digest}-{self.grid[0]}x{self.grid[1]}"

    @property
    def num_tokens(self) -> int:
        """Of the language model."""
        return self.reader.num_tokens(self)

    def patches(self) -> Tensor:
        """Raises InputError for a file that has changed, or that cannot be decoded."""
        with opened(self.content(), self.where) as image:
            return self.reader.patches(image, self.grid)

    def resized(self) -> Image.Image:
        """In the size of its patches, for engines: whatever makes these of it has nothing left to resize.

        Raises:
            InputError: as ``patches``.
        """
        return self.encoded().resized()

    def encoded(self) -> EncodedPicture:
        """Itself, independent of any file.

        Raises:
            InputError: a file that has changed.
        """
        return EncodedPicture(self.where, self.content(), self.reader.pixels(self.grid))

    def content(self) -> bytes:
        """The encoded bytes. Raises InputError for a file that has changed, or that cannot be read."""
        content = _content(self.source, self.where)
        if _digest(content) != self.digest:
            raise InputError(f"{self.where} has changed since the run began: put it back as it was")
        return content


@dataclass(frozen=True)
class EncodedPicture:
    """A picture as its encoded bytes, which can be sent to where its file is not."""

    where: str  # as of ``FilePicture``
    content: bytes
    size: tuple[int, int]  # columns and rows of pixels of its patches

    def resized(self) -> Image.Image:
        """As of ``FilePicture``."""
        with opened(self.content, self.where) as image:
            return image.convert("RGB").resize(self.size, Image.Resampling.BICUBIC)


class FoundPicture(NamedTuple):
    """A picture of a row before it is looked at."""

    where: str  # as of ``FilePicture``
    source: bytes | Path


class PictureReader:
    """Makes patches of pictures as one model wants them.

    Args:
        processor: transformers' image processor of the model, the one that needs no torchvision.
        mark: what the chat template writes for a picture, one token of it per patch of the language model.
        token: that token.
        max_images: of a row.
    """

    def __init__(self, processor: Any, mark: str, token: int, max_images: int) -> None:
        self._processor, self.mark, self.token, self._max_images = processor, mark, token, max_images
        self.merge: int = processor.merge_size

    def take(self, rows: Sequence[Row], key: str) -> list[tuple[Row, list[FilePicture]]]:
        """Every row as text, with ``mark`` in the place of every picture, and the pictures in that order. Collective.

        Every rank is given the same rows, and opens an even share of the pictures; of each it looks, together with the
        ranks of its node, whether its file is there.

        Args:
            key: the configuration field that lists the rows' files, for messages.

        Raises:
            InputError: on every rank, pictures that cannot be used, or more or fewer of them than places.
        """
        with together(f"finding the pictures of {key}"):
            placed = [self._placed(row) for row in rows]
            found = [picture for _, pictures in placed for picture in pictures]
            of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            for picture in found[int(os.environ.get("LOCAL_RANK", "0")) % of_node :: of_node]:
                _require(picture)
        counts = gather_objects(len(found))
        if len(set(counts)) > 1:
            other = next(rank for rank, count in enumerate(counts) if count != counts[0])
            raise InputError(
                f"{key} has {counts[0]} pictures on rank 0 and {counts[other]} on rank {other}: give every node the "
                "same files"
            )
        looks = iter(work_shared(found, self._look))
        return [(row, [FilePicture(*one, *next(looks), self) for one in pictures]) for row, pictures in placed]

    def _placed(self, row: Row) -> tuple[Row, list[FoundPicture]]:
        given = given_pictures(row)
        found: list[Any] = []
        fields = {name: value for name, value in row.fields.items() if name not in COLUMNS}
        if not given and MARK not in str(fields.get("prompt")) and not _has_parts(fields):
            return row, []
        rest = iter(given)
        fields |= {name: self._as_text(fields[name], rest, found, row) for name in CONTENTS if fields.get(name)}
        if left := len(list(rest)):
            raise InputError(
                f"{row.where} has {len(given)} pictures but {len(given) - left} places for them: write {MARK} once for "
                "each, where it belongs"
            )
        if len(found) > self._max_images:
            raise InputError(
                f"{row.where} has {len(found)} pictures, more than data.max_images {self._max_images}: raise it, or "
                "leave such rows out"
            )
        wheres = (f"{row.where}, picture {number}" for number in range(1, len(found) + 1))
        pairs = zip(wheres, found, strict=False)
        return replace(row, fields=fields), [
            FoundPicture(where, _source(value, where, row.file)) for where, value in pairs
        ]

    def _as_text(self, value: Any, rest: Iterator[Any], found: list[Any], row: Row) -> Any:
        """A text, a message, or a list of messages, its pictures taken out."""
        if isinstance(value, str):
            parts = value.split(MARK)
            found += [_next(rest, row) for _ in parts[1:]]
            return self.mark.join(parts)
        if isinstance(value, list):
            is_content = all(isinstance(part, Mapping) and "type" in part for part in value)
            made = [self._as_text(part, rest, found, row) for part in value]
            return "".join(made) if is_content and all(isinstance(part, str) for part in made) else made
        if not isinstance(value, Mapping):
            return value
        if "type" in value and "role" not in value:
            return self._part(value, rest, found, row)
        keys = [key for key in ("content", "value") if value.get(key)]
        return {**value, **{key: self._as_text(value[key], rest, found, row) for key in keys}}

    def _part(self, part: Mapping[str, Any], rest: Iterator[Any], found: list[Any], row: Row) -> str:
        kind = part["type"]
        if kind == "text" and isinstance(part.get("text"), str):
            return str(self._as_text(part["text"], rest, found, row))
        if kind in ("image", "image_url"):
            own = _own_value(part)
            found.append(_next(rest, row) if own is None else own)
            return self.mark
        what = "videos are not trained on" if kind == "video" else "give parts of type text and image"
        raise InputError(f"{row.where} has a content part of type {shown(kind)}: {what}, or leave such rows out")

    def _look(self, found: FoundPicture) -> tuple[str, tuple[int, int]]:
        """Digest and grid of a picture that can be used."""
        where, content = found.where, _content(found.source, found.where)
        width, height = _decode_coarsely(content, where)
        grid = self._grid(width, height)
        if max(grid) > MAX_RATIO * min(grid):  # an engine looks at the sides of what ``resized`` gives
            raise InputError(
                f"{where} has {width} x {height} pixels: one side is over {MAX_RATIO} times the other once they are "
                "rounded to whole tokens; cut it"
            )
        return _digest(content), grid

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of a picture of so many pixels."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        patch, size = self._processor.patch_size, self._processor.size
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        rows, columns = smart_resize(height, width, factor=patch * self.merge, **limits)
        return rows // patch, columns // patch

    def patches(self, image: Image.Image, grid: tuple[int, int]) -> Tensor:
        """[rows x columns, C] float32 of a picture that becomes this grid."""
        made = self._processor(images=[image.convert("RGB")], return_tensors="np")
        assert tuple(made["image_grid_thw"][0]) == (1, *grid), "the grid was foretold otherwise"
        return torch.from_numpy(np.ascontiguousarray(made["pixel_values"], dtype=np.float32))

    def pixels(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Columns and rows of pixels of a grid of patches."""
        rows, columns = (size * self._processor.patch_size for size in grid)
        return columns, rows

    @property
    def pixel_limits(self) -> dict[str, int]:
        """The least and the most pixels of what ``resized`` gives, by the names that image processors have for them."""
        token = (self._processor.patch_size * self.merge) ** 2
        return {"shortest_edge": token, "longest_edge": max(token, self._processor.size["longest_edge"])}

    def num_tokens(self, picture: FilePicture) -> int:
        """Of the language model."""
        return picture.grid[0] * picture.grid[1] // self.merge**2


def given_pictures(row: Row) -> list[Any]:
    """The pictures of its column."""
    column = next((row.get(name) for name in COLUMNS if row.get(name) is not None), None)
    return [one for one in (column if isinstance(column, list) else [column]) if one is not None and one != ""]


def encoded_pictures(row: Row) -> Iterator[bytes]:
    """The row's pictures as encoded bytes, those of its column first; InputError for one that is not there."""
    column = next((row.get(name) for name in COLUMNS if row.get(name) is not None), None) or []
    values = [*(column if isinstance(column, list) else [column]), *_own_values([row.get(name) for name in CONTENTS])]
    for number, value in enumerate(values):
        where = f"{row.where}, picture {number + 1}"
        yield _content(_source(value, where, row.file), where)


def _own_values(value: Any) -> Iterator[Any]:
    """What content parts of messages say of their pictures themselves."""
    if isinstance(value, Mapping) and value.get("type") in ("image", "image_url") and "role" not in value:
        if (own := _own_value(value)) is not None:
            yield own
    elif isinstance(value, list | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _own_values(part)


def _own_value(part: Mapping[str, Any]) -> Any:
    """What a content part says of its picture; None: that stands in the column."""
    own = next((part[key] for key in ("image", "image_url", "url", "path", "bytes") if part.get(key)), None)
    return own["url"] if isinstance(own, Mapping) and "url" in own else own


def is_usable(content: bytes) -> bool:
    """Whether these encoded bytes are a picture that training takes."""
    try:
        _decode_coarsely(content, "")
    except InputError:
        return False
    return True


def _decode_coarsely(content: bytes, where: str) -> tuple[int, int]:
    """Width and height in pixels; InputError for a picture that cannot be used."""
    HEART.mark()
    with opened(content, where) as image:
        size = image.width, image.height
        image.draft("RGB", (1, 1))  # a JPEG is decoded coarsely, which finds a cut one as well
        image.load()
    return size


def _has_parts(fields: Mapping[str, Any]) -> bool:
    """Whether a message has content parts, or its text a place for a picture."""
    for name in CONTENTS:
        messages = fields.get(name)
        for message in messages if isinstance(messages, list) else [messages]:
            content = message
            if isinstance(message, Mapping):
                content = message.get("content") or message.get("value")
            if isinstance(content, list) or (isinstance(content, str) and MARK in content):
                return True
    return False


def _next(rest: Iterator[Any], row: Row) -> Any:
    found = next(rest, None)
    if found is None:
        raise InputError(f"{row.where} has more places for pictures than pictures: take {MARK} out, or add the picture")
    return found


def _source(value: Any, where: str, file: Path) -> bytes | Path:
    if isinstance(value, Mapping):  # as the datasets library stores pictures
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if not isinstance(value, str) or not value:
        raise InputError(f"{where} is {shown(value)}: give encoded bytes, a path, or a data URL")
    if value.startswith("data:"):
        _, is_encoded, text = value.partition(";base64,")
        try:
            return base64.b64decode(text, validate=True) if is_encoded else b""
        except ValueError as error:
            raise InputError(f"{where} is a data URL that is not base64 ({error}): write it again") from error
    if "://" in value[:16]:
        raise InputError(f"{where} is {shown(value)}: nothing is downloaded; store the file and give its path")
    directory = file.parent.absolute()
    inside = os.path.relpath(value, directory) if os.path.isabs(value) else os.path.normpath(value)
    if inside.split(os.sep)[0] == os.pardir:  # a row from elsewhere could name any file of this machine
        raise InputError(
            f"{where} is {shown(value)}, outside of the directory of its data file: store it there, or a link to its "
            "directory"
        )
    return directory / inside


def _require(picture: FoundPicture) -> None:
    """Raise InputError if it has a path that leads to no file."""
    where, source = picture
    try:
        is_there = isinstance(source, bytes) or source.is_file()
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: {shortened(str(source))} cannot be read ({error}); make it readable") from error
    if not is_there:
        raise InputError(f"{where}: {shortened(str(source))} is no file; correct the path")


def _content(source: bytes | Path, where: str) -> bytes:
    if isinstance(source, bytes):
        return source
    _require(FoundPicture(where, source))
    try:
        if source.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{where}: {source} has more than {MAX_FILE_BYTES} bytes; store it smaller")
        return source.read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: {shortened(str(source))} cannot be read ({error}); make it readable") from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check(image: Image.Image, where: str) -> None:
    """Raises InputError by what the picture's first bytes say."""
    width, height = image.size
    if min(width, height) < 1:
        raise InputError(f"{where} has {width} x {height} pixels: leave it out")
    if max(width, height) > MAX_SIDE_PIXELS or width * height > MAX_PIXELS:
        raise InputError(f"{where} has {width} x {height} pixels, more than anything needs: store it smaller")
    tile = getattr(image, "tag_v2", {})  # a TIFF may be cut in tiles, which are decoded whole, larger than itself
    if tile.get(TILE_WIDTH, 0) * tile.get(TILE_LENGTH, 0) > MAX_PIXELS:
        raise InputError(
            f"{where} has tiles of {tile[TILE_WIDTH]} x {tile[TILE_LENGTH]} pixels, more than anything needs: store it "
            "otherwise"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise InputError(f"{where} has {width} x {height} pixels: one side is over {MAX_RATIO} times the other; cut it")
    if getattr(image, "n_frames", 1) > 1:
        raise InputError(f"{where} has {image.n_frames} frames: store one of them")  # type: ignore[attr-defined]
    if image.mode not in MODES:
        raise InputError(f"{where} has the colours {image.mode}: convert it to RGB")


@contextmanager
def opened(content: bytes, where: str) -> Iterator[Image.Image]:
    """A picture whose first bytes are within every limit; InputError for others, and where the block fails on it."""
    with _readable(where), Image.open(io.BytesIO(content), formats=FORMATS) as image:
        _check(image, where)
        yield image


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """What the imaging library raises for bytes that are no picture, or half of one, is one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # ``_check`` has a limit of its own
            yield
    except InputError:
        raise
    except Exception as error:  # every decoder raises its own kinds
        raise InputError(
            f"{where} cannot be read ({shortened(str(error))}): store it again, or leave it out"
        ) from error
