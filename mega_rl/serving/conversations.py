"""Conversations of an agent, recorded in token space: what the model read and wrote, never encoded a second time.

An agent sends its whole conversation with every request. As far as that is a conversation which was recorded here, the
prompt of the next turn is made of the recorded tokens, the sampled ones as they were sampled, and of the tokens that
the chat template writes for the messages that are new. Otherwise it is rendered as a whole, and begins a new row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from mega_rl.data.rows.messages import ASSISTANT, CALLS, Message, as_messages
from mega_rl.data.tokens.replies import History, ReplyTokens
from mega_rl.data.tokens.template import Tools, apply_template, check_written
from mega_rl.data.tokens.tokenizer import encode
from mega_rl.errors import InputError
from mega_rl.types import ASSISTANT as MODEL, PROMPT, Prompt, Span, Trajectory, TurnSpan

MAX_TOOL_LISTS = 64  # for which the tokens of replies are kept ready
MAX_ROWS = 256  # of one session, all of which are kept until its reward comes
Key = tuple[str, ...]  # what makes a message the same one, however a program writes it


def key_of(message: Message) -> Key:
    """Role, text and calls of a message, without what programs leave out or change: ids, names, outer white space."""
    calls = [call["function"] for call in message.get(CALLS, ())]
    texts = [json.dumps([call["name"], call["arguments"]], sort_keys=True, ensure_ascii=False) for call in calls]
    return message["role"], message["content"].strip(), message.get("reasoning_content", "").strip(), *texts


class ConversationRenderer:
    """Messages as token ids: whole conversations, and what follows a sampled turn. May be used in a thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = (), history: History = "refuse"):
        """
        Args:
            ends: token ids that end a sampled turn, besides the end-of-sequence token.
            history: as of ``ReplyTokens``.

        Raises:
            InputError: conversations cannot go on in tokens with this chat template.
        """
        self.tokenizer = tokenizer
        self._ends, self._history = ends, history
        self._replies: dict[str, ReplyTokens] = {}  # by the tools that a conversation offers

    def check(self) -> None:
        """Raises InputError: conversations cannot go on in tokens with this chat template."""
        if not self.tokenizer.chat_template:
            raise InputError("the tokenizer has no chat template, with which messages could become tokens")
        ReplyTokens(self.tokenizer, (), ("user",), self._ends, self._history)

    def whole(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """A conversation and the beginning of the next turn. Raises InputError."""
        if not self.tokenizer.chat_template:
            raise InputError("the tokenizer has no chat template: use /v1/completions")
        check_written(self.tokenizer, messages, tools)
        return encode(self.tokenizer, apply_template(self.tokenizer, messages, True, tools))

    def reply(self, sampled_ids: Sequence[int], messages: Sequence[Message], tools: Tools) -> list[int]:
        """What stands between a turn and the next. Raises InputError."""
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._replies:
            if len(self._replies) >= MAX_TOOL_LISTS:
                self._replies.pop(next(iter(self._replies)))
            self._replies[key] = ReplyTokens(self.tokenizer, tools, (), self._ends, self._history)
        return self._replies[key](sampled_ids, messages)


@dataclass
class ConversationRow:
    """One trajectory that may grow: a prompt, turns, and replies between them."""

    num_prompt: int  # of the tokens
    tools: str  # JSON: another list of tools is another conversation
    token_ids: list[int]
    keys: list[Key]  # of the messages that the tokens say; of a row without messages, none
    logprobs: list[float] = field(default_factory=list)  # one per sampled token
    turns: list[TurnSpan] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)  # messages after each sampled turn; -1: not as messages
    finish_reason: str = "stop"
    is_taken: bool = False  # its next turn is under way

    def trajectory(self, prompt: Prompt, sample_index: int) -> Trajectory:
        """
        Args:
            prompt: whose tokens are replaced by the row's own.
        """
        prompt = replace(prompt, token_ids=tuple(self.token_ids[: self.num_prompt]))
        mask, logprobs = np.zeros(len(self.token_ids), np.bool_), np.zeros(len(self.token_ids), np.float32)
        for turn in self.turns:
            mask[turn.start : turn.stop] = turn.role == MODEL
        logprobs[mask] = self.logprobs
        return Trajectory(
            prompt,
            sample_index,
            np.array(self.token_ids, np.int32),
            mask,
            logprobs,
            tuple(self.spans),
            tuple(self.turns),
            "".join(self.texts),
            self.finish_reason,
        )


