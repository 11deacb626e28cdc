"""Pictures made small, to be shown beside the samples whose prompts have them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence, Set

from mega_rl.data.pictures.pictures import FilePicture, encoded_pictures, opened
from mega_rl.data.rows.rows import Row, rows_of
from mega_rl.errors import InputError
from mega_rl.types import Prompt

MAX_SIDE = 160  # pixels
MAX_PICTURES = 8  # of a sample
QUALITY = 70  # of JPEG: a thumbnail takes a few kilobytes


def thumbnail(content: bytes, where: str) -> bytes:
    """Encoded bytes of a picture -> a JPEG of at most ``MAX_SIDE`` pixels on a side.

    Args:
        where: the row and the number of the picture in it, for messages.

    Raises:
        InputError: a picture that no run takes.
    """
    with opened(content, where) as image:
        image.draft("RGB", (2 * MAX_SIDE, 2 * MAX_SIDE))  # a JPEG is decoded no finer than is needed
        small = image.convert("RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    made = io.BytesIO()
    small.save(made, "JPEG", quality=QUALITY)
    return made.getvalue()


def thumbnails_of(prompt: Prompt, pictures: Mapping[str, FilePicture]) -> tuple[bytes, ...]:
    """Of the first pictures of a prompt; none of a picture that cannot be read any more: showing it ends no run."""
    found = []
    for image in prompt.images[:MAX_PICTURES]:
        try:
            picture = pictures[image.key]
            found.append(thumbnail(picture.content(), picture.where))
        except (InputError, KeyError):
            continue
    return tuple(found)


class RecordedPictures:
    """The pictures of recorded prompts, found again in the data files of the run.

    Args:
        files: of the prompts, in their order.
        key: the configuration field that lists them, for messages.
        wanted: the rows that will be asked for, counted from 0 through all files; no other is kept.

    Raises:
        InputError: no files, or one that cannot be read.
    """

    def __init__(self, files: Sequence[str], key: str, wanted: Set[int]) -> None:
        if not files:
            raise InputError(f"{key} is empty: the data of the run is not known")
        self._rows: dict[int, Row] = {}
        for index, row in enumerate(rows_of(files, key)):
            if index in wanted:
                self._rows[index] = row
                if len(self._rows) == len(wanted):
                    break

    def of(self, index: int, digests: Sequence[str]) -> list[bytes | str]:
        """Thumbnails of the first of these pictures, which belong to a row, or for one of them why it is not shown.

        Raises:
            InputError: there is no such row, or none of its pictures is as it was.
        """
        if index not in self._rows:
            raise InputError(f"the data has no row {index + 1}: the files have changed since the run")
        row, wanted, found = self._rows[index], digests[:MAX_PICTURES], dict[str, bytes | str]()
        for number, content in enumerate(encoded_pictures(row), start=1):
            digest = hashlib.sha256(content).hexdigest()
            if digest in wanted and digest not in found:
                try:
                    found[digest] = thumbnail(content, f"{row.where}, picture {number}")
                except InputError as error:  # the others are shown
                    found[digest] = str(error)
        if wanted and not found:
            raise InputError(f"{row.where}: its pictures have changed since the run, or are gone")
        return [found.get(digest, "it has changed since the run, or is gone") for digest in wanted]
