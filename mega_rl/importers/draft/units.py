"""Conversions that the rules of several neighbours share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mega_rl.errors import InputError
from mega_rl.importers.draft.draft import Draft

# What stands in the name of a data file or data set -> the reward for it.
DATA_REWARDS = {"gsm8k": "gsm8k", "dapo": "dapo_math", "aime": "dapo_math", "math": "math_verify", "code": "code_tests"}


def set_warmup(draft: Draft, keys: Iterable[str], *, steps: float | None, ratio: float | None, per_step: int) -> None:
    """Warm-up in optimizer steps from steps or from a share of the run.

    Args:
        steps: of the optimizer, if that many are given.
        ratio: of the run.
        per_step: optimizer steps per step of ours.
    """
    total = draft.result.get("trainer.total_steps")
    if steps is not None and steps >= 0:
        draft.set("optimizer.warmup_steps", int(steps), keys)
    elif not ratio:
        draft.same(keys, "automatic")
    elif total is not None:
        draft.set("optimizer.warmup_steps", math.ceil(ratio * total * per_step), keys)
    else:
        text = f"a share of {ratio} of a run whose number of steps is not known: set optimizer.warmup_steps"
        for key in keys:
            draft.note(key, "none", text)
        draft.notes.append(f"optimizer.warmup_steps: {ratio} of the run's optimizer steps, which depend on the data")


def set_tokens(draft: Draft, tokens: int | None, keys: Iterable[str], longest: int | None) -> None:
    """The budget of a forward pass; at least one whole sequence."""
    if tokens is not None:
        draft.set("trainer.max_tokens_per_microbatch", max(tokens, longest or 0), keys)


def set_global_batch(draft: Draft, keys: Iterable[str], per_device: int, accumulation: int) -> int:
    """Samples of one optimizer step over all devices.

    Raises:
        InputError: the number of devices is not known.
    """
    if draft.num_devices is None:
        named = " x ".join(key for key in keys if key in draft.given.values) or "the batch size"
        raise InputError(f"{named} counts per device: give the number of devices with --devices")
    return per_device * accumulation * draft.num_devices


def exact(whole: float, part: float, what: str, draft: Draft) -> int:
    """``whole / part`` as a whole number >= 1, rounded up with a note where it is none."""
    number = max(1, math.ceil(whole / part))
    if number * part != whole:
        draft.notes.append(f"{what}: {whole:g} / {part:g} is rounded up to {number}")
    return number


def guess_reward(draft: Draft, names: Iterable[Any]) -> str | None:
    """The reward for data of that name, with a note that it was guessed."""
    text = " ".join(map(str, names)).lower()
    found = next((reward for part, reward in DATA_REWARDS.items() if part in text), None)
    if found is not None:
        draft.notes.append(f"rewards: {found} is chosen by the name of the data: check that it fits")
    return found


def as_list(value: Any) -> list[Any]:
    """A list of a list, of a text with commas, or of one value."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
