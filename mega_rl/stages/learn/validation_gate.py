"""Answers of a validation against the trainer, where training samples with older weights than it learns with.

Of those samples no token is of the trainer's present weights, so that the engine gate can measure them by what the
steps before showed alone. The answers of a validation are: engines have their weights, and so has the trainer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice, zip_longest

import torch

from mega_rl.config import RunConfig
from mega_rl.errors import GateFailure
from mega_rl.evaluation.evaluate import RowSummary
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.parallel.collectives import broadcast_list, is_first, numbers_to_first, told_numbers
from mega_rl.stages.learn.engine_distance import (
    Distance,
    EngineHistory,
    Group,
    TooFar,
    added,
    distances,
    of_numbers,
    to_numbers,
    too_far,
)
from mega_rl.stages.learn.gates import hints_of, report_engines, tolerances
from mega_rl.stages.learn.learning import pack_samples
from mega_rl.stages.run.batch_share import BatchShare
from mega_rl.types import Sample, TokenSource

MAX_ANSWERS = 64  # of a validation that are compared, in turn of all engines
VALIDATION_TOKENS, VALIDATION_DIFF = "gates/validation_tokens", "gates/validation_diff"


class ValidationGate:
    """Compares what engines say of the tokens of a validation with what the trainer says of them.

    Args:
        config: says how closely, and at which temperatures both speak.
        share: of the trainer's ranks; its pictures are those of the validation's prompts.
        actor: computes the log-probabilities.
        say: tells the user.
    """

    def __init__(self, config: RunConfig, share: BatchShare, actor: MegatronEngine, say: Callable[[str], None]) -> None:
        self._config, self._share, self._actor, self._say = config, share, actor, say
        self._history = EngineHistory(config.trainer.gates.engine_factor)
        self._is_told, self._num_validations = False, 0

    def check(self, rows: Sequence[RowSummary], source: TokenSource, step: int) -> dict[str, float]:
        """Metrics of what was compared. Collective.

        Args:
            rows: of the validation after ``step`` finished steps, the same on every rank.
            source: has their tokens.

        Raises:
            GateFailure: on every rank, if an engine is too far away and the engine gate is not disabled.
        """
        chosen = self._chosen(rows)
        if not chosen:
            self._tell_once()
            return {VALIDATION_TOKENS: 0.0}
        found, far = self._measured([Sample(row.summary, row.score, 0.0) for row in chosen], source)
        if far:
            lines = report_engines(far, is_alone=True, hint=hints_of(self._config, None)["engine"])
            raise GateFailure("\n".join([f"the validation after step {step} is not what it must be", *lines]))
        self._history.add(found.mean, 0.0)
        return {VALIDATION_TOKENS: float(found.num_tokens), VALIDATION_DIFF: found.mean}

    def _chosen(self, rows: Sequence[RowSummary]) -> list[RowSummary]:
        """Those with log-probabilities of the trainer's temperature, in turn of engines; others with every call."""
        temperature = self._config.rollout.temperature
        is_sampled_alike = self._config.validation.temperature == temperature
        by_engine: dict[int, list[RowSummary]] = defaultdict(list)
        for row in rows:
            # A greedy answer's are of temperature 1.
            is_comparable = temperature == 1.0 if row.is_greedy else is_sampled_alike
            if is_comparable and row.summary.engine is not None and row.summary.num_sampled:
                by_engine[row.summary.engine].append(row)
        engines = sorted(by_engine)
        first = MAX_ANSWERS * self._num_validations % max(1, len(engines))
        self._num_validations += 1
        in_turn = zip_longest(*(by_engine[engine] for engine in engines[first:] + engines[:first]))
        return list(islice((row for rows in in_turn for row in rows if row is not None), MAX_ANSWERS))

    def _measured(self, samples: Sequence[Sample], source: TokenSource) -> tuple[Distance, list[TooFar]]:
        """The distance of all tokens, and the engines that are too far away. Collective."""
        microbatches = pack_samples(self._share, samples, source)
        own: dict[Group, Distance] = {}
        for microbatch, stats in zip(microbatches, self._actor.token_stats(microbatches), strict=True):
            if self._share.is_counted and self._share.is_last_stage:
                assert microbatch.rollout_logprobs is not None, "answers have the engine's log-probabilities"
                ages_T = torch.where(microbatch.loss_mask.cpu() != 0, 0, -1)
                found = distances(stats.logprobs, microbatch.rollout_logprobs, microbatch, samples, ages_T)
                own = added([own, found])
        by_engine = added(map(of_numbers, numbers_to_first(to_numbers(own))))
        far = list[TooFar]()
        if is_first() and "engine" not in self._config.trainer.gates.disabled:
            allowed = max(tolerances(self._config)["engine"], self._history.allows(0.0) or 0.0)
            far = too_far(by_engine, {0: allowed})
        every = of_numbers(told_numbers(to_numbers(added([by_engine], lambda group: Group(None, 0)))))
        return every[Group(None, 0)], broadcast_list(far)

    def _tell_once(self) -> None:
        if not self._is_told:
            self._is_told = True
            config = self._config
            self._say(
                "the answers of validations are not compared with the trainer: they are sampled at "
                f"validation.temperature={config.validation.temperature:g}, and the trainer computes at "
                f"rollout.temperature={config.rollout.temperature:g}"
            )


def validation_gate(
    config: RunConfig, share: BatchShare, actor: MegatronEngine, say: Callable[[str], None]
) -> ValidationGate | None:
    """None where the engine gate compares tokens of the present weights in every step."""
    is_stale = config.rollout.mode != "synchronous" and config.rollout.max_staleness > 0
    return ValidationGate(config, share, actor, say) if is_stale and config.rollout.replay is None else None
