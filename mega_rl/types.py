"""The records that pass between the stages of training: frozen, typed, a shape and a unit on every field.

Letters in shapes: B sequences, G samples per prompt, T packed tokens of a micro-batch, L tokens of one trajectory, R
tokens of one response, S sampled tokens of one trajectory, M layers that have experts, K experts of a token in one
layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

# What a model may be computed in: its name in the configuration -> torch's type.
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT, ASSISTANT = "prompt", "assistant"  # roles of a trajectory's turns


@dataclass(frozen=True)
class PromptImage:
    """Where a picture stands in a prompt. Its pixels are read where they are needed, and never sent or stored."""

    key: str  # the same for the same patches only: the digest of the picture's bytes, and its grid
    first: int  # its first token in the prompt
    num_tokens: int


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt data set, ready to be sampled from.

    Example: ``Prompt(index=7, token_ids=(3, 14, 4), text="3+4=", ground_truth="7", data_source="arithmetic")``
    """

    index: int  # row number in the data set: keys the sampling seeds, so it never depends on the layout
    token_ids: tuple[int, ...]  # what the engine is given, chat template applied
    text: str  # the same, readable
    ground_truth: str
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()  # in the order of their tokens, which are among ``token_ids``


@dataclass(frozen=True)
class Span:
    """The sampled tokens from ``start`` to the next span's start come from the weights of one sync."""

    start: int  # index into the trajectory's tokens; it may lie inside a turn, if weights changed under way
    version: int  # of the sync that brought those weights


@dataclass(frozen=True)
class TurnSpan:
    """Tokens ``start`` to ``stop`` (not included) of a trajectory, and who wrote them."""

    role: str  # PROMPT, ASSISTANT, or that of the message that answered the assistant, such as "tool" or "user"
    start: int
    stop: int
    text: str = ""  # of its tokens, special ones included; only episodes have it


class Outcome(NamedTuple):
    """How an episode ended: a conversation of the model with an environment."""

    stop: str  # environment, turns, tokens (these two: a limit) or failed
    num_turns: int  # of the model
    reward: float | None  # that the environment gave at the end; None: the run's rewards score it
    failure: UnknownReward | None  # of the environment: its reward is unknown
    metrics: Mapping[str, float]  # by the environment's own names, added up over the episode
    turn_rewards: tuple[float, ...] = ()  # of every turn of the model, beside that of the end; (): it gave none


