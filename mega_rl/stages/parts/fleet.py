"""Where ``rollout.mode`` decides: the engines of a fleet, and what the steps of a run come from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.data.prompts import PromptStream
from mega_rl.errors import InputError
from mega_rl.fleet.engines import Limits
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.engine import ProbedSampler
from mega_rl.rollout.replay import RecordedCarrier, Records
from mega_rl.stages.parts.batch_builder import BatchBuilder, Batches
from mega_rl.stages.parts.fleet_batches import Fleet, FleetBatches
from mega_rl.stages.parts.session import Session
from mega_rl.stages.parts.weight_sync import Pushed, Sync


class RecordedFleetSync:
    """A ``Sync`` of recorded rollouts: nothing is sent."""

    def __init__(self, noise: AqnNoise) -> None:
        self._noise = noise

    def push(self, version: int, is_validation: bool = False) -> Pushed:
        assert not is_validation, "records hold no validation"
        return Pushed(version, self._noise.sigma(version))

    def end_sampling(self) -> None:
        """Do nothing: no memory was taken."""


def fleet_and_sync(session: Session, actor: MegatronEngine, noise: AqnNoise) -> tuple[Fleet, Sync]:
    """The engines of ``rollout.mode`` pinned and in_flight, and the sync that gives them the actor's weights."""
    config = session.config.rollout
    if config.replay is None:
        raise InputError(
            f"rollout.mode is {config.mode!r}, and this release has no engines that fetch weights by themselves: set "
            "it to synchronous"
        )
    session.say(f"rollout.replay: responses come from {config.replay}, there is no engine to validate with")
    records = Records(Path(config.replay), session.shape.mixture)
    return Fleet(config.num_engines, Limits(), partial(RecordedCarrier, records)), RecordedFleetSync(noise)


def batches(
    session: Session, prompts: PromptStream, engine: ProbedSampler | Fleet, scorer: Scorer, total_steps: int
) -> Batches:
    """What every step learns from. Collective."""
    config, timers, rendezvous, depot = session.config, session.timers, session.rendezvous, session.depot
    if isinstance(engine, Fleet):
        return FleetBatches(config, timers, prompts, engine, scorer, rendezvous, depot, total_steps)
    return BatchBuilder(config, session.engine_layout, timers, prompts, engine, scorer, rendezvous, depot)
