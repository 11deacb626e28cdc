"""The pictures of a run's prompts: prompts name them, and every rank finds them here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mega_rl.data.pictures.pictures import CONTENTS, MARK, EncodedPicture, FilePicture, PictureReader, given_pictures
from mega_rl.data.rows.rows import Row
from mega_rl.errors import InputError
from mega_rl.microbatch import Images, Sequence
from mega_rl.models.positions import Placed, image_positions, picture_places
from mega_rl.types import Prompt, PromptImage


class PictureSet:
    """Pictures by their keys, and those of every prompt that is learnt from.

    Args:
        reader: reads the pictures of data rows.
    """

    def __init__(self, reader: PictureReader) -> None:
        self.reader = reader
        self.pictures: dict[str, FilePicture] = {}
        self._of_prompt: dict[int, tuple[PromptImage, ...]] = {}

    def add(self, pictures: Mapping[str, FilePicture]) -> None:
        self.pictures |= pictures

    def encoded(self, prompts: Iterable[Prompt]) -> dict[str, EncodedPicture]:
        """The pictures that these prompts name, for a process that has no `PictureSet`.

        Raises:
            InputError: a file that has changed, or cannot be read any more.
        """
        keys = dict.fromkeys(image.key for prompt in prompts for image in prompt.images)
        return {key: self.pictures[key].encoded() for key in keys}

    def learn_from(self, prompts: Iterable[Prompt]) -> None:
        """From here on ``seeing`` knows these prompts by their indices."""
        self._of_prompt = {prompt.index: prompt.images for prompt in prompts}

    def seeing(self, sequence: Sequence, prompt_index: int) -> Sequence:
        """A training sequence that begins with this prompt, with the prompt's pictures."""
        images = self._of_prompt[prompt_index]
        if not images:
            return sequence
        pictures = tuple(self.pictures[image.key] for image in images)
        placed = [Placed(image.first, *picture.grid) for image, picture in zip(images, pictures, strict=True)]
        merge = self.reader.merge
        positions = image_positions(sequence.loss_mask.numel(), placed, merge)
        return replace(sequence, images=Images(pictures, picture_places(placed, merge)), position_ids=positions)


def with_pictures(
    token_ids: Iterable[int], pictures: list[FilePicture], token: int
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """A prompt's tokens, each one of a picture repeated as often as the picture has tokens, and where pictures stand.

    Raises:
        InputError: another number of pictures than ``token`` stands for.
    """
    made: list[int] = []
    images: list[PromptImage] = []
    for one in token_ids:
        if one != token:
            made.append(one)
            continue
        if len(images) == len(pictures):
            raise InputError(
                "a text has the special token of a picture: take it out, and write <image> where a picture belongs"
            )
        picture = pictures[len(images)]
        images.append(PromptImage(picture.key, len(made), picture.num_tokens))
        made += [token] * picture.num_tokens
    if len(images) < len(pictures):
        raise InputError(
            f"the chat template writes {len(images)} of {len(pictures)} pictures: take the model's own template, or "
            "leave the row out"
        )
    return made, tuple(images)


def has_pictures(row: Row) -> bool:
    """Whether it has a picture or a place for one, so that only a ``PictureReader`` can tell what it is."""
    return bool(given_pictures(row)) or any(_has_places(row.get(name)) for name in CONTENTS)


def _has_places(value: Any) -> bool:
    if isinstance(value, Mapping):
        if "type" in value and "role" not in value and value["type"] != "text":
            return True
        return any(_has_places(value.get(key)) for key in ("content", "value", "text"))
    return any(map(_has_places, value)) if isinstance(value, list) else isinstance(value, str) and MARK in value