@dataclass(frozen=True, eq=False)
class Trajectory:
    """What became of one sample of a prompt: every token, which of them were sampled, and by which weights.

    The arrays take 9 bytes a token, with routing M x K (or 2 x M x K) more, and become read-only here. ``text`` is what
    the engine made of the sampled tokens; it never stands in for them. Two trajectories are equal if all their fields
    but ``engine`` are; they have no hash.

    Example: a prompt of 2 tokens and a response of 2, sampled with the weights of sync 5, is
    ``Trajectory.single_turn(prompt, 0, [9, 2], [-0.7, -0.1], "b", "stop", 5)``: ``token_ids`` [4, 7, 9, 2],
    ``loss_mask`` [F, F, T, T], ``logprobs`` [0, 0, -0.7, -0.1], ``spans`` (Span(2, 5),), ``turns``
    (TurnSpan("prompt", 0, 2), TurnSpan("assistant", 2, 4)).
    """

    prompt: Prompt
    sample_index: int  # 0 .. G-1 within the prompt's group
    token_ids: npt.NDArray[np.int32]  # [L]: the prompt's, then all that followed, end-of-sequence tokens included
    loss_mask: npt.NDArray[np.bool_]  # [L]: True on sampled tokens only
    logprobs: npt.NDArray[np.float32]  # [L]: nats, under the engine's (possibly noisy) policy; 0 outside the mask
    spans: tuple[Span, ...]  # ascending; the first begins at the first sampled token
    turns: tuple[TurnSpan, ...]  # side by side over all tokens; the first is the prompt
    # Of the sampled tokens, without special tokens; of an episode, of the turns that rewards score. The first tail of a
    # response may have none.
    text: str
    finish_reason: str  # "stop" or "length": why the last response ended; "abort": it has not, it is a tail
    # [L-1, M, K] uint8 or uint16: which experts the engine sent every token to; the last token was never an input.
    routed_experts: npt.NDArray[np.unsignedinteger[Any]] | None = None
    episode: Outcome | None = None  # None: no environment took part
    # The number of the engine that sampled all of it; None: several did, or it is not known. No part of what is equal
    # or written: an engine does not count for what a response is.
    engine: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        length, num_prompt = len(self.token_ids), len(self.prompt.token_ids)
        for array, dtype in ((self.token_ids, np.int32), (self.loss_mask, np.bool_), (self.logprobs, np.float32)):
            assert array.dtype == dtype and array.shape == (length,), (array.dtype, array.shape, dtype, length)
        if (routed := self.routed_experts) is not None:
            assert routed.dtype in (np.uint8, np.uint16) and routed.ndim == 3, (routed.dtype, routed.shape)
            assert len(routed) == length - 1, f"experts of {len(routed)} tokens, and {length - 1} were inputs"
        assert np.array_equal(self.token_ids[:num_prompt], self.prompt.token_ids), "the prompt's tokens come first"
        assert not self.logprobs[~self.loss_mask].any(), "only sampled tokens have a log-probability"
        first_sampled = int(self.loss_mask.argmax()) if self.loss_mask.any() else length
        assert self.spans and self.spans[0].start == first_sampled, "the first span begins at the first sampled token"
        assert all(a.start < b.start < length and a.version < b.version for a, b in pairwise(self.spans)), self.spans
        assert self.turns and self.turns[0] == TurnSpan(PROMPT, 0, num_prompt), "the first turn is the prompt"
        assert all(a.stop == b.start <= b.stop for a, b in pairwise(self.turns)), self.turns
        assert self.turns[-1].stop == length, "the turns cover all tokens"
        others = (turn for turn in self.turns if turn.role != ASSISTANT)
        assert not any(self.loss_mask[turn.start : turn.stop].any() for turn in others), "only the assistant is sampled"
        self._make_read_only()

    @classmethod
    def single_turn(
        cls,
        prompt: Prompt,
        sample_index: int,
        response_ids: SequenceOf[int],
        logprobs: SequenceOf[float],
        text: str,
        finish_reason: str,
        version: int,
    ) -> Trajectory:
        """A prompt and one response [R] to it, sampled with the weights of one sync, without experts.

        Args:
            logprobs: [R], nats.
            version: of the sync.
        """
        assert len(logprobs) == len(response_ids), "one log-probability per response token"
        num_prompt, length = len(prompt.token_ids), len(prompt.token_ids) + len(response_ids)
        loss_mask, padded = np.zeros(length, np.bool_), np.zeros(length, np.float32)
        loss_mask[num_prompt:], padded[num_prompt:] = True, logprobs
        return cls(
            prompt,
            sample_index,
            token_ids=np.array([*prompt.token_ids, *response_ids], np.int32),
            loss_mask=loss_mask,
            logprobs=padded,
            spans=(Span(num_prompt, version),),
            turns=(TurnSpan(PROMPT, 0, num_prompt), TurnSpan(ASSISTANT, num_prompt, length)),
            text=text,
            finish_reason=finish_reason,
        )

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask.sum())

    @property
    def sampled_ids(self) -> npt.NDArray[np.int32]:
        """[num_sampled]: the sampled tokens in their order; with one turn, the response."""
        return self.token_ids[self.loss_mask]

    @property
    def sampled_logprobs(self) -> npt.NDArray[np.float32]:
        """[num_sampled]: nats, of ``sampled_ids``."""
        return self.logprobs[self.loss_mask]

    @property
    def oldest_version(self) -> int:
        """The sync whose weights sampled the first tokens."""
        return self.spans[0].version

    @property
    def newest_version(self) -> int:
        """The sync whose weights sampled the last tokens; with one span, all of them."""
        return self.spans[-1].version

    def summary(self, owner: int = 0, number: int = 0) -> TrajectorySummary:
        """What the ranks that do not hold it know of it; ``owner`` holds it, as its ``number``-th one."""
        routed = self.routed_experts
        return TrajectorySummary(
            owner,
            number,
            self.prompt.index,
            self.sample_index,
            self.prompt.data_source,
            len(self.prompt.token_ids),
            len(self.token_ids),
            self.num_sampled,
            float(self.logprobs.sum(dtype=np.float64)),
            self.finish_reason,
            self._versions(),
            None if routed is None else RoutingShape(routed.dtype.name, *routed.shape[1:]),
            self.episode,
            () if self.episode is None else self._turn_sizes(),
            self.engine,
        )

    def _turn_sizes(self) -> tuple[int, ...]:
        turns = [turn for turn in self.turns if turn.role == ASSISTANT]
        return tuple(int(self.loss_mask[turn.start : turn.stop].sum()) for turn in turns)

    def _versions(self) -> tuple[tuple[int, int], ...]:
        bounds = [*(span.start for span in self.spans), len(self.token_ids)]
        counts = [int(self.loss_mask[start:stop].sum()) for start, stop in pairwise(bounds)]
        return tuple((span.version, count) for span, count in zip(self.spans, counts, strict=True))

    @property
    def is_single_turn(self) -> bool:
        """Whether it is what ``single_turn`` makes: one response, all of it sampled with the weights of one sync."""
        num_after_prompt = len(self.token_ids) - len(self.prompt.token_ids)
        is_plain = self.episode is None and len(self.spans) == 1 and len(self.turns) == 2
        return is_plain and self.num_sampled == num_after_prompt

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self) if f.compare)
        return all(_same(a, b) for a, b in pairs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Out of a pickle: with arrays of its own, since those may lie in shared memory of the sender (Ray's store)."""
        self.__dict__.update({k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()})
        self._make_read_only()

    def _make_read_only(self) -> None:
        for array in (self.token_ids, self.loss_mask, self.logprobs, self.routed_experts):
            if array is not None:
                array.flags.writeable = False


class RoutingShape(NamedTuple):
    """What the experts of every token of a trajectory look like as an array [L-1, M, K]."""

    dtype: str  # uint8 or uint16
    num_layers: int  # M
    experts_per_token: int  # K


class TrajectorySummary(NamedTuple):
    """A trajectory without its tokens: numbers that every rank has, while the tokens lie with one of them.

    About 60 bytes in a message, however long the trajectory is; what an episode's environment says comes on top.
    """

    owner: int  # the rank that holds the tokens
    number: int  # of the trajectory among those that the owner has held
    prompt_index: int
    sample_index: int
    data_source: str
    num_prompt: int  # tokens of the prompt
    num_tokens: int  # L
    num_sampled: int  # S
    logprob_sum: float  # nats, of all sampled tokens
    finish_reason: str
    # (of the weights, sampled tokens), ascending: which weights sampled how many of the tokens, from the first one on
    versions: tuple[tuple[int, int], ...]
    routing: RoutingShape | None = None
    episode: Outcome | None = None
    turn_sizes: tuple[int, ...] = ()  # of an episode: sampled tokens of each turn of the model
    engine: int | None = None  # as of the trajectory

    @property
    def key(self) -> tuple[int, int]:
        """No other trajectory of the run has it."""
        return self.owner, self.number

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled its first tokens."""
        return self.versions[0][0]

    @property
    def newest_version(self) -> int:
        """Of the weights that sampled its last tokens."""
        return self.versions[-1][0]

    def staleness(self, step: int) -> npt.NDArray[np.int64]:
        """[S]: how many steps the weights that sampled each token are older than those that learn from it.

        Args:
            step: that learns, counted from 0: it trains weights of this version.
        """
        versions, counts = zip(*self.versions, strict=True)
        return step - np.repeat(np.array(versions, np.int64), counts)

    @property
    def num_token_bytes(self) -> int:
        """Of ids (int32), mask (a bit each, whole words of 4 bytes) and log-probabilities (float32, if sampled)."""
        return 4 * (self.num_tokens + -(-self.num_tokens // 32) + self.num_sampled)

    @property
    def num_routing_bytes(self) -> int:
        if self.routing is None:
            return 0
        dtype, *shape = self.routing
        return int(np.dtype(dtype).itemsize * (self.num_tokens - 1) * math.prod(shape))


@dataclass(frozen=True)
class HandedTrajectory:
    """What a scheduler knows of a trajectory that its engine has handed to the rank that owns it."""

    summary: TrajectorySummary  # without an engine
    episode: Outcome | None = None
    engine: int | None = None  # as of the trajectory

    @property
    def num_sampled(self) -> int:
        return self.summary.num_sampled

    @property
    def oldest_version(self) -> int:
        return self.summary.oldest_version


Response = Trajectory | HandedTrajectory  # with its tokens, or with another rank that has them


@dataclass(frozen=True)
class TrajectoryTokens:
    """What a trainer learns from of one trajectory: its arrays as they were sent, 8.1 bytes a sampled token."""

    token_ids: npt.NDArray[np.int32]  # [L]
    mask_bits: npt.NDArray[np.uint8]  # [>= L / 8]: ``loss_mask``, eight tokens to a byte
    sampled_logprobs: npt.NDArray[np.float32]  # [S]
    routed_experts: npt.NDArray[np.unsignedinteger[Any]] | None = None  # [L-1, M, K]

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """[L]: True on sampled tokens only."""
        return np.unpackbits(self.mask_bits, count=len(self.token_ids)).view(np.bool_)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """[L]: nats; 0 outside the mask."""
        logprobs = np.zeros(len(self.token_ids), np.float32)
        logprobs[self.loss_mask] = self.sampled_logprobs
        return logprobs


class TokenSource(Protocol):
    """Where the tokens of summarized trajectories are to be had."""

    def bring(self, parts: SequenceOf[SequenceOf[TrajectorySummary]]) -> list[TrajectoryTokens]:
        """The tokens of this rank's part, in its order. Collective.

        Args:
            parts: what each data-parallel rank wants; the same on all ranks.
        """
        ...


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return a is not None and b is not None and np.array_equal(a, b)
    return bool(a == b)


@dataclass(frozen=True)
class UnknownReward:
    """Why a reward has no value for one trajectory."""

    cause: str  # one of mega_rl.rewards.pool.worker.CAUSES
    detail: str  # completes "the reward ..."


@dataclass(frozen=True)
class Score:
    """The reward of one trajectory."""

    value: float  # the weighted sum of the parts; NaN where one of them is unknown
    parts: Mapping[str, float] = field(default_factory=dict)  # reward name -> its own value before weighting
    unknown: Mapping[str, UnknownReward] = field(default_factory=dict)  # reward name -> why it has no value
    turn_rewards: tuple[float, ...] = ()  # what of the value single turns of an episode earned; the rest is of the end

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.value)


@dataclass(frozen=True)
class Sample:
    """A trajectory with its reward and advantage: what the trainer learns from, but for the tokens themselves."""

    summary: TrajectorySummary
    score: Score
    advantage: float  # of every sampled token; where turns have their own, the mean over these tokens
    turn_advantages: tuple[float, ...] = ()  # of every turn of the model; (): all have the same

    @property
    def token_advantages(self) -> float | npt.NDArray[np.float64]:
        """The advantage of all sampled tokens, or [S]: of each."""
        if not self.turn_advantages:
            return self.advantage
        return np.repeat(np.array(self.turn_advantages), self.summary.turn_sizes)
