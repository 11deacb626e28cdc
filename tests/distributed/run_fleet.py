"""``tools/train.py`` with pretended engines: ``run_fleet.py ENGINES SEED DEATHS STEPS_BEFORE_A_CRASH ARGUMENTS``.

The engines are drawn by the seed, and die so often of 1,000 turns. After so many steps (0: never) all ranks are killed
in the middle of one.
"""

from __future__ import annotations

import sys
import time
import zlib
from itertools import chain

from mega_rl.fleet.carrier import Requests
from mega_rl.fleet.engines import Limits
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.stages.parts import building, sampling
from mega_rl.stages.parts.fleet_batches import Fleet
from mega_rl.stages.parts.session import Session
from mega_rl.stages.parts.weight_sync import Pushed
from tests.distributed.run_struck_stage import die
from tests.pretended_fleet import PretendedCarrier, PretendedSampler
from tools import train


class PretendedSync:
    """Gives engines what tells the actor's weights from all others."""

    def __init__(self, actor: MegatronEngine) -> None:
        self.actor, self.digests = actor, dict[int, int]()
        self.sampler = PretendedSampler(self.digests.__getitem__)
        self.carriers: list[PretendedCarrier] = []

    def push(self, version: int, is_validation: bool = False) -> Pushed:
        assert not is_validation
        if self.carriers:  # weights change within responses, whoever is faster
            until = time.monotonic() + 100
            while not self.carriers[-1].has_begun(version) and time.monotonic() < until:
                time.sleep(0.01)
        digest = 0
        for parameter in chain(*(chunk.parameters() for chunk in self.actor.policy.chunks)):
            digest = zlib.crc32(parameter.detach().cpu().numpy().tobytes(), digest)
        self.digests[version] = digest
        self.sampler.weight_version = version
        return Pushed(version, 0.0)

    def end_sampling(self) -> None:
        pass


def main(engines: int, seed: int, death: int, crash: int, arguments: list[str]) -> None:
    carriers: list[PretendedCarrier] = []

    def pretended(
        session: Session, actor: MegatronEngine, noise: object
    ) -> tuple[Fleet | PretendedSampler, PretendedSync]:
        sync = PretendedSync(actor)
        mode = session.config.rollout.mode

        def opened(requests: Requests) -> PretendedCarrier:
            carriers.append(PretendedCarrier(requests, sync.digests.__getitem__, mode == "pinned", seed, death))
            return carriers[-1]

        if mode == "in_flight":
            sync.carriers = carriers
        # unpinned responses stay with their engine until the next weights come, so there must be room for more
        slots = 6 if mode == "pinned" else 1000
        fleet = Fleet(engines, Limits(slots=slots, restarts=10_000), opened)
        return (sync.sampler if mode == "synchronous" else fleet), sync

    sampling.store_fleet = building.engine_and_sync = pretended
    if crash:
        die(crash)
    try:
        train.main(arguments)
    finally:
        for carrier in carriers:
            print(f"engines: {carrier.num_issued} issued, {carrier.num_deaths} died, closed: {carrier.is_closed}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5:])
