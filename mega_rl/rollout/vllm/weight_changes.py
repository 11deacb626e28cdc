"""Weights that change under an engine's requests: which tokens came of which weights, and what is cached of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mega_rl.rollout.engine import Request
from mega_rl.rollout.requests import resumed
from mega_rl.rollout.vllm.start.versions import forget_prefixes, num_sampled_tokens
from mega_rl.types import Span, Trajectory


class WeightChanges:
    """Keeps the spans of responses under way, and requests away from keys and values that they must not share.

    With ``keeps_cache`` running requests go on with the keys and values that older weights computed. vLLM shares cached
    prefixes only among requests of one salt, and every change begins a new one: whatever comes later finds nothing that
    is older than itself. A request without a token yet comes later, so it is added again.
    """

    def __init__(self, llm: Any, keeps_cache: bool) -> None:
        self._llm, self._keeps_cache = llm, keeps_cache
        self._num_changes = 0  # the salt: versions may come again with other weights, under another trainer
        self._spans: dict[int, list[Span]] = {}  # of responses that the weights of several syncs sample, by number
        self._given: dict[int, dict[str, Any]] = {}  # what the engine was given for requests that may wait

    @property
    def num_mixed(self) -> int:
        """Responses under way whose weights have changed."""
        return len(self._spans)

    def salted(self, number: int, given: dict[str, Any]) -> dict[str, Any]:
        """What the engine is to be given for a request; ``given``: what it was given before, or its rendered prompt."""
        if not self._keeps_cache:
            return given
        self._given[number] = {**given, "cache_salt": str(self._num_changes)}
        return self._given[number]

    def make(self, version: int, before: int, under_way: Mapping[int, Request]) -> dict[int, dict[str, Any]]:
        """Have requests under way go on with the weights of ``version``, which are there.

        Args:
            before: the version that they had until now.

        Returns:
            The requests that must be added again, and what the engine is to be given for them.

        Raises:
            RuntimeError: cached prefixes could not be forgotten.
        """
        if not self._keeps_cache and not forget_prefixes(self._llm):
            raise RuntimeError(f"The engine kept prefixes computed before weight version {version}.")
        self._num_changes += 1
        sampled = num_sampled_tokens(self._llm) if under_way else {}
        for number, request in under_way.items():
            first = len(resumed(request).prompt.token_ids)
            spans = self._spans.setdefault(number, [Span(first, before)])
            if spans[-1].start == first + sampled[str(number)]:
                del spans[-1]
            spans.append(Span(first + sampled[str(number)], version))
        if not self._keeps_cache:
            return {}
        waiting = {number: given for number, given in self._given.items() if not sampled[str(number)]}
        self._given.clear()
        if waiting:
            self._llm.llm_engine.abort_request([str(number) for number in waiting])
        return {number: self.salted(number, given) for number, given in waiting.items()}

    def told(self, number: int, trajectory: Trajectory) -> Trajectory:
        """The trajectory of a response that has ended, with its spans."""
        spans = self.spans_so_far(number, len(trajectory.token_ids))
        self.forget([number])
        return trajectory if spans is None else dataclasses.replace(trajectory, spans=spans)

    def spans_so_far(self, number: int, num_tokens: int) -> tuple[Span, ...] | None:
        """Of a response's first tokens, those of its prompt counted too; None: its weights have not changed."""
        spans = self._spans.get(number)
        # A step that was under way as weights changed counted as a token, and may have been beyond the last one.
        return None if spans is None else tuple(span for span in spans if span.start < num_tokens)

    def forget(self, numbers: Iterable[int] | None = None) -> None:
        """These requests were dropped; None: all."""
        for number in [*self._spans, *self._given] if numbers is None else numbers:
            self._spans.pop(number, None)
            self._given.pop(number, None)
