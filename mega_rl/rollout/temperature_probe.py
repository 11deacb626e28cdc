"""Whether an engine's log-probabilities are those of the distribution that it samples from, by asking the engine alone.

A sampler divides the logits l by the temperature T. After that, the log-probabilities of two tokens differ by
(l_a - l_b) / T; before it ("raw" ones) by l_a - l_b. So the same tokens are asked for at T and at 1, and the
differences at T must be those at 1 divided by T. No trainer takes part: what the weights are (noisy, quantised,
resumed) is the same on both sides and cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol

PROBE_TEMPERATURE = 2.0
NUM_LOGPROBS = 20  # of the most probable tokens; vLLM gives no more unless it is told to
TOLERANCE = 0.1  # of the measured temperature, relative: raw log-probabilities are off by a factor of 2
FLAT = 1e-3  # nats: log-probabilities that differ by less than this say nothing


class Probed(Protocol):
    """What a probe asks of an engine, or of several that are asked as one."""

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        """For every engine: the log-probabilities of the first token after a prompt, nats, by token.

        Of the ``NUM_LOGPROBS`` most probable tokens, or as many as there are, and of the one that was sampled. It
        leaves no trace: later responses are what they would have been without it.

        Args:
            with_adapter: with the adapter in the engine's slots, as everything else is sampled; False, where the engine
                has slots: as if it had none.
        """


def probe_prompt(vocab_size: int) -> tuple[int, ...]:
    """A prompt for ``measured_temperature``: a few tokens that are ordinary ones in usual vocabularies."""
    return tuple(token % vocab_size for token in range(64, 68))


def measured_temperature(plain: Mapping[int, float], heated: Mapping[int, float]) -> float | None:
    """The temperature between log-probabilities at 1 and others of the same logits: the slope of a straight line.

    Args:
        plain, heated: by token, nats; the tokens in both count.

    Returns:
        About the temperature that was asked for if they are what is sampled from, 1.0 if they are raw. None if the
        plain ones are all alike; NaN if they are not finite or the other ones are all alike.
    """
    tokens = [token for token in plain if token in heated]
    pairs = [(plain[token], heated[token]) for token in tokens]
    if not tokens or not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.nan
    centre_x, centre_y = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
    spread = fmean((x - centre_x) ** 2 for x, _ in pairs)
    if spread < FLAT**2:
        return None
    slope = fmean((x - centre_x) * (y - centre_y) for x, y in pairs) / spread
    return 1 / slope if slope else math.nan


def is_sampled_from(measured: float | None, temperature: float = PROBE_TEMPERATURE) -> bool:
    """Whether a measured temperature is the one asked for; true if there is no telling."""
    return measured is None or abs(measured / temperature - 1) <= TOLERANCE
