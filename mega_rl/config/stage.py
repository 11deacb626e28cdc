"""What follows from a run's stage, for code that only reads the configuration."""

from __future__ import annotations

from mega_rl.config.schema import RunConfig


def samples(config: RunConfig) -> bool:
    """Whether the stage learns from responses that an engine samples, and so reads the sections about them.

    An unknown stage counts as one that does, so that a mistyped name hides no other problem.
    """
    return config.trainer.stage != "sft"
