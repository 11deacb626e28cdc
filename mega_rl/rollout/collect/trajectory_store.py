"""Where the tokens of trajectories lie, and how they come to the ranks that learn from them.

A trajectory stays with its *owner*, the rank that took it from an engine, or that an engine handed it to. All others
know its ``TrajectorySummary``. From the summaries every rank finds out by itself who needs which tokens, so that they
are sent as plain arrays without a word about them: from the owner to one rank of the data-parallel rank's group (the
ranks that learn from the same sequences), and from there to the group.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.parallel.sending import collect_to_first, exchange
from mega_rl.rollout.collect.collect import GroupSummary, PromptGroup
from mega_rl.rollout.collect.handed_trajectories import HandedTrajectories, OwnerAddress, given_back, open_owners
from mega_rl.types import HandedTrajectory, Response, Trajectory, TrajectorySummary, TrajectoryTokens

WORD = 4  # bytes that every array begins at a multiple of


class TrajectoryStore:
    """The trajectories that this rank owns, and the tokens of others that were sent to it; a ``TokenSource``.

    All ranks call ``bring``, ``to_first`` and ``drop`` together, with the same summaries. Tokens are sent to a
    data-parallel rank once, however often they are asked for until they are dropped.

    Args:
        layout: of the trainer.
        rank: this one.
        group: the ranks that learn from the same sequences as this one; None: it is alone.
        engine: the number of the one that samples all that this rank owns; None: trajectories say theirs.
    """

    def __init__(
        self, layout: ParallelLayout, rank: int, group: dist.ProcessGroup | None = None, engine: int | None = None
    ) -> None:
        self._layout, self._rank, self._group, self._engine = layout, rank, group, engine
        self._groups = layout.sequence_groups()
        self._data_rank = layout.coordinates(rank).data
        assert (group is None) == (len(self._groups[self._data_rank]) == 1), "ranks that share need a group"
        self._own: dict[int, Trajectory] = {}  # by number
        self._numbers = itertools.count()
        self._handed: HandedTrajectories | None = None
        self.owners: tuple[OwnerAddress, ...] = ()  # that engines hand trajectories to
        self._sent: list[set[tuple[int, int]]] = [set() for _ in self._groups]  # keys that a data-parallel rank has
        self._received: dict[tuple[int, int], TrajectoryTokens] = {}

    @classmethod
    def open(cls, layout: ParallelLayout, timeout_s: float, engine: int | None = None) -> TrajectoryStore:
        """The store of this rank; collective over all. ``engine`` is as above."""
        groups, group = layout.sequence_groups(), None
        if len(groups[0]) > 1:
            timeout = datetime.timedelta(seconds=timeout_s)
            group, _ = dist.new_subgroups_by_enumeration(groups, backend="gloo", timeout=timeout)
        return cls(layout, dist.get_rank(), group, engine)

    def open_owners(self) -> None:
        """Let engines hand trajectories to a rank of every node, if there are several. Collective."""
        self._handed, self.owners = open_owners(self._number_of)

    def add(self, trajectory: Response) -> TrajectorySummary:
        """Own a trajectory from now on; one that was handed over stays with its owner."""
        if isinstance(trajectory, HandedTrajectory):
            return trajectory.summary._replace(engine=trajectory.engine)
        summary = trajectory.summary(self._rank, self._number_of(trajectory))
        is_said = trajectory.engine is not None or len(summary.versions) > 1  # another engine may have begun a tail
        return summary if is_said else summary._replace(engine=self._engine)

    def adopt(self, trajectories: Sequence[Trajectory]) -> list[TrajectorySummary]:
        """Take in, as the first ones, trajectories that all ranks were given: rank 0 owns them."""
        numbers = [next(self._numbers) for _ in trajectories]
        assert numbers[:1] in ([], [0]), "ranks that own trajectories already number them differently"
        if self._rank == 0:
            self._own = dict(zip(numbers, trajectories, strict=True))
        return [one.summary(0, number) for one, number in zip(trajectories, numbers, strict=True)]

    def whole(self, trajectory: Response) -> Trajectory:
        """The trajectory with its tokens, wherever it is; not collective."""
        return given_back(trajectory, self.owners) if isinstance(trajectory, HandedTrajectory) else trajectory

    def own(self, number: int) -> Trajectory:
        """One that this rank owns; called in any thread."""
        return self._own[number]

    def close_owners(self) -> None:
        """Take nothing from engines any more; what there is stays."""
        if self._handed is not None:
            self._handed.close()

    def forget_handed(self, step: int) -> None:
        """Forget what engines handed to this rank for earlier steps, also what nobody was told of."""
        for number in [] if self._handed is None else self._handed.forget_before(step):
            self._own.pop(number, None)

    def drop(self, summaries: Iterable[TrajectorySummary]) -> None:
        """Forget these trajectories, here and wherever they were sent."""
        keys = {summary.key for summary in summaries}
        for owner, number in keys:
            if owner == self._rank:
                del self._own[number]
        self._received = {key: tokens for key, tokens in self._received.items() if key not in keys}
        self._sent = [sent - keys for sent in self._sent]

    def bring(self, parts: Sequence[Sequence[TrajectorySummary]]) -> list[TrajectoryTokens]:
        """As ``TokenSource.bring``."""
        wanted = [[one for one in part if one.key not in sent] for part, sent in zip(parts, self._sent, strict=True)]
        arrived = self._arrived(self._by_owner(wanted))
        own = sorted(wanted[self._data_rank], key=lambda summary: summary.owner)
        self._received |= {summary.key: tokens for summary, tokens in zip(own, _unpacked(arrived, own), strict=True)}
        for part, sent in zip(wanted, self._sent, strict=True):
            sent |= {summary.key for summary in part}
        return [self._received[summary.key] for summary in parts[self._data_rank]]

    def to_first(self, summaries: Sequence[TrajectorySummary]) -> list[Trajectory]:
        """Whole trajectories with their texts, in this order, on rank 0; nothing on the others. Collective."""
        owners = sorted({summary.owner for summary in summaries})
        own = {summary.key: self._own[summary.number] for summary in summaries if summary.owner == self._rank}
        found: dict[tuple[int, int], Trajectory] = {}
        for part in collect_to_first(own, owners):
            found |= part
        return [found[summary.key] for summary in summaries] if self._rank == 0 else []

    def groups_to_first(self, groups: Sequence[GroupSummary]) -> list[PromptGroup]:
        """The same of whole groups."""
        found = iter(self.to_first([summary for group in groups for summary in group.summaries]))
        if self._rank != 0:
            return []
        return [PromptGroup(tuple(islice(found, len(group.summaries))), group.scores) for group in groups]

    def _number_of(self, trajectory: Trajectory) -> int:
        """Own a trajectory; called in any thread."""
        number = next(self._numbers)
        self._own[number] = trajectory
        return number

    def _by_owner(self, parts: Sequence[Sequence[TrajectorySummary]]) -> list[dict[int, list[TrajectorySummary]]]:
        found: list[dict[int, list[TrajectorySummary]]] = [{} for _ in parts]
        for part, of_part in zip(parts, found, strict=True):
            for summary in part:
                of_part.setdefault(summary.owner, []).append(summary)
        return found

    def _arrived(self, wanted: Sequence[dict[int, list[TrajectorySummary]]]) -> torch.Tensor:
        """What this rank wants, packed, ordered by owner; all else that it owns is sent on the way."""
        mine, entry = wanted[self._data_rank], self._groups[self._data_rank][0]
        sizes = {owner: sum(map(_num_bytes, mine[owner])) for owner in sorted(mine)}
        arrived = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        incoming = dict(zip(sizes, arrived.split(list(sizes.values())), strict=True)) if sizes else {}
        if self._rank != entry:
            incoming = {}
        outgoing = {}
        for group, of_part in zip(self._groups, wanted, strict=True):
            if (own := of_part.get(self._rank)) is None:
                continue
            if group[0] == self._rank:
                self._pack(own, incoming.pop(self._rank))
            else:
                outgoing[group[0]] = torch.empty(sum(map(_num_bytes, own)), dtype=torch.uint8)
                self._pack(own, outgoing[group[0]])
        if outgoing or incoming:
            exchange(outgoing, incoming)
        if self._group is not None and arrived.numel():
            with HEART.waiting("the other ranks"):
                dist.broadcast(arrived, src=entry, group=self._group)
        return arrived

    def _pack(self, summaries: Sequence[TrajectorySummary], into: torch.Tensor) -> None:
        buffer, place = into.numpy(), 0
        for summary in summaries:
            trajectory = self._own[summary.number]
            mask_bits = np.packbits(trajectory.loss_mask)
            parts = [trajectory.token_ids, mask_bits, trajectory.sampled_logprobs]
            if trajectory.routed_experts is not None:
                parts.append(trajectory.routed_experts)
            for part in parts:
                data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                buffer[place : place + len(data)] = data
                place += _whole_words(len(data))
        assert place == len(buffer), "a summary is not that of its trajectory"


def _num_bytes(summary: TrajectorySummary) -> int:
    return summary.num_token_bytes + _whole_words(summary.num_routing_bytes)


def _whole_words(num_bytes: int) -> int:
    return -(-num_bytes // WORD) * WORD


def _unpacked(packed: torch.Tensor, summaries: Sequence[TrajectorySummary]) -> list[TrajectoryTokens]:
    """Views of what was packed; no number is copied."""
    buffer, place, found = packed.numpy(), 0, []

    def take(num_bytes: int) -> np.ndarray:
        nonlocal place
        start, place = place, place + _whole_words(num_bytes)
        return buffer[start : start + num_bytes]

    for summary in summaries:
        token_ids = take(4 * summary.num_tokens).view(np.int32)
        mask_bits = take(-(-summary.num_tokens // 8))
        logprobs = take(4 * summary.num_sampled).view(np.float32)
        experts = None
        if summary.routing is not None:
            dtype, *shape = summary.routing
            experts = take(summary.num_routing_bytes).view(dtype).reshape(summary.num_tokens - 1, *shape)
        found.append(TrajectoryTokens(token_ids, mask_bits, logprobs, experts))
    return found
