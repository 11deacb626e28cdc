"""The pictures of a run's prompts: prompts name them, and every rank finds them here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mega_rl.data.pictures import FilePicture, PictureReader
from mega_rl.errors import InputError
from mega_rl.microbatch import Images, Sequence
from mega_rl.models.positions import Placed, image_positions, picture_places
from mega_rl.types import Prompt, PromptImage


class Album:
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
