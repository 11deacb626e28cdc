"""The reward named ``model``: the value that a frozen reward model gives to a whole trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from mega_rl.algorithms.value import values_at_ends
from mega_rl.config.checks.environment import ENVIRONMENT
from mega_rl.config.schema.sources import claims
from mega_rl.errors import InputError
from mega_rl.megatron.reference import Frozen
from mega_rl.microbatch import Sequence as TrainingSequence
from mega_rl.parallel.collectives import placed
from mega_rl.rewards.scorer import WeightedReward
from mega_rl.stages.models.values import scored_at_end
from mega_rl.stages.run.batch_share import BatchShare, pack_brought
from mega_rl.types import Score, TokenSource, TrajectorySummary, TrajectoryTokens


class RewardModel:
    """A ``CollectiveReward``: it scores all trajectories of a step at once, when the engine sleeps.

    Args:
        reward: what its part of a score is called, and how much it weighs.
        model: with a value head; its tokenizer is the policy's.
        share: this rank's share of the trajectories.
    """

    def __init__(self, reward: WeightedReward, model: Frozen, share: BatchShare) -> None:
        self._reward, self._model, self._share = reward, model, share

    def scores(self, source: str) -> bool:
        """See ``CollectiveReward.scores``."""
        return claims(self._reward.only, source)

    def complete(
        self, summaries: Sequence[TrajectorySummary], scores: Sequence[Score], source: TokenSource
    ) -> list[Score]:
        """As ``CollectiveReward.complete``; the reward that an environment gave stays what it is.

        Raises:
            InputError: a value is not finite.
        """
        name, weight = self._reward.name, self._reward.weight
        wanted = [
            place
            for place, (summary, score) in enumerate(zip(summaries, scores, strict=True))
            if self.scores(summary.data_source) and not {name, ENVIRONMENT} & score.parts.keys()
        ]
        values = self._values([summaries[place] for place in wanted], source)
        found = list(scores)
        for place, value in zip(wanted, values, strict=True):
            parts = {**found[place].parts, name: value}
            found[place] = replace(found[place], value=found[place].value + weight * value, parts=parts)
        return found

    def _values(self, summaries: Sequence[TrajectorySummary], source: TokenSource) -> list[float]:
        if not summaries:
            return []

        def sequence(place: int, tokens: TrajectoryTokens) -> TrainingSequence:
            return scored_at_end(torch.from_numpy(tokens.token_ids.astype(np.int64)))

        lengths = [summary.num_tokens for summary in summaries]  # every token is looked at, the last one too
        microbatches = pack_brought(self._share, summaries, lengths, source, sequence)
        own: dict[int, float] = {}
        with self._model.on_device() as model:
            for microbatch, values_T in zip(microbatches, model.token_values(microbatches), strict=True):
                values = values_at_ends(values_T, microbatch).tolist()
                own |= dict(zip(microbatch.sequence_indices, values, strict=True))
        is_counted = self._share.is_counted and self._share.is_last_stage
        found = placed(own if is_counted else {}, len(summaries))
        if not np.isfinite(found).all():
            raise InputError(
                f"the reward {self._reward.name} gives values that are not finite: give another reward model"
            )
        return found
