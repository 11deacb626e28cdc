"""What pretended engines sample: a token is a hash of its response's seed, its place and the weights that sample it.

So runs have the same tokens only if every token was sampled with the same weights for the same response.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mega_rl.rollout.engine import Request
from mega_rl.rollout.temperature_probe import PROBE_TEMPERATURE, Probed, measured_temperature
from mega_rl.types import ASSISTANT, PROMPT, Span, Trajectory, TurnSpan

FIRST_ID = 4  # of ten tokens of any model


def number(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def length(request: Request) -> int:
    return 2 + number(request.seed, "length") % (request.max_tokens - 1)


def first_logprobs(weights: object, prompt_ids: Sequence[int], temperature: float) -> dict[int, float]:
    """What an engine with these weights finds of the ten tokens after a prompt when it samples at this temperature."""
    scores = [number(weights, tuple(prompt_ids), token) % 97 / 20 / temperature for token in range(10)]
    total = math.log(sum(map(math.exp, scores)))
    return {FIRST_ID + token: score - total for token, score in enumerate(scores)}


def measured_temperatures(engines: Probed, prompt_ids: Sequence[int]) -> list[float | None]:
    """What the log-probabilities of each of some engines show that are asked to sample at ``PROBE_TEMPERATURE``."""
    plain, heated = (engines.first_logprobs(prompt_ids, temperature) for temperature in (1.0, PROBE_TEMPERATURE))
    return [measured_temperature(*pair) for pair in zip(plain, heated, strict=True)]


@dataclass
class Response:
    """A response under way."""

    request: Request
    step: int  # that learns from it
    tokens: list[tuple[int, float, int]] = field(default_factory=list)  # id, log-probability, version

    def may_advance(self, version: int, is_pinned: bool) -> bool:  # is_pinned: or nothing newer will come
        """Unpinned ones wait for the last weights that they may have before their last token, so all are mixed."""
        return is_pinned or version >= self.step or len(self.tokens) < length(self.request) - 1

    @property
    def has_ended(self) -> bool:
        return len(self.tokens) == length(self.request)

    def advance(self, version: int, weights: object) -> None:
        found = number(self.request.seed, len(self.tokens), weights)
        self.tokens.append((FIRST_ID + found % 10, -2.0 - found % 97 / 97, version))

    def trajectory(self, finish_reason: str = "stop") -> Trajectory:
        """All tokens so far; of an ended response with its text, ten digits by the tokens."""
        ids, logprobs, versions = zip(*self.tokens, strict=True)
        text = "".join(str(token - FIRST_ID) for token in ids) if self.has_ended else ""
        prompt = self.request.prompt
        whole = Trajectory.single_turn(prompt, self.request.sample_index, ids, logprobs, text, finish_reason, 0)
        start = len(prompt.token_ids)
        changes = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
        return replace(whole, spans=tuple(Span(start + i, versions[i]) for i in changes))

    @classmethod
    def of(cls, request: Request, step: int, prefix: Trajectory | None) -> Response:
        if prefix is None:
            return cls(request, step)
        start = len(request.prompt.token_ids)
        assert prefix.turns == (TurnSpan(PROMPT, 0, start), TurnSpan(ASSISTANT, start, len(prefix.token_ids)))
        versions = np.repeat(*np.array(prefix.summary().versions).T).tolist()
        pairs = zip(prefix.sampled_ids.tolist(), prefix.sampled_logprobs.tolist(), versions, strict=True)
        return cls(request, step, list(pairs))

    def to_its_end(self, version: int, weights: object) -> Trajectory:
        while not self.has_ended:
            self.advance(version, weights)
        return self.trajectory()
