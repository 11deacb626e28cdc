"""Requests over all rollout engines: split, sample, gather."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.parallel.layout import EngineLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.parallel.schedule import split_even
from mega_rl.rollout.collect import PromptGroup, Round, collect
from mega_rl.rollout.engine import Request, Sampler
from mega_rl.types import Trajectory


def split_requests(requests: Sequence[Request], num_replicas: int) -> list[list[Request]]:
    """Requests by replica: contiguous runs of whole prompts, the numbers of prompts differing by at most one.

    Joined in order the parts are ``requests`` again; a prompt's samples stay together, so that they share its prefix.
    """
    assert num_replicas >= 1, num_replicas
    prompts = [list(group) for _, group in groupby(requests, key=lambda request: request.prompt.index)]
    bounds = [len(prompts) * replica // num_replicas for replica in range(num_replicas + 1)]
    return [
        [request for group in prompts[start:end] for request in group]
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def generate_everywhere(
    engine: Sampler,
    layout: EngineLayout,
    requests: Sequence[Request],
    group: dist.ProcessGroup | None = None,
    rendezvous: Rendezvous | None = None,
) -> list[Trajectory]:
    """Sample all requests over all engines; every rank gets every trajectory, in the order of the requests.

    Collective: every rank calls it with the same requests.

    Args:
        group: all ranks, able to move Python objects; None: the default group.
        rendezvous: where the engines wait for the slowest one; None: in a collective, which has a time limit.

    Raises:
        InputError: on every rank, if the engine of one of them raised one.
        RuntimeError: likewise for any other failure.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    mine = split_requests(requests, layout.num_replicas)[layout.replica(rank)]
    # Inside ``generate`` the engine's ranks wait for each other: after a failure there the others cannot be reached any
    # more, so the exception ends this process, and torchrun then ends theirs.
    with together("checking the requests", group):
        engine.check(mine)
    trajectories = engine.generate(mine)
    if rendezvous is not None:
        rendezvous.wait("sampling")
    # the other tensor-parallel ranks of a replica hold the same trajectories
    gathered = gather_objects(trajectories if layout.tensor_rank(rank) == 0 else [], group)
    return [trajectory for part in gathered for trajectory in part]


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
    engine: Sampler, layout: EngineLayout, of_step: Round, rendezvous: Rendezvous
) -> list[PromptGroup]:
    """Sample and score a round over all engines; every rank gets every drawn group, in the order of tickets.

    Collective: every rank calls it with the same quota and the same prompts behind the tickets. Engines that are done
    wait for the slowest one at ``rendezvous``, however long it samples.

    Raises:
        InputError: on every rank, if a prompt of the first tickets does not fit the engine of one of them.
    """
    own = split_even(of_step.quota.num_initial, layout.num_replicas)[layout.replica(dist.get_rank())]
    with together("checking the requests"):
        engine.check([request for ticket in own for request in of_step.draw(ticket)])
    groups = collect(engine, of_step, own)
    rendezvous.wait("sampling")
    gathered: dict[int, PromptGroup] = {}
    for part in gather_objects(groups if of_step.is_leader else {}):
        gathered |= part
    assert sorted(gathered) == list(range(len(gathered))), "tickets are drawn without a gap"
    return [gathered[ticket] for ticket in range(len(gathered))]
