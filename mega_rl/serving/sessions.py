"""Sessions of agents: each one's conversations, until its reward comes and they are handed on as trajectories."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mega_rl.errors import InputError, shown
from mega_rl.rollout.collect.collect import PromptGroup
from mega_rl.rollout.collect.records import PATTERN, append_rows, to_rows
from mega_rl.serving.conversations import Conversations
from mega_rl.types import Prompt, Score, Span, Trajectory

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
FIRST_OWN_INDEX = 1 << 40  # of prompts that no data set numbers
NUM_REMEMBERED = 10_000  # sessions that have ended, whose names are not given anew
# What a session may be opened with, and its type.
FIELDS: Mapping[str, type] = {
    "session": str, "prompt_index": int, "sample_index": int, "ground_truth": str, "data_source": str,
    "extra_info": dict,
}  # fmt: skip
# Takes the rows of a session, which all have its reward.
Take = Callable[[Sequence[Trajectory], Score], None]


class UnknownSessionError(InputError):
    """There is no such session."""


class EndedSessionError(InputError):
    """The session has its reward already, or cannot have one yet."""


@dataclass
class AgentSession:
    """One response of an agent to one prompt: everything that it asked the model for."""

    name: str
    prompt: Prompt  # without tokens, which are those of its first request
    sample_index: int
    conversations: Conversations = field(default_factory=Conversations)
    num_under_way: int = 0
    last_used_s: float = field(default_factory=time.monotonic)


@dataclass
class SessionCounts:
    """Over all sessions."""

    opened: int = 0
    rewarded: int = 0
    dropped: int = 0  # without a reward: by request, or because nothing came for too long
    rows: int = 0  # of those that were rewarded
    turns: int = 0
    rows_begun_anew: int = 0  # within a session that had a row: what was sent did not go on from it


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # of an integer beyond all floats
        return False


class Sessions:
    """The sessions that are open."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, take: Take, max_sessions: int = 4096, idle_s: float = 3600.0
    ) -> None:
        """
        Args:
            take: is given the trajectories of every rewarded session.
            max_sessions: open at once.
            idle_s: a session without a request for longer is dropped.
        """
        self.counts = SessionCounts()
        self._tokenizer, self._take = tokenizer, take
        self._max, self._idle_s = max_sessions, idle_s
        self._open: OrderedDict[str, AgentSession] = OrderedDict()  # the one that was used longest ago first
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._own_indices = itertools.count(FIRST_OWN_INDEX)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, fields: Mapping[str, Any]) -> AgentSession:
        """A new session. Raises InputError: fields that are none, a name that is taken, too many sessions."""
        for name, value in fields.items():
            kind = FIELDS.get(name)
            if kind is None:
                raise InputError(f"unknown field {shown(name)}; there are {', '.join(FIELDS)}")
            if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
                raise InputError(f"{name} is {shown(value)}; give {'0 or more' if kind is int else kind.__name__}")
        try:
            json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise InputError(f"the fields of a session cannot be written down: {error}") from error
        name = fields.get("session", uuid.uuid4().hex)
        if not NAME.fullmatch(name):
            raise InputError(f"the session {shown(name)} has characters other than letters, digits, '.', '_' and '-'")
        if name in self._open or name in self._ended:
            raise EndedSessionError(f"there was a session {name} already; take another name")
        self._drop_idle()
        if len(self._open) >= self._max:
            raise InputError(f"{self._max} sessions are open; give rewards to some, or drop them")
        prompt = Prompt(
            fields["prompt_index"] if "prompt_index" in fields else next(self._own_indices),
            (),
            "",
            fields.get("ground_truth", ""),
            fields.get("data_source", "agent"),
            fields.get("extra_info", {}),
        )
        self._open[name] = AgentSession(name, prompt, fields.get("sample_index", 0))
        self.counts.opened += 1
        return self._open[name]

    def use(self, name: str) -> AgentSession:
        """The session of that name, opened if there is none. Raises InputError: as `open`; it has its reward."""
        if name in self._ended:
            raise EndedSessionError(f"the session {name} has ended; take another name")
        found = self._open.get(name) or self.open({"session": name})
        self._open.move_to_end(name)
        found.last_used_s = time.monotonic()
        return found

    def find(self, name: str) -> AgentSession:
        """Raises UnknownSessionError, EndedSessionError."""
        if name in self._ended:
            raise EndedSessionError(f"the session {name} has ended")
        if name not in self._open:
            raise UnknownSessionError(f"there is no session {shown(name)}")
        return self._open[name]

    def reward(self, name: str, value: float, parts: Mapping[str, float]) -> list[Trajectory]:
        """End a session; its trajectories are handed on with the reward.

        Raises:
            InputError: no such session, no number, nothing was sampled, or a turn is under way.
        """
        session = self.find(name)
        numbers = {"reward": value, **parts}
        for key, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or not _is_finite(number):
                raise InputError(f"{key} is {shown(number)}; give a finite number")
        if session.num_under_way:
            raise EndedSessionError(f"a turn of the session {name} is under way; wait for it, or end its request")
        trajectories = self._trajectories(session)
        if not trajectories:
            raise EndedSessionError(f"nothing was sampled in the session {name}")
        self._take(trajectories, Score(float(value), {key: float(part) for key, part in parts.items()}))
        self._end(name)
        self.counts.rewarded += 1
        self.counts.rows += len(trajectories)
        self.counts.rows_begun_anew += len(trajectories) - 1
        self.counts.turns += sum(len(row.marks) for row in session.conversations.rows)
        return trajectories

    def drop(self, name: str) -> None:
        """End a session without a reward: what was sampled is forgotten. Raises InputError: no such session."""
        self.find(name)
        self._end(name)
        self.counts.dropped += 1

    def _trajectories(self, session: AgentSession) -> list[Trajectory]:
        """The first row has the session's prompt index; every other one has a number of its own."""
        found = []
        for number, row in enumerate(session.conversations.rows):
            index = session.prompt.index if number == 0 else next(self._own_indices)
            text = self._tokenizer.decode(row.token_ids[: row.num_prompt])
            extra = {**session.prompt.extra_info, "session": session.name, "row": number}
            prompt = Prompt(index, (), str(text), session.prompt.ground_truth, session.prompt.data_source, extra)
            found.append(row.trajectory(prompt, session.sample_index))
        return found

    def _end(self, name: str) -> None:
        del self._open[name]
        self._ended[name] = None
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)

    def _drop_idle(self) -> None:
        """Drop what nobody has used for long; `_open` is in the order of use."""
        for name, session in list(self._open.items()):
            if time.monotonic() - session.last_used_s <= self._idle_s:
                return
            if not session.num_under_way:
                self.drop(name)


class Recorder:
    """Writes trajectories as the rollouts of one step, row after row: what a run reads as ``rollout.replay``.

    A run samples step k with the weights of version k - 1, which the rows therefore name.
    """

    def __init__(self, directory: Path, step: int) -> None:
        """Raises InputError: the step is there already, or the directory cannot be written to."""
        self.path, self._version = directory / PATTERN.format(step), step - 1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.path.open("x").close()
        except FileExistsError as error:
            raise InputError(f"{self.path} is there already; choose another --record or --step") from error
        except OSError as error:
            raise InputError(f"--record {directory} cannot be written to ({error}); choose another") from error

    def __call__(self, trajectories: Sequence[Trajectory], score: Score) -> None:
        stamped = [replace(one, spans=(Span(one.spans[0].start, self._version),)) for one in trajectories]
        append_rows(self.path, [row for one in stamped for row in to_rows(PromptGroup((one,), (score,)))])