@dataclass
class Opening:
    """Where the next turn of a conversation is to begin; its prompt is ``context`` and then ``between``."""

    context: list[int]  # recorded tokens
    sampled: list[int]  # the last turn of the context; empty: there is none
    new: Sequence[Message]
    keys: list[Key]  # of all messages of the request
    tools: Tools
    row: ConversationRow | None  # that is to go on; None: a new one begins
    between: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.context + self.between

    def render(self, renderer: ConversationRenderer) -> None:
        """Make the tokens of what is new; may take long. Raises InputError."""
        if self.new and self.context:
            self.between = renderer.reply(self.sampled, self.new, self.tools)
        elif self.new:
            self.between = renderer.whole(self.new, self.tools)

    def take(self) -> None:
        """Let the row go on for this request alone; one that is under way, or has gone on elsewhere, is left alone."""
        if self.row is not None and (self.row.is_taken or len(self.row.token_ids) > len(self.context)):
            self.row = None
        if self.row is not None:
            self.row.is_taken = True

    def leave(self) -> None:
        """Nothing was sampled after ``take``."""
        if self.row is not None:
            self.row.is_taken = False


class Conversations:
    """The rows of one session, in the order in which they began."""

    def __init__(self) -> None:
        self.rows: list[ConversationRow] = []

    def open(self, messages: Sequence[Message], tools: Tools) -> Opening:
        """The longest recorded beginning of the messages, which ends with a turn of the model, and what follows it.

        A row whose last turn that is goes on; from an earlier turn another row begins with the same tokens.
        """
        self._check_room()
        keys, name = [key_of(message) for message in messages], _name(tools)
        best: tuple[int, ConversationRow, int] | None = None
        for row in self.rows:
            for place, length in enumerate(row.marks if row.tools == name else ()):
                is_beginning = 0 < length < len(keys) and row.keys[:length] == keys[:length]
                is_new = all(message["role"] != ASSISTANT for message in messages[length:])
                if is_beginning and is_new and (best is None or length > best[0]):
                    best = length, row, place
        if best is None:
            return Opening([], [], messages, keys, tools, None)
        length, row, place = best
        turn = [turn for turn in row.turns if turn.role == MODEL][place]
        context, sampled = row.token_ids[: turn.stop], row.token_ids[turn.start : turn.stop]
        return Opening(context, sampled, messages[length:], keys, tools, row)

    def open_tokens(self, token_ids: Sequence[int]) -> Opening:
        """The same for a prompt in token space: a row goes on if the ids begin with all of its tokens."""
        self._check_room()
        ids = list(token_ids)
        for row in sorted(self.rows, key=lambda row: -len(row.token_ids)):
            if ids[: len(row.token_ids)] == row.token_ids:
                return Opening(row.token_ids[:], [], (), [], (), row, between=ids[len(row.token_ids) :])
        return Opening([], [], (), [], (), None, between=ids)

    def _check_room(self) -> None:
        """Raises InputError for a session that keeps more than any agent does."""
        if len(self.rows) >= MAX_ROWS:
            raise InputError(f"the session has {MAX_ROWS} conversations: give it its reward, or take another name")

    def finish(self, opening: Opening, sampled: Trajectory, message: Message | None) -> None:
        """Record the turn.

        Args:
            opening: which was taken.
            sampled: one turn, whose prompt is that of the opening.
            message: the turn as the agent is told it; None: not as a message, or as one that cannot be read back.
        """
        row, ids = opening.row, sampled.sampled_ids.tolist()
        if row is None:
            row = ConversationRow(len(opening.token_ids), _name(opening.tools), opening.token_ids, [])
            row.turns.append(TurnSpan(PROMPT, 0, row.num_prompt))
            self.rows.append(row)
        elif opening.between:
            role = opening.new[0]["role"] if opening.new else "user"
            row.turns.append(TurnSpan(role, len(row.token_ids), len(row.token_ids) + len(opening.between)))
            row.token_ids += opening.between
        start, version = len(row.token_ids), sampled.newest_version
        if not row.spans or row.spans[-1].version < version:
            row.spans.append(Span(start, version))
        row.token_ids += ids
        row.logprobs += sampled.logprobs[sampled.loss_mask].tolist()
        row.turns.append(TurnSpan(MODEL, start, start + len(ids)))
        row.texts.append(sampled.text)
        row.finish_reason = sampled.finish_reason
        row.keys = opening.keys if message is None else [*opening.keys, key_of(message)]
        row.marks.append(-1 if message is None else len(row.keys))
        row.is_taken = False


def read_back(message: Message) -> Message | None:
    """A message of ours as `open` will see it again; None: it cannot be read."""
    try:
        return as_messages([message], None)[0]
    except InputError:
        return None


def _name(tools: Tools) -> str:
    return json.dumps(list(tools), sort_keys=True)
