"""One batch of requests over all rollout engines: split, generate, gather."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.engine import Request, RolloutEngine
from mega_rl.types import Completion


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
    engine: RolloutEngine,
    layout: EngineLayout,
    requests: Sequence[Request],
    group: dist.ProcessGroup | None = None,
) -> list[Completion]:
    """Sample all requests over all engines; every rank gets every completion, in the order of the requests.

    Collective: every rank calls it with the same requests.

    Args:
        group: all ranks, able to move Python objects; None: the default group.

    Raises:
        InputError: on every rank, if the engine of one of them raised one.
        RuntimeError: likewise for any other failure.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    mine = split_requests(requests, layout.num_replicas)[layout.replica(rank)]
    # The engine's ranks wait for each other inside: after a failure there the others cannot be reached any more, so the
    # exception ends this process, which makes torchrun end theirs.
    with together("checking the requests", group):
        engine.check(mine)
    completions = engine.generate(mine)
    # the other tensor-parallel ranks of a replica hold the same completions
    gathered = gather_objects(completions if layout.tensor_rank(rank) == 0 else [], group)
    return [completion for part in gathered for completion in part]
