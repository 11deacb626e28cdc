"""Before a token is learnt: every engine's log-probabilities are those of the distribution that it samples from."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.temperature_probe import (
    PROBE_TEMPERATURE,
    Probed,
    is_sampled_from,
    measured_temperatures,
    probe_prompt,
)
from mega_rl.stages.weights.delivery import Delivery
from mega_rl.stages.weights.weight_sync import Pushed


class EngineProbe:
    """What is asked of the engines after a push and before anything is sampled; see ``probe_engines``, ``Delivery``."""

    def __init__(
        self, engine: Probed, layout: EngineLayout, vocab_size: int, config: RunConfig, say: Callable[[str], None]
    ) -> None:
        self._engine, self._layout, self._vocab_size, self._config, self._say = engine, layout, vocab_size, config, say
        self._delivery = Delivery(engine, layout, vocab_size, config, say)
        self._is_first = True

    def check(self, pushed: Pushed) -> None:
        """Collective; InputError and GateFailure on every rank."""
        if self._is_first:
            probe_engines(self._engine, self._layout, self._vocab_size, self._config.rollout, self._say)
        self._is_first = False
        self._delivery.check(pushed)


def probe_engines(
    engine: Probed, layout: EngineLayout, vocab_size: int, rollout: RolloutConfig, say: Callable[[str], None]
) -> None:
    """Measure every engine once it has its weights, after a start, a resume or a replacement. Collective.

    Args:
        rollout: of which ``temperature`` counts. At 1 raw log-probabilities are right too, and are only told of.

    Raises:
        InputError: on every rank, if an engine returns log-probabilities of another distribution than it samples from.
    """
    measured = measured_temperatures(engine, probe_prompt(vocab_size))
    # the other tensor-parallel ranks of an engine have asked the same engine
    parts = gather_objects(measured if layout.tensor_rank(dist.get_rank()) == 0 else [])
    engines = [of_engine for part in parts for of_engine in part]
    if any(of_engine is None for of_engine in engines):
        say("the model finds all tokens alike, so that the temperature of its log-probabilities cannot be probed")
    for number, of_engine in enumerate(engines):
        if is_sampled_from(of_engine):
            continue
        found = (
            f"rollout engine {number} returns log-probabilities of another distribution than it samples from (asked "
            f"for temperature {PROBE_TEMPERATURE:g}, they show {of_engine:.3g})"
        )
        if rollout.temperature != 1.0:
            raise InputError(
                f"{found}, so rollout.temperature={rollout.temperature:g} would give wrong importance weights: set "
                "rollout.temperature=1, or use an engine whose sampler obeys logprobs_mode=processed_logprobs."
            )
        say(f"warning: {found}; at rollout.temperature=1 this changes nothing")
