"""Environments of gymnasium whose observations and actions can be told in words."""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from mega_rl.environments.protocol import End, Message, Reply, Turn
from mega_rl.errors import InputError
from mega_rl.types import Prompt

NUMBER = re.compile(r"-?\d+")


class GymnasiumGame:
    """One episode: an observation is a message of the user, a turn is an action, with its own reward.

    All samples of a prompt play the same game: its seed comes from the prompt's number.
    """

    def __init__(
        self,
        prompt: Prompt,
        sample_index: int,
        *,
        game: str | Callable[[], Any],
        options: Mapping[str, Any] | None = None,
        read_action: Callable[[str], Any] | None = None,
        tell: Callable[[Any], str] = str,
    ) -> None:
        """Make the game.

        Args:
            game: an id that gymnasium knows, or a function that makes one.
            options: of ``gymnasium.make``.
            read_action: a turn's text as an action; raises ValueError if it is none. Without it the text itself is the
                action of a space of texts, and its last whole number that of a discrete one.
            tell: an observation in words.

        Raises:
            InputError: there is no gymnasium or no such game, or nothing to read an action with.
        """
        self._game = _made(game, options or {})
        self._read, self._tell = read_action or _reader(self._game.action_space), tell
        digest = hashlib.blake2b(f"gymnasium|{prompt.index}".encode(), digest_size=4).digest()
        self._seed = int.from_bytes(digest, "big") >> 1

    def start(self) -> list[Message]:
        observation, _ = self._game.reset(seed=self._seed)
        return [{"role": "user", "content": self._tell(observation)}]

    def step(self, turn: Turn) -> Reply | End:
        try:
            action = self._read(turn.text)
        except ValueError as error:
            return Reply([{"role": "user", "content": f"error: {error}"}], {"invalid_actions": 1}, 0.0)
        observation, reward, is_over, is_cut, _ = self._game.step(action)
        if is_over or is_cut:
            return End(float(reward), {"actions": 1})
        return Reply([{"role": "user", "content": self._tell(observation)}], {"actions": 1}, float(reward))

    def close(self) -> None:
        self._game.close()


def _made(game: str | Callable[[], Any], options: Mapping[str, Any]) -> Any:
    if callable(game):
        return game()
    try:
        make = importlib.import_module("gymnasium").make
    except ImportError as error:
        raise InputError(f"the game {game!r} needs gymnasium: pip install gymnasium") from error
    try:
        return make(game, **options)
    except Exception as error:  # of several kinds, by what is missing
        raise InputError(f"gymnasium does not make the game {game!r}: {error}") from error


def _reader(space: Any) -> Callable[[str], Any]:
    """By the name of the kind of a space of actions, so that gymnasium need not be there. Raises InputError."""
    kind = type(space).__name__
    if kind == "Text":
        return str.strip
    if kind != "Discrete":
        raise InputError(f"an action of a space of kind {kind} is not read from text by itself: give read_action")
    lowest, number = int(space.start), int(space.n)

    def last_number(text: str) -> int:
        found = NUMBER.findall(text)
        action = int(found[-1]) if found and len(found[-1]) < 20 else math.nan
        if not lowest <= action < lowest + number:
            raise ValueError(f"write one whole number from {lowest} to {lowest + number - 1}")
        return int(action)

    return last_number
