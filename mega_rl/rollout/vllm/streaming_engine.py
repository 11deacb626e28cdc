"""The engine of `mega_rl.rollout.vllm.engine`, whose responses can be watched as they grow, and given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mega_rl.observe.heartbeat import HEART
from mega_rl.rollout.engine import Piece, Request
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.types import Trajectory


@dataclass
class _Growing:
    """A response so far, as vLLM gave it out."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: Any = None  # vLLM's FlatLogprobs, if asked for
    text: str = ""

    def add(self, answer: Any) -> None:
        self.token_ids += answer.token_ids
        if self.logprobs is None:
            self.logprobs = answer.logprobs
        else:
            self.logprobs.extend(answer.logprobs)
        self.text += answer.text


class StreamingEngine(VLLMEngine):
    """A ``StreamingSampler``: every step of vLLM gives out what it added."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._growing: dict[int, _Growing] = {}  # by number of submission
        self._pieces: list[Piece] = []

    def pieces(self) -> Sequence[Piece]:
        return self._pieces

    def abort(self, requests: Sequence[Request]) -> None:
        keys = {(request.prompt.index, request.sample_index) for request in requests}
        found = [n for n, one in self._under_way.items() if (one.prompt.index, one.sample_index) in keys]
        self._llm.llm_engine.abort_request([str(number) for number in found])
        self._changes.forget(found)
        for number in found:
            del self._under_way[number]
            self._growing.pop(number, None)
        self._rest_if_idle()

    def numbered_step(self) -> list[tuple[int, Trajectory]]:
        self._pieces = []
        if not self._under_way:
            return []
        with self._generators.in_use():
            outputs = self._llm.llm_engine.step()
        HEART.mark()
        ended = {}
        for output in outputs:
            number, (answer,) = int(output.request_id), output.outputs
            if number not in self._under_way:  # given up in the meantime
                continue
            self._growing.setdefault(number, _Growing()).add(answer)
            self._pieces.append(_piece(self._under_way[number], answer))
            if output.finished:
                growing = self._growing.pop(number)
                answer.token_ids, answer.logprobs, answer.text = growing.token_ids, growing.logprobs, growing.text
                ended[number] = output
        return self._given_out(ended)

    def _is_text_followed(self, request: Request) -> bool:
        return True

    def _sampling_params(self, request: Request) -> Any:
        from vllm.sampling_params import RequestOutputKind

        params = super()._sampling_params(request)
        params.output_kind = RequestOutputKind.DELTA
        return params


def _piece(request: Request, answer: Any) -> Piece:
    ids = tuple(answer.token_ids)
    logprobs = tuple(answer.logprobs.logprobs) if request.with_logprobs else (0.0,) * len(ids)
    return Piece(request.prompt.index, request.sample_index, ids, logprobs, answer.text)
