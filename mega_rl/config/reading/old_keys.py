"""Keys of earlier versions, each answered with what to do about it; no old key is ever read."""

from __future__ import annotations

RENAMED = {
    "rollout.validation.n": "validation.n",
    "rollout.validation.temperature": "validation.temperature",
    "trainer.async_save": "checkpoint.async_save",
    "trainer.export_hf": "checkpoint.export_hf",
    "trainer.keep_checkpoints": "checkpoint.keep_checkpoints",
    "trainer.resume": "checkpoint.resume",
    "trainer.save_freq": "checkpoint.save_freq",
    "trainer.test_freq": "validation.test_freq",
    "trainer.val_before_train": "validation.val_before_train",
}
_WHOLE = "since the trainer's log-probabilities are those of the whole vocabulary: remove it"
REMOVED = {
    "rollout.top_p": f"there is no key rollout.top_p, {_WHOLE}",
    "rollout.top_k": f"there is no key rollout.top_k, {_WHOLE}",
    "rollout.min_p": f"there is no key rollout.min_p, {_WHOLE}",
}


def old_key_answer(name: str) -> str | None:
    """The sentence on an old key (dotted); None for any other name."""
    return f"{name} is now {RENAMED[name]}: rename it" if name in RENAMED else REMOVED.get(name)


def is_old_section(name: str) -> bool:
    return any(old.startswith(f"{name}.") for old in RENAMED)
