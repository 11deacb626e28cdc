"""A game of several turns: guess a number, hear whether the secret one is higher or lower."""

from __future__ import annotations

import hashlib
import re

from mega_rl.environments.protocol import End, Message, Reply, Turn
from mega_rl.errors import InputError
from mega_rl.types import Prompt

NUMBER = re.compile(r"-?\d+")


class NumberGuessing:
    """The reward is 1 for the first guess and falls evenly to 0 when all guesses are spent.

    The secret number depends on the prompt's number alone, so all samples of a prompt play the same game.
    """

    roles = ("user",)

    def __init__(self, prompt: Prompt, sample_index: int, *, highest: int = 100, max_guesses: int = 8) -> None:
        """Choose the number. Raises InputError: no number to guess, or no guess."""
        if highest < 1 or max_guesses < 1:
            raise InputError(f"guessing: highest {highest} and max_guesses {max_guesses} must be at least 1")
        digest = hashlib.blake2b(f"guessing|{prompt.index}".encode(), digest_size=8).digest()
        self._secret = 1 + int.from_bytes(digest, "big") % highest
        self._highest = highest
        self._left = self._max = max_guesses

    def start(self) -> list[Message]:
        text = f"I think of a whole number from 1 to {self._highest}. Write one number in each of your messages."
        return [{"role": "user", "content": f"{text} You have {self._max} guesses."}]

    def step(self, turn: Turn) -> Reply | End:
        guesses = NUMBER.findall(turn.text)
        reward = self._left / self._max
        self._left -= 1
        if guesses and guesses[-1] == str(self._secret):
            return End(reward, {"guesses": self._max - self._left})
        if self._left == 0:
            return End(0.0, {"guesses": self._max})
        return Reply([{"role": "user", "content": self._hint(guesses[-1] if guesses else None)}])

    def _hint(self, guess: str | None) -> str:
        if guess is None or len(guess) > 20:
            return f"That is no number from 1 to {self._highest}."
        return "It is higher." if int(guess) < self._secret else "It is lower."
