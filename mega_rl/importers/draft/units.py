"""Conversions that the rules of several neighbours share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from mega_rl.errors import InputError
from mega_rl.importers.draft.draft import Draft

# In names of models that see pictures; all of Qwen 3.5 and later do.
SEES = re.compile(r"(?<![a-z])(?:vl|vlm|vision|omni|internvl\d*|llava|qwen3\.[5-9])(?![a-z])", re.IGNORECASE)
_SHARDS = re.compile(r"z(?:ero)?(?:_stage=|[-_]?)3|fsdp", re.IGNORECASE)
A_DAY = 86_400.0


def set_warmup(draft: Draft, keys: Iterable[str], *, steps: float | None, ratio: float | None) -> None:
    """Warm-up in optimizer steps, or as a share of the run.

    Args:
        steps: of the optimizer, if that many are given.
        ratio: of the run.
    """
    if steps:
        draft.set("optimizer.warmup_steps", int(steps), keys)
    elif ratio is not None and ratio >= 1:
        draft.lack(keys, "other_word", f"{ratio}, a share of 1 or more")
    else:
        draft.set("optimizer.warmup_steps", ratio or 0, keys)


def set_tokens(draft: Draft, tokens: int | None, keys: Iterable[str], longest: int | None) -> None:
    """The budget of a forward pass; at least one whole sequence."""
    if tokens is not None:
        draft.set("trainer.max_tokens_per_microbatch", max(tokens, longest or 0), keys)


def set_global_batch(draft: Draft, keys: Iterable[str], per_device: int, accumulation: int) -> int:
    """Samples of one optimizer step over all data-parallel ranks.

    Raises:
        InputError: the number of devices is not known.
    """
    if draft.num_devices is None:
        named = " x ".join(key for key in keys if key in draft.given.values) or "the batch size"
        raise InputError(f"{named} counts per device: give the number of devices with --devices")
    sizes = (draft.result.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "context"))
    return per_device * accumulation * max(1, draft.num_devices // math.prod(sizes))


def set_timeout(draft: Draft, key: str) -> None:
    """A limit of more than a day is a way of saying that there is none, which would leave hung ranks unnoticed."""
    seconds = draft.number(key) if draft.has(key) else None
    if seconds is not None and 0 < seconds <= A_DAY:
        draft.set("trainer.collective_timeout_s", float(seconds), [key])
    else:
        draft.note(key, "same", "no limit there; ours stays, as it finds ranks that hang")


def note_sharding(draft: Draft, keys: Iterable[str]) -> None:
    """What divides weights over all ranks there, as words of the values of these keys say."""
    named = [key for key in keys if draft.has(key) and _SHARDS.search(f"{key}={draft.get(key)}")]
    sizes = [draft.result.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline")]
    if named and math.prod(sizes) == 1:
        draft.divided_by = named[0]
        draft.notes.append(
            f"parallel.tensor, parallel.pipeline: {named[0]} divides weights over all ranks there, here these two do, "
            f"and they are 1: import it with --device-memory 64GiB, or see what fits with tools/plan.py --config FILE "
            f"--devices {draft.num_devices or 'N'} --device-memory 64GiB"
        )


def exact(whole: float, part: float, what: str, draft: Draft) -> int:
    """``whole / part`` as a whole number >= 1, rounded up with a note where it is none."""
    number = max(1, math.ceil(whole / part))
    if number * part != whole:
        draft.notes.append(f"{what}: {whole:g} / {part:g} is rounded up to {number}")
    return number


def set_vision(draft: Draft, key: str) -> None:
    """Whether the tower is trained: theirs is unless ``key`` says that it is frozen, ours only if it is told so."""
    is_frozen = bool(draft.get(key))
    if not draft.has(key) and not SEES.search(str(draft.result.get("model.path", ""))):
        return
    draft.set("model.vision.freeze", is_frozen, [key])
    draft.set("model.vision.freeze_merger", is_frozen, [key])
    if not draft.has(key):
        draft.notes.append("model.vision.freeze: theirs trains the tower by default, so it is set here")


def as_list(value: Any) -> list[Any]:
    """A list of a list, of a text with commas, or of one value."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
