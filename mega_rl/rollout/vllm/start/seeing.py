"""Pictures for vLLM: prompts that it has rendered, with tokens that are ours to the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.models.shape import read_model_shape
from mega_rl.rollout.vllm.start.options import blind_arguments, picture_arguments
from mega_rl.rollout.vllm.start.versions import render
from mega_rl.types import Prompt


class Pixels(Protocol):
    """A picture that is read when an engine is given it."""

    def resized(self) -> Image.Image:
        """In the size of its patches.

        Raises:
            InputError: it cannot be read any more.
        """


@dataclass(frozen=True)
class Sight:
    """What an engine sees with.

    Args:
        pictures: by the keys that prompts have for them; more may come later.
        max_images: of a prompt.
        pixel_limits: of a picture as ``Pixels.resized`` gives it, by the names of image processors.
    """

    pictures: Mapping[str, Pixels]
    max_images: int
    pixel_limits: Mapping[str, int]


def sight_arguments(model_path: str, sight: Sight | None) -> dict[str, Any] | None:
    """The arguments of an engine that are about pictures; None for a model of text.

    Args:
        model_path: Hugging Face directory.
        sight: None: the engine is given no pictures, whatever the model is.

    Raises:
        InputError: no model of a supported family, or one whose files no engine can load.
    """
    shape = read_model_shape(model_path)
    if shape.fused_experts:
        HFReader(model_path).check_for_engines(shape)
    if sight is not None:
        return picture_arguments(sight.max_images, sight.pixel_limits)
    return None if shape.tower is None else blind_arguments()


class PromptRenderer:
    """Makes what the engine is given for a prompt.

    vLLM finds the places of pictures by looking for their tokens, and lets each stand for a whole picture. So it is
    given the prompt up to its last picture with one token for each; the tokens of the request, which may hold further
    ones that a model has written by itself, are put in the place of what it makes of that.
    """

    def __init__(self, llm: Any, sight: Sight | None) -> None:
        self._llm, self._sight = llm, sight
        self._last: tuple[Any, Any] = (None, None)  # the samples of a prompt come one after the other

    def __call__(self, prompt: Prompt) -> dict[str, Any]:
        """
        Raises:
            InputError: a picture that cannot be read any more.
            RuntimeError: the engine makes other tokens of the pictures than the trainer.
        """
        if not prompt.images:
            return {"type": "token", "prompt_token_ids": list(prompt.token_ids)}
        last = prompt.images[-1]
        head = prompt.token_ids[: last.first + last.num_tokens]
        key = head, tuple(image.key for image in prompt.images)
        if self._last[0] != key:
            self._last = key, self._rendered(prompt, head)
        return {**self._last[1], "prompt_token_ids": list(prompt.token_ids)}

    def _rendered(self, prompt: Prompt, head: tuple[int, ...]) -> dict[str, Any]:
        assert self._sight is not None, "a prompt with pictures for an engine that was started without"
        short: list[int] = []
        end = 0
        for image in prompt.images:
            short += head[end : image.first + 1]
            end = image.first + image.num_tokens
        pictures = [self._sight.pictures[image.key].resized() for image in prompt.images]
        rendered = render(self._llm, short, pictures)
        if tuple(rendered["prompt_token_ids"]) != head:
            raise RuntimeError(
                f"The engine makes {len(rendered['prompt_token_ids'])} tokens of the beginning of prompt "
                f"{prompt.index}, which has {len(head)}: the image processors of trainer and engine differ."
            )
        return rendered


def check_tokens(prompt: Prompt, output: Any) -> None:
    """Raise RuntimeError if an engine has answered other tokens than those of the prompt."""
    if list(output.prompt_token_ids) != list(prompt.token_ids):
        raise RuntimeError(
            f"The engine was given {len(prompt.token_ids)} tokens for prompt {prompt.index} and answered "
            f"{len(output.prompt_token_ids)} others."
        )
