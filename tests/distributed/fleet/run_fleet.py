"""``tools/train.py`` with pretended engines: ``run_fleet.py ENGINES SEED DEATHS STEPS_BEFORE_A_CRASH ARGUMENTS``.

The engines are drawn by the seed, and die so often of 1,000 turns. After so many steps (0: never) all ranks are killed
in the middle of one. With ``--change`` before the arguments, two engines are added and two removed after the first
step, by ``tools/fleet.py``, which is also what is asked how it went. With ``--nodes`` every rank takes itself for a
node of its own, so that engines hand it responses, which are scored there. With ``--counted LOG`` collectives on
objects are written down.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.executor import Requests
from mega_rl.fleet.tickets import held_out
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.rewards.pool import node
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.sampling import sampling
from mega_rl.stages.sampling.fleet_batches import Fleet
from mega_rl.stages.weights import engines as engines_of_a_run
from mega_rl.stages.weights.engine_probe import NoEngine
from mega_rl.stages.weights.weight_sync import Pushed
from tests.distributed.stages.run.run_struck_stage import die
from tests.launching import counted_collectives
from tests.launching.launch import REPO
from tests.pretended.fleet_engines import PretendedExecutor
from tests.pretended.samplers import PretendedSampler
from tools import train


class PretendedSync:
    """Gives engines what tells the actor's weights from all others."""

    def __init__(self, actor: MegatronEngine) -> None:
        self.actor, self.digests = actor, dict[int, int]()
        self.sampler = PretendedSampler(self.digests.__getitem__)
        self.executors: list[PretendedExecutor] = []
        self.has_validated = False
        self.changed: Path | None = None  # the output directory of a run whose engines are to change

    def push(self, version: int, is_validation: bool = False) -> Pushed:
        self.has_validated |= is_validation
        if self.changed is not None and version == 1 and dist.get_rank() == 0:
            change(self.changed)
        if self.executors and not self.has_validated:  # weights change within responses, whoever is faster
            until = time.monotonic() + 100
            while not self.executors[-1].has_begun(version) and time.monotonic() < until:
                time.sleep(0.01)
        digest = 0
        for parameter in chain(*(chunk.parameters() for chunk in self.actor.policy.chunks)):
            digest = zlib.crc32(parameter.detach().cpu().numpy().tobytes(), digest)
        self.digests[version] = self.digests[held_out(version)] = digest
        if is_validation:
            for executor in self.executors:
                executor.is_validating = True
        self.sampler.weight_version = version
        return Pushed(version, 0.0)

    def end_sampling(self) -> None:
        """Do nothing: there is no memory."""


def change(run: Path) -> None:
    """From another process, as a user would."""
    tool = str(REPO / "tools" / "fleet.py")
    for words in (["add", str(run), "2"], ["remove", str(run), "0", "1"], ["add", str(run), "9", "--wait", "0"]):
        found = subprocess.run([sys.executable, tool, *words, "--json"], check=False, capture_output=True, text=True)
        print(f"change: {words[0]} {found.returncode} {found.stderr.strip()} {found.stdout!r}", flush=True)


def main(engines: int, seed: int, death: int, crash: int, arguments: list[str]) -> None:
    executors: list[PretendedExecutor] = []
    is_changed = arguments[0] == "--change"
    arguments = arguments[is_changed:]
    if has_nodes := arguments[0] == "--nodes":
        arguments = arguments[1:]
        node.machine = lambda: f"machine {os.environ['RANK']}"
    if arguments[0] == "--counted":
        counted_collectives.watch(Path(arguments[1]))
        arguments = arguments[2:]

    def pretended(
        job: SamplingJob, actor: MegatronEngine, noise: object
    ) -> tuple[Fleet | PretendedSampler, PretendedSync]:
        sync = PretendedSync(actor)
        sync.changed = job.output_dir if is_changed else None
        mode = job.config.rollout.mode
        if has_nodes:
            job.trajectory_store.open_owners()

        def opened(requests: Requests) -> PretendedExecutor:
            executors.append(
                PretendedExecutor(requests, sync.digests.__getitem__, mode == "pinned", seed, death, room=2)
            )
            executors[-1].owners = job.trajectory_store.owners
            return executors[-1]

        if mode == "in_flight":
            sync.executors = executors
        # unpinned responses stay with their engine until the next weights come, so there must be room for more
        slots = 6 if mode == "pinned" else 1000
        fleet = Fleet(engines, EngineLimits(slots=slots, restarts=10_000), opened, NoEngine())
        return (sync.sampler if mode == "synchronous" else fleet), sync

    sampling.store_fleet = engines_of_a_run.engine_and_sync = pretended
    if crash:
        die(crash)
    try:
        train.main(arguments)
    finally:
        for executor in executors:
            print(f"handed: {sorted(executor.num_handed.items())}")
            print(f"engines: {executor.num_issued} issued, {executor.num_deaths} died, closed: {executor.is_closed}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5:])
