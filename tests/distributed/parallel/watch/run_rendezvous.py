"""Two ranks whose stand-in engines end further apart than a collective may take; then one rank dies.

Usage: run_rendezvous.py DIRECTORY: prints ``COLLECTED <rank> <groups>``, and ends with the watch's verdict on rank 1.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.parallel.store import shared_store
from mega_rl.parallel.watch.watch import watched
from mega_rl.rollout.collect.collect import Quota, Round
from mega_rl.rollout.collect.replicas import collect_everywhere
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.engine import Request
from mega_rl.rollout.requests import make_requests
from mega_rl.types import Prompt, Score, Trajectory
from tests.pretended.samplers import Modelless

COLLECTIVE_S = 8.0  # of a collective; the watch's limit is a little shorter
DIFFERENCE_S = 12.0


class Engine(Modelless):
    """Ends all responses after so many seconds; until then it makes tokens."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.end = time.monotonic() + seconds

    def step(self) -> list[Trajectory]:
        time.sleep(0.05)
        HEART.mark()
        return [] if time.monotonic() < self.end else super().step()


def draw(ticket: int) -> list[Request]:
    return make_requests([Prompt(ticket, (1,), "", "", "test")], n=2, step=0, seed=0, max_tokens=4, temperature=1.0)


def score(trajectory: Trajectory) -> Future[Score]:
    future: Future[Score] = Future()
    future.set_result(Score(0.0))
    return future


def main(directory: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=COLLECTIVE_S))
    rank, store = dist.get_rank(), shared_store(COLLECTIVE_S)
    rendezvous = Rendezvous(store, rank, 2)
    of_step = Round(0, Quota(4, 4, 4, lambda group: True), draw, score, store)
    with watched(store, directory, 600.0, COLLECTIVE_S):
        HEART.step = 1
        with HEART.during("generate"):
            trajectory_store = TrajectoryStore(ParallelLayout.create(2), rank)
            engine = Engine(DIFFERENCE_S * rank)
            layout, shares = EngineLayout(2, 1), [[0, 1], [2, 3]]
            groups, *_ = collect_everywhere(engine, layout, of_step, shares, rendezvous, trajectory_store)  # type: ignore[arg-type]
            print(f"COLLECTED {rank} {len(groups)}\n", end="", flush=True)
            if rank == 1:
                os._exit(0)  # as if its launcher saw nothing wrong
            rendezvous.wait("sampling")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
