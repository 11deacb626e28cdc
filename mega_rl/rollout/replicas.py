"""Requests over all rollout engines: split, sample, outline."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from mega_rl.parallel.collectives import together
from mega_rl.parallel.layout import EngineLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.parallel.schedule import split_even
from mega_rl.parallel.sending import spread
from mega_rl.rollout.collect import OutlinedGroup, Round, collect
from mega_rl.rollout.depot import Depot
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


def collect_everywhere(
    engine: Sampler, layout: EngineLayout, of_step: Round, rendezvous: Rendezvous, depot: Depot
) -> list[OutlinedGroup]:
    """Sample and score a round over all engines; every rank gets every drawn group, in the order of tickets.

    Collective: every rank calls it with the same quota and the same prompts behind the tickets. Engines that are done
    wait for the slowest one at ``rendezvous``, however long it samples. The trajectories stay in the ``depot`` of each
    engine's leader.

    Raises:
        InputError: on every rank, if a prompt of the first tickets does not fit the engine of one of them.
    """
    own = split_even(of_step.quota.num_initial, layout.num_replicas)[layout.replica(dist.get_rank())]
    with together("checking the requests"):
        engine.check([request for ticket in own for request in of_step.draw(ticket)])
    groups = collect(engine, of_step, own)
    rendezvous.wait("sampling")
    own_groups = {
        ticket: OutlinedGroup(tuple(map(depot.add, group.trajectories)), group.scores)
        for ticket, group in groups.items()
    }
    gathered: dict[int, OutlinedGroup] = {}
    for part in spread(own_groups, layout.leaders()):
        gathered |= part
    assert sorted(gathered) == list(range(len(gathered))), "tickets are drawn without a gap"
    return [gathered[ticket] for ticket in range(len(gathered))]
