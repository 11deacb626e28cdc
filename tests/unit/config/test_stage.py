"""What follows from the stage of a run."""

from __future__ import annotations

import pytest

from mega_rl.algorithms.preference import PAIR_LOSSES, PreferenceObjective
from mega_rl.config import RunConfig, samples
from mega_rl.config.schema.stage import needs_reference, sequences_per_row


@pytest.mark.parametrize(
    ("stage", "expected"),
    [("rl", True), ("pt", False), ("sft", False), ("dpo", False), ("kto", False), ("lr", True)],
)
def test_which_stages_sample(stage: str, expected: bool) -> None:
    config = RunConfig()
    config.trainer.stage = stage
    assert samples(config) is expected


def test_what_follows_from_pairs() -> None:
    config = RunConfig()
    config.trainer.stage = "dpo"
    assert sequences_per_row(config) == 2
    for loss in PAIR_LOSSES:
        config.preference.loss = loss  # type: ignore[assignment]
        assert needs_reference(config) == PreferenceObjective(loss=loss).needs_reference
    config.trainer.stage = "kto"
    assert sequences_per_row(config) == 1 and needs_reference(config)
    config.trainer.stage = "sft"
    assert not needs_reference(config)
