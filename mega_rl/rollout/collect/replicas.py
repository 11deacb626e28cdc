"""Requests over all rollout engines: split, sampled, summarised."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from mega_rl.parallel.collectives import together
from mega_rl.parallel.layout import EngineLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.parallel.sending import spread
from mega_rl.rollout.collect.collect import GroupSummary, PartialRequests, Round, collect
from mega_rl.rollout.collect.partial_groups import PartialGroup
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.engine import Sampler


def engine_ranks(layout: EngineLayout, timeout_s: float) -> dist.ProcessGroup | None:
    """The ranks of this rank's engine, able to move Python objects; None for a single rank. Collective over all."""
    if layout.tensor_parallel_size == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration(
        [list(layout.replica_ranks(replica)) for replica in range(layout.num_replicas)],
        backend="gloo",
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return group


class Everything(NamedTuple):
    """What a step has come to over all engines, in the order of tickets."""

    groups: list[GroupSummary]  # that have ended
    waiting: list[PartialGroup]  # that have not
    own: list[PartialRequests]  # of those: the groups of this rank's engine


def collect_everywhere(
    engine: Sampler,
    layout: EngineLayout,
    of_step: Round,
    shares: Sequence[Sequence[int]],
    rendezvous: Rendezvous,
    trajectory_store: TrajectoryStore,
) -> Everything:
    """Sample and score a round over all engines; every rank gets every drawn group.

    Collective: every rank calls it with the same quota and the same prompts behind the tickets. Engines that are done
    wait for the slowest one at ``rendezvous``, however long it samples. The trajectories stay in the
    ``trajectory_store`` of each engine's leader.

    Args:
        shares: the first tickets of every engine.

    Raises:
        InputError: on every rank, if a prompt of the first tickets does not fit the engine of one of them.
    """
    replica = layout.replica(dist.get_rank())
    with together("checking the requests"):
        engine.check([request for ticket in shares[replica] for request in of_step.start(ticket).requests])
    groups, begun = collect(engine, of_step, shares[replica])
    rendezvous.wait("sampling")
    own: dict[int, GroupSummary | PartialGroup] = {
        ticket: GroupSummary(tuple(map(trajectory_store.add, group.trajectories)), group.scores)
        for ticket, group in groups.items()
    }
    own |= {ticket: PartialGroup.of(replica, group) for ticket, group in begun.items()}
    gathered: dict[int, GroupSummary | PartialGroup] = {}
    for part in spread(own, layout.leaders()):
        gathered |= part
    assert sorted(gathered) == list(range(len(gathered))), "tickets are drawn without a gap"
    in_order = [gathered[ticket] for ticket in range(len(gathered))]
    ended = [one for one in in_order if isinstance(one, GroupSummary)]
    return Everything(ended, [one for one in in_order if isinstance(one, PartialGroup)], list(begun.values()))
