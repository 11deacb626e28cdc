"""What one life of an engine has told of the responses that it has under way, for another one to go on with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mega_rl.fleet.events import Advanced, Issue
from mega_rl.rollout.engine import Request
from mega_rl.rollout.partial import PartialResponse, ResponsePiece

TELL_S = 10.0  # between two questions: so long an engine samples for nothing at most if it dies
LEAST_TOKENS = 64  # new ones of a response, that are worth a word


@dataclass
class PartialResponses:
    """Of responses that are not pinned; of a validation there is nothing."""

    known: dict[tuple[int, int], PartialResponse] = field(default_factory=dict)  # by attempt and sample
    asked_s: float | None = None  # when the engine was last asked, or given work after it had none
    is_asked: bool = False  # and has not answered

    def begin(self, decision: Issue, requests: Sequence[Request], now: float) -> list[Request]:
        """The requests of samples, each with the tail that earlier engines have left of it."""
        if not self.known:
            self.asked_s = now
        found = []
        for sample, request, prefix in zip(decision.samples, requests, decision.prefixes, strict=True):
            tail = None if prefix is None else prefix.trajectory()
            self.known[decision.attempt, sample] = PartialResponse(request.prompt, request.sample_index, tail)
            found.append(replace(request, tail=tail))
        return found

    def is_due(self, now: float) -> bool:
        """Whether the engine should be asked now."""
        return bool(self.known) and not self.is_asked and self.asked_s is not None and now >= self.asked_s + TELL_S

    def ask(self, now: float) -> None:
        self.asked_s, self.is_asked = now, True

    def grow(self, engine: int, life: int, pieces: Iterable[tuple[int, int, ResponsePiece]]) -> list[Advanced]:
        """What follows from the engine's answer."""
        self.is_asked = False
        said = []
        for attempt, sample, piece in pieces:
            if (partial := self.known.get((attempt, sample))) is not None:
                self.known[attempt, sample] = partial.grown(piece)
                said.append(Advanced(engine, life, attempt, sample, self.known[attempt, sample]))
        return said

    def end(self, attempt: int, sample: int) -> None:
        """The response is whole."""
        self.known.pop((attempt, sample), None)
