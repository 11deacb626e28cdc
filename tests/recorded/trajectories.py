"""Hand-made trajectories of more than one turn, which no engine makes yet."""

from __future__ import annotations

import numpy as np

from mega_rl.types import ASSISTANT, PROMPT, Prompt, Span, Trajectory, TurnSpan

PROMPT_IDS = (3, 14, 4)


def two_turns(spans: tuple[Span, ...] = (Span(3, 1),)) -> Trajectory:
    """Three tokens of a prompt, two sampled ones, two of a tool's reply, and three sampled ones."""
    return Trajectory(
        prompt=Prompt(7, PROMPT_IDS, "3+4=", "7", "arithmetic"),
        sample_index=1,
        token_ids=np.array([*PROMPT_IDS, 50, 51, 90, 91, 52, 53, 2], np.int32),
        loss_mask=np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1], np.bool_),
        logprobs=np.array([0, 0, 0, -0.1, -0.2, 0, 0, -0.3, -0.4, -0.5], np.float32),
        spans=spans,
        turns=(TurnSpan(PROMPT, 0, 3), TurnSpan(ASSISTANT, 3, 5), TurnSpan("tool", 5, 7), TurnSpan(ASSISTANT, 7, 10)),
        text="call 7",
        finish_reason="stop",
    )
