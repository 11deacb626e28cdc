"""What follows from the stage of a run."""

from __future__ import annotations

import pytest

from mega_rl.config import RunConfig, samples


@pytest.mark.parametrize(("stage", "expected"), [("rl", True), ("sft", False), ("lr", True)])
def test_which_stages_sample(stage: str, expected: bool) -> None:
    config = RunConfig()
    config.trainer.stage = stage
    assert samples(config) is expected
