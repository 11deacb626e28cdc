"""What an environment is: what answers the model between its turns. Text in, messages out.

An environment sees neither tokens' masks nor log-probabilities nor chat templates: the messages that it returns are
what the model reads next. One is made anew for every response, as ``Environment(prompt, sample_index, **options)``.

Beside `step` it may have, plain or ``async`` as it likes:

- ``tools``: JSON schemas of functions, which the chat template shows the model; a run asks the first environment that
  it makes, for all of them;
- ``roles``: of the messages that it replies with, which the chat template is tried with when a run starts;
- ``check_at_start()``: raises InputError if what it needs does not work, a service for example; a run asks the first
  environment that it makes, before it begins. Never ``async``;
- ``start()``: messages that stand between the prompt and the first turn;
- ``close()``: called once when the episode is over, whatever ended it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]  # role, content and what else a chat template reads


@dataclass(frozen=True)
class Turn:
    """What the model wrote until it stopped."""

    text: str
    number: int = 0  # 0, 1, ... in its episode
    finish_reason: str = "stop"  # or length: cut at the limit of a turn
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What the model reads next."""

    messages: Sequence[Message]
    metrics: Mapping[str, float] = field(default_factory=dict)  # of this step; added up over the episode
    reward: float | None = None  # of the turn that it answers, beside that of the end; None: none


@dataclass(frozen=True)
class End:
    """The episode is over."""

    reward: float | None = None  # of the end alone; None: the run's reward functions score the response
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolResult:
    """What a tool may return to say whether it failed; of other results the text does, if it begins with ``error:``."""

    text: str  # what the model is told
    has_failed: bool = False


class Environment(Protocol):
    """One episode of one response. A plain `step` runs in a thread: it may wait, but should know a limit of its own."""

    def step(self, turn: Turn) -> Reply | End | Awaitable[Reply | End]: ...
