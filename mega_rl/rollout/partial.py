"""Responses under way as they are told of, so that another engine can go on with one when its own is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mega_rl.rollout.requests import TAKEN_OUT, joined
from mega_rl.types import Prompt, Span, Trajectory


class ResponsePiece(NamedTuple):
    """What an engine has sampled of a response since it last told of it: 8 bytes a token, and a few more."""

    first: int  # tokens that it has told of before
    token_ids: bytes  # int32
    logprobs: bytes  # nats, float32
    spans: tuple[tuple[int, int], ...]  # start and version: of all tokens that it has sampled of the response

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


def piece_of(first: int, token_ids: Sequence[int], logprobs: Sequence[float], spans: tuple[Span, ...]) -> ResponsePiece:
    """The tokens from ``first`` on, of all that an engine has sampled of a response."""
    ids, values = np.array(token_ids[first:], np.int32), np.array(logprobs[first:], np.float32)
    return ResponsePiece(first, ids.tobytes(), values.tobytes(), tuple((span.start, span.version) for span in spans))


@dataclass(frozen=True)
class PartialResponse:
    """All that is known of a response that has not ended. What is added costs no copy of what was there."""

    prompt: Prompt
    sample_index: int
    tail: Trajectory | None = None  # what engines before this one sampled of it
    pieces: tuple[ResponsePiece, ...] = ()  # in their order

    @classmethod
    def of(cls, tail: Trajectory) -> PartialResponse:
        return cls(tail.prompt, tail.sample_index, tail)

    @property
    def num_sampled(self) -> int:
        before = 0 if self.tail is None else self.tail.num_sampled
        return before + sum(piece.num_tokens for piece in self.pieces)

    @property
    def newest_version(self) -> int:
        """Of the weights that sampled its last tokens; -1 if it has none."""
        if self.pieces:
            return self.pieces[-1].spans[-1][1]
        return -1 if self.tail is None else self.tail.newest_version

    def grown(self, piece: ResponsePiece) -> PartialResponse:
        """With what its engine says next."""
        told = self.pieces[-1].first + self.pieces[-1].num_tokens if self.pieces else 0
        assert piece.first == told, f"tokens from {piece.first} on, where {told} are known"
        return PartialResponse(self.prompt, self.sample_index, self.tail, (*self.pieces, piece))

    def trajectory(self) -> Trajectory | None:
        """The tail that a ``Request`` goes on from; None: it has no token. It has no text."""
        if not self.pieces:
            return self.tail
        prompt = self.prompt
        if self.tail is not None:
            prompt = replace(prompt, token_ids=tuple(self.tail.token_ids.tolist()))
        ids = np.frombuffer(b"".join(piece.token_ids for piece in self.pieces), np.int32)
        logprobs = np.frombuffer(b"".join(piece.logprobs for piece in self.pieces), np.float32)
        found = Trajectory.single_turn(
            prompt,
            self.sample_index,
            ids.tolist(),
            logprobs.tolist(),
            text="",
            finish_reason=TAKEN_OUT,
            version=self.newest_version,
        )
        spans = tuple(Span(start, version) for start, version in self.pieces[-1].spans)
        return joined(self.tail, replace(found, spans=spans), lambda token_ids: "")
