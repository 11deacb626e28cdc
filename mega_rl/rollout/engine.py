"""What every source of responses must do, and the request that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mega_rl.rollout.temperature_probe import Probed
from mega_rl.types import Prompt, Trajectory


@dataclass(frozen=True)
class Request:
    """One response to sample.

    Example: ``Request(prompt, sample_index=0, seed=sample_seed(0, 3, prompt.index, 0), max_tokens=256)``
    """

    prompt: Prompt
    sample_index: int  # 0 .. G-1 within the prompt's group
    seed: int  # of this response only, in [0, 2**63); unused if greedy
    max_tokens: int  # of the response, >= 1
    temperature: float = 1.0  # 0: greedy
    with_routing: bool = False  # the trajectory brings the experts that the engine chose
    with_logprobs: bool = True  # else the trajectory's log-probabilities are all 0, and the engine is faster
    stop: tuple[str, ...] = ()  # strings that end this response, besides those of the engine
    turn: int = 0  # of an episode: the engine that sampled the turn before it has that in its prefix cache
    tail: Trajectory | None = None  # what earlier steps sampled of the response, with which the engine goes on

    def __post_init__(self) -> None:
        assert self.max_tokens >= 1 and self.temperature >= 0.0 and 0 <= self.seed < 2**63, self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


Ended = Trajectory | Request  # a response that has ended: the request alone where another rank has the response


def whole(ended: Sequence[Ended]) -> list[Trajectory]:
    """The trajectories, on a rank that has them."""
    found = [one for one in ended if isinstance(one, Trajectory)]
    assert len(found) == len(ended), "the responses are with another rank of the engine"
    return found


class Sampler(Protocol):
    """Answers requests: an engine, this rank's tensor-parallel part of one, or a stand-in for engines elsewhere.

    The ranks of one engine make the same calls in the same order. An engine gets its weights through a ``WeightSink``.
    """

    @property
    def weight_version(self) -> int:
        """The version of the weights that sample; 0 for those that the engine started with."""

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse requests that ``submit`` would refuse, without any collective.

        Raises:
            InputError: a prompt that leaves no room for its response within the engine's length.
        """

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """One trajectory per request, in the order of the requests; no requests give an empty list.

        Raises:
            InputError: as ``check``.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        """Start sampling these requests, beside those under way; ``step`` returns their trajectories.

        Raises:
            InputError: as ``check``.
        """

    def step(self) -> Sequence[Ended]:
        """Sample about one more token per response; returns the responses that have ended, in the order of submission.

        The first rank of an engine gets trajectories; to the others their requests may be enough. Which call ends a
        response may depend on the engine; the response itself does not.
        """

    @property
    def num_unfinished(self) -> int:
        """Submitted requests whose trajectory ``step`` has not yet returned."""


@dataclass(frozen=True)
class Piece:
    """What one step of an engine added to a response."""

    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats, one per token
    text: str  # may lag behind the tokens: half of a character is no text


@runtime_checkable
class StreamingSampler(Sampler, Protocol):
    """A sampler that shows responses as they grow, and gives them up."""

    def pieces(self) -> Sequence[Piece]:
        """What the last ``step`` added to responses; together, the pieces of one are its trajectory."""

    def abort(self, requests: Sequence[Request]) -> None:
        """Sample no more for these requests, of which ``step`` then returns nothing; of one that has ended: nothing."""


@runtime_checkable
class ResumingSampler(Sampler, Protocol):
    """A sampler whose responses can be stopped, and gone on with when its weights are others."""

    def interrupt(self) -> tuple[Sequence[Ended], Sequence[Request]]:
        """Sample no more: nothing is under way afterwards.

        Returns:
            Responses that have ended in the meantime, as of ``step``; and the requests of all others, each with the
            tail that it has come to, on the ranks to which ``step`` gives trajectories.
        """


class ProbedSampler(Sampler, Probed, Protocol):
    """What a run samples from."""
