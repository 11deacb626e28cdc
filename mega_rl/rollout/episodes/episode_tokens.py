"""One episode in tokens: what the model has sampled, what it reads next, and the trajectory that they become.

What the model sampled is never decoded and encoded again: the prompt of a turn is that of the turn before, the sampled
tokens, and the chat template's own tokens of the reply.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from mega_rl.data.tokens.replies import ReplyTokens
from mega_rl.data.tokens.template import Tools
from mega_rl.data.tokens.tokenizer import encode
from mega_rl.environments.episode import (
    MAX_DETAIL_LENGTH,
    Episode,
    EpisodeLimits,
    NoRoomError,
    Slots,
    close_untaken,
    run_episode,
)
from mega_rl.environments.protocol import Environment, Message, Turn as Said
from mega_rl.environments.waiting import RaisedError, made
from mega_rl.errors import InputError
from mega_rl.rollout.engine import Request
from mega_rl.types import ASSISTANT, PROMPT, Outcome, Prompt, Span, Trajectory, TurnSpan, UnknownReward

Scored = Literal["last_turn", "all_turns"]


@dataclass(frozen=True)
class EpisodePlan:
    """How the episodes of a run go on; the same for all of them."""

    make: Callable[[Prompt, int], Environment]  # for a prompt and the number of its sample
    replies: ReplyTokens
    tokenizer: PreTrainedTokenizerBase
    limits: EpisodeLimits
    max_turn_tokens: int | None = None  # of one turn; None: what the episode has left
    scored: Scored = "last_turn"  # the text of the trajectory
    workers: int = 64  # calls of environments at once
    tools: Tools = ()  # that prompts offer, as JSON schemas


@dataclass(frozen=True)
class Next:
    """The next turn of an episode."""

    token_ids: npt.NDArray[np.int32]  # all so far, the prompt's first
    max_tokens: int


def _failed(cause: str, detail: str) -> Episode:
    return Episode((), "failed", None, {}, cause, detail[:MAX_DETAIL_LENGTH])


class Conversation:
    """What has been said in one episode.

    Args:
        plan: of the run.
        request: of the episode.
        sample: samples a turn.
    """

    def __init__(self, plan: EpisodePlan, request: Request, sample: Callable[[Next], Awaitable[Trajectory]]) -> None:
        self._plan, self._request, self._sample = plan, request, sample
        self._prompt = request.prompt
        self._max_length = len(request.prompt.token_ids) + request.max_tokens  # in tokens, with the prompt
        self._sampled: list[Trajectory] = []  # of each turn
        self._replies: list[tuple[str, list[int]]] = []  # role and tokens of what stands before the second turn, ...

    async def run(self, slots: Slots) -> Episode:
        """The episode from the making of its environment to its end; never raises for the environment's faults."""
        limits, request = self._plan.limits, self._request

        def drop(environment: Environment) -> None:
            close_untaken(environment, limits.close_timeout_s)

        try:
            async with slots or nullcontext():
                environment = await made(
                    self._plan.make, limits.step_timeout_s, drop, request.prompt, request.sample_index
                )
        except TimeoutError:
            return _failed("timed_out", f"the environment was not made within {limits.step_timeout_s:g} s")
        except RaisedError as error:
            return _failed("raised", f"the environment raised {error} when it was made")
        try:
            return await run_episode(environment, self._turn, limits, self._count, slots)
        except InputError as error:  # the chat template refuses a reply
            return _failed("not_a_reply", str(error))

    def _count(self, text: str) -> int:
        return len(encode(self._plan.tokenizer, text))

    async def _turn(self, messages: Sequence[Message]) -> Said:
        """What the model says next. Raises NoRoomError, or InputError for messages that the template refuses."""
        token_ids, between = self._token_ids(), list[int]()
        if self._sampled:
            between = self._plan.replies(self._sampled[-1].sampled_ids.tolist(), [dict(m) for m in messages])
        elif messages:
            text = self._plan.replies.opening(self._prompt.text, [dict(m) for m in messages])
            opened = encode(self._plan.tokenizer, text)
            self._prompt = replace(self._prompt, text=text, token_ids=tuple(opened))
            token_ids = np.array(opened, np.int32)
        room = self._max_length - len(token_ids) - len(between)
        if room < 1:
            raise NoRoomError
        if self._sampled:
            self._replies.append((messages[0]["role"] if messages else "user", between))
            token_ids = np.append(token_ids, np.array(between, np.int32))
        turn = await self._sample(Next(token_ids, min(room, self._plan.max_turn_tokens or room)))
        self._sampled.append(turn)
        ids = turn.sampled_ids.tolist()
        return Said(self._text(ids, without_end=True), len(self._sampled) - 1, turn.finish_reason, tuple(ids))

    def _token_ids(self) -> npt.NDArray[np.int32]:
        return self._sampled[-1].token_ids if self._sampled else np.array(self._prompt.token_ids, np.int32)

    def _text(self, ids: Sequence[int], without_end: bool = False) -> str:
        """With special tokens: some models mark their calls with them; ``without_end``: but for that of the end."""
        if without_end and ids and ids[-1] in self._plan.replies.ends:
            ids = ids[:-1]
        text = self._plan.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def trajectory(self, episode: Episode, version: int) -> Trajectory:
        """All of it as one trajectory.

        Args:
            version: of the weights, for an episode that ended before its first turn.
        """
        token_ids = self._token_ids()
        loss_mask, logprobs = np.zeros(len(token_ids), np.bool_), np.zeros(len(token_ids), np.float32)
        turns, spans = [TurnSpan(PROMPT, 0, len(self._prompt.token_ids))], list[Span]()
        for number, turn in enumerate(self._sampled):
            if number:
                role, ids = self._replies[number - 1]
                turns.append(TurnSpan(role, turns[-1].stop, turns[-1].stop + len(ids), self._text(ids)))
            own = slice(turns[-1].stop, len(turn.token_ids))
            loss_mask[own], logprobs[own] = turn.loss_mask[own], turn.logprobs[own]
            spans += [span for span in turn.spans if not spans or span.version > spans[-1].version]
            turns.append(TurnSpan(ASSISTANT, own.start, own.stop, self._text(turn.token_ids[own].tolist())))
        texts = [turn.text for turn in self._sampled]
        unknown = None if episode.cause is None else UnknownReward(episode.cause, episode.detail)
        if not self._sampled and unknown is None:
            unknown = UnknownReward("no_room", "the messages of start() leave no room for a turn")
        last = self._sampled[-1].finish_reason if self._sampled else "stop"
        engines = {turn.engine for turn in self._sampled}
        return Trajectory(
            self._prompt,
            self._request.sample_index,
            token_ids.astype(np.int32),
            loss_mask,
            logprobs,
            tuple(spans) or (Span(len(token_ids), version),),
            tuple(turns),
            "\n".join(texts) if self._plan.scored == "all_turns" else "".join(texts[-1:]),
            "length" if episode.stop == "tokens" else last,
            self._routed_experts(),
            Outcome(
                episode.stop, len(self._sampled), episode.reward, unknown, dict(episode.metrics), episode.turn_rewards
            ),
            engines.pop() if len(engines) == 1 else None,
        )

    def _routed_experts(self) -> npt.NDArray[np.unsignedinteger[Any]] | None:
        """[L-1, M, K]: of a token that was an input of several turns, the experts of the first of them."""
        parts: list[npt.NDArray[np.unsignedinteger[Any]]] = []
        num_rows = 0
        for turn in self._sampled:
            if turn.routed_experts is None:
                return None
            parts.append(turn.routed_experts[num_rows:])
            num_rows = len(turn.routed_experts)
        return np.concatenate(parts) if parts else None
