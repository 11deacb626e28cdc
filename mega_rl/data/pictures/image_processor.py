"""The image processor of a vision-language model's directory, and how its chat template writes a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.pictures.pictures import PictureReader
from mega_rl.data.tokens.template import apply_template, uses_chat_template
from mega_rl.errors import InputError, shown
from mega_rl.models.files import read_config
from mega_rl.models.vision import Tower

FILE = "preprocessor_config.json"
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
BICUBIC = 3
_PROBE = "picture probe"


def picture_reader(
    model_dir: str | Path, tower: Tower, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> PictureReader:
    """Reads pictures as the model's own processor does, at most ``data.max_pixels`` large.

    Raises:
        InputError: a processor or a template that does otherwise than the families that are supported.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    file = Path(model_dir) / FILE
    settings = _settings(file)
    for key, wanted in (
        ("patch_size", tower.patch),
        ("merge_size", tower.merge),
        ("temporal_patch_size", tower.frames),
        ("resample", BICUBIC),
        *((step, True) for step in STEPS),
    ):
        if settings.get(key, wanted) != wanted:
            raise InputError(f"{file}: {key} is {shown(settings[key])}; only {wanted} is supported for this model")
    size = settings.get("size") or {}
    least = size.get("shortest_edge", settings.get("min_pixels"))
    most = size.get("longest_edge", settings.get("max_pixels"))
    if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most):
        raise InputError(f"{file}: size is {shown(size)}; give shortest_edge and longest_edge, in pixels")
    smallest = (tower.patch * tower.merge) ** 2
    if data.max_pixels < smallest:
        raise InputError(f"data.max_pixels is {data.max_pixels}, less than one token: set it to at least {smallest}")
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": min(least, data.max_pixels), "longest_edge": min(most, data.max_pixels)},
        patch_size=tower.patch,
        merge_size=tower.merge,
        temporal_patch_size=tower.frames,
        **{key: settings[key] for key in ("image_mean", "image_std", "rescale_factor") if key in settings},
    )
    token = read_config(model_dir).get("image_token_id")
    if not isinstance(token, int) or isinstance(token, bool):
        raise InputError(f"{model_dir}: image_token_id of config.json is {shown(token)}; copy the model again")
    return PictureReader(processor, _mark(tokenizer, token, data), token, data.max_images)


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}); copy the model's image processor again") from error
    if not isinstance(settings, dict):
        raise InputError(f"{file} is not a JSON object; copy the model's image processor again")
    return settings


def _mark(tokenizer: PreTrainedTokenizerBase, token: int, data: DataConfig) -> str:
    """What the chat template writes for a picture, found by rendering one."""
    if not uses_chat_template(tokenizer, data.chat_template):
        raise InputError("pictures need the chat template of the model: set data.chat_template to auto")
    parts: Any = [{"type": "image"}, {"type": "text", "text": _PROBE}]
    with_picture = apply_template(tokenizer, [{"role": "user", "content": parts}], add_generation_prompt=False)
    alone = apply_template(tokenizer, [{"role": "user", "content": _PROBE}], add_generation_prompt=False)
    before = alone.partition(_PROBE)[0]
    mark = with_picture.removeprefix(before).partition(_PROBE)[0]
    ids = tokenizer(mark, add_special_tokens=False)["input_ids"]
    if not with_picture.startswith(before) or list(ids).count(token) != 1:
        raise InputError(
            "the chat template of the tokenizer writes a picture otherwise than Qwen2.5-VL and Qwen3-VL do: take the "
            "model's own template"
        )
    return mark
