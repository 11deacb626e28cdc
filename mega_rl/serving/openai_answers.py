"""What clients of an OpenAI-compatible endpoint are told: whole answers, and the chunks of streams."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from mega_rl.data.rows.messages import ASSISTANT, CALLS, Message
from mega_rl.environments.tools import Parsed, Parser
from mega_rl.serving.openai_requests import Asked
from mega_rl.types import Trajectory

Kind = Literal["chat", "completion", "tokens"]
NAMES: Mapping[Kind, tuple[str, str, str]] = {  # beginning of an id, kind of an answer, kind of a chunk
    "chat": ("chatcmpl-", "chat.completion", "chat.completion.chunk"),
    "completion": ("cmpl-", "text_completion", "text_completion"),
    "tokens": ("generate-tokens-", "generate", "generate"),
}
EMPTY: Mapping[Kind, Mapping[str, Any]] = {
    "chat": {"delta": {}},
    "completion": {"text": ""},
    "tokens": {"token_ids": []},
}
ID_LENGTH = 9  # letters of the id of a call: what the strictest templates take


@dataclass(frozen=True)
class ClientAnswer:
    """One response, as far as a client sees it."""

    number: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    finish_reason: str
    calls: Sequence[Mapping[str, Any]] = ()
    prompt_ids: Sequence[int] = ()

    @property
    def message(self) -> Message:
        content = self.text if self.text or not self.calls else None
        return {"role": ASSISTANT, "content": content} | ({CALLS: list(self.calls)} if self.calls else {})


def answer_of(
    number: int,
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase,
    parse: Parser | None,
) -> ClientAnswer:
    """
    Args:
        parse: finds the calls of tools; None: there are none.
    """
    ids, logprobs = trajectory.sampled_ids.tolist(), trajectory.logprobs[trajectory.loss_mask].tolist()
    text, calls, reason = trajectory.text, list[Mapping[str, Any]](), trajectory.finish_reason
    if parse is not None:
        # With special tokens, which mark the calls of some models, but without the one that ended the turn.
        written = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
        before, calls = calls_of(str(tokenizer.decode(written, skip_special_tokens=False)), parse)
        text, reason = (before, "tool_calls") if calls else (text, reason)
    return ClientAnswer(number, ids, logprobs, text, reason, calls, trajectory.prompt.token_ids)


def calls_of(text: str, parse: Parser | None) -> tuple[str, list[Mapping[str, Any]]]:
    """What stands before the calls of a turn, and the calls."""
    parsed = Parsed(text, ()) if parse is None else parse(text)
    calls: list[Mapping[str, Any]] = [
        {
            "id": uuid.uuid4().hex[:ID_LENGTH],
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in parsed.calls
    ]
    return parsed.content, calls


@dataclass
class AnswerForm:
    """The answers to one request."""

    kind: Kind
    model: str
    asked: Asked
    tokenizer: PreTrainedTokenizerBase
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, answers: Sequence[ClientAnswer], num_prompt_tokens: int) -> dict[str, Any]:
        """
        Args:
            answers: by number.
        """
        head = self._head(1) | {"choices": [self._choice(answer) for answer in answers]}
        if self.kind != "completion" and self.asked.with_token_ids and answers:
            head["prompt_token_ids"] = list(answers[0].prompt_ids)
        return head | {"usage": usage(num_prompt_tokens, sum(len(answer.token_ids) for answer in answers))}

    def _head(self, place: int) -> dict[str, Any]:
        beginning, name = NAMES[self.kind][0], NAMES[self.kind][place]
        if self.kind == "tokens":
            return {"request_id": beginning + self.id, "model": self.model, "created": 0}
        return {"id": beginning + self.id, "object": name, "created": 0, "model": self.model}

    def _choice(self, answer: ClientAnswer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": answer.number, "finish_reason": answer.finish_reason}
        choice["logprobs"] = self._logprobs(answer.token_ids, answer.logprobs)
        if self.kind == "tokens":
            return choice | {"token_ids": list(answer.token_ids)}
        choice |= {"message": dict(answer.message)} if self.kind == "chat" else {"text": answer.text}
        if self.asked.with_token_ids:
            choice["token_ids"] = list(answer.token_ids)
            if self.kind == "completion":
                choice["prompt_token_ids"] = list(answer.prompt_ids)
        return choice

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self.asked.with_logprobs:
            return None
        pairs = list(zip(ids, logprobs, strict=True))
        if self.kind == "tokens":
            return {"content": [{"token_id": i, "logprob": p, "rank": None, "top_logprobs": []} for i, p in pairs]}
        texts = [str(self.tokenizer.decode([i])) for i in ids]
        if self.kind == "chat":
            content = [
                {"token": text, "logprob": p, "bytes": list(text.encode()), "top_logprobs": []}
                for text, (_, p) in zip(texts, pairs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}

    # --- streams -----------------------------------------------------------------------------------------------------

    def first(self, number: int, prompt_ids: Sequence[int]) -> bytes | None:
        """What opens the stream of one choice, if anything does."""
        told = {"prompt_token_ids": list(prompt_ids)} if self.asked.with_token_ids else {}
        if self.kind == "chat":
            return self._chunk({"index": number, "delta": {"role": ASSISTANT, "content": ""}}, told)
        if not told:
            return None
        if self.kind == "completion":
            return self._chunk({"index": number, "text": ""} | told, {})
        return self._chunk({"index": number, "token_ids": []}, told)

    def piece(self, number: int, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        choice: dict[str, Any] = {"index": number, "logprobs": self._logprobs(ids, logprobs)}
        if self.kind == "chat":
            choice["delta"] = {"content": text}
        elif self.kind == "completion":
            choice["text"] = text
        if self.kind == "tokens" or self.asked.with_token_ids:
            choice["token_ids"] = list(ids)
        return self._chunk(choice, {})

    def calls(self, answer: ClientAnswer) -> bytes:
        """The calls of a turn of a chat, all at once."""
        calls = [{"index": place, **call} for place, call in enumerate(answer.calls)]
        return self._chunk({"index": answer.number, "delta": {CALLS: calls}}, {})

    def last(self, answer: ClientAnswer) -> bytes:
        choice: dict[str, Any] = {"index": answer.number, "logprobs": None}
        choice |= dict(EMPTY[self.kind])
        return self._chunk(choice, {}, answer.finish_reason)

    def end(self, num_prompt_tokens: int, num_sampled: int) -> bytes:
        """What closes the stream."""
        data = b"data: [DONE]\n\n"
        if not self.asked.with_usage:
            return data
        return event(self._head(2) | {"choices": [], "usage": usage(num_prompt_tokens, num_sampled)}) + data

    def _chunk(self, choice: Mapping[str, Any], top: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        return event({**self._head(2), "choices": [{**choice, "finish_reason": finish_reason}], **top})


def event(value: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode(errors="replace") + b"\n\n"


def usage(num_prompt_tokens: int, num_sampled: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
    }


def error(status: int, sentence: str, kind: str) -> dict[str, Any]:
    """An error in the form that OpenAI's clients read."""
    return {"error": {"message": sentence, "type": kind, "param": None, "code": status}}
