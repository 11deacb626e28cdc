"""Recorded rollouts in place of an engine, so that only the training side runs again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_rl.errors import InputError
from mega_rl.models.mixture import Mixture
from mega_rl.rollout.engine import Request
from mega_rl.rollout.records import read_step, trajectory_of_row
from mega_rl.types import Prompt, Trajectory


class ReplayEngine:
    """A ``Sampler`` that answers with what a run recorded at the same step; it has no weights.

    Every response is the recorded one, so a run with the same configuration repeats the training of the recorded run
    bit for bit; rewards are computed again.
    """

    def __init__(self, directory: Path, mixture: Mixture | None) -> None:
        """
        Args:
            directory: holds one file per step, as ``logging.dump_rollouts`` writes them.
            mixture: the experts of the model that learns; None if it has none.
        """
        self._directory, self._mixture = directory, mixture
        self._version = 0
        self._recorded: dict[tuple[int, int], Trajectory] = {}  # (prompt, sample) -> response, of the present version
        self._under_way: list[Request] = []

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._find(request)

    def submit(self, requests: Sequence[Request]) -> None:
        self.check(requests)
        self._under_way += requests

    def step(self) -> list[Trajectory]:
        ended, self._under_way = [self._find(request) for request in self._under_way], []
        return ended

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        self.submit(requests)
        return self.step()

    def first_logprobs(self, prompt_ids: Sequence[int], temperature: float) -> list[dict[int, float]]:
        """Of no engine."""
        return []

    def _find(self, request: Request) -> Trajectory:
        key = request.prompt.index, request.sample_index
        found = self._recorded.get(key)
        if found is None or not _is_of(found, request.prompt):
            raise InputError(
                f"rollout.replay={self._directory} has no sample {key[1]} of prompt {key[0]} at step "
                f"{self._version + 1}: replay with the data, data.seed, data.train_batch_size and rollout.n of the "
                "recorded run"
            )
        if not request.with_routing:
            return dataclasses.replace(found, routed_experts=None)
        if found.routed_experts is None or not self._fits(found.routed_experts):
            what = "no experts" if found.routed_experts is None else "another model's experts"
            raise InputError(
                f"rollout.replay={self._directory} has {what} of sample {key[1]} of prompt {key[0]} at step "
                f"{self._version + 1}: set rollout.routing_replay=off, or record with this model and "
                "rollout.routing_replay=rollout"
            )
        return found

    def _fits(self, routed_LMK: npt.NDArray[np.unsignedinteger[Any]]) -> bool:
        mixture = self._mixture
        if mixture is None or routed_LMK.shape[1:] != (len(mixture.layers), mixture.experts_per_token):
            return False
        ordered = np.sort(routed_LMK, axis=-1)
        return bool((ordered < mixture.num_experts).all() and (ordered[..., 1:] != ordered[..., :-1]).all())

    def turn_to(self, version: int) -> None:
        """Answer from now on with the rollouts that were sampled with the weights of ``version``.

        Raises:
            InputError: no rollouts of that version were recorded.
        """
        rows = [row for row in read_step(self._directory, version + 1) if row["weight_version"] == version]
        self._recorded = {(t.prompt.index, t.sample_index): t for t in map(trajectory_of_row, rows)}
        self._version = version


def _is_of(recorded: Trajectory, prompt: Prompt) -> bool:
    """Whether it answers this prompt; one of an episode may have got further messages from its environment."""
    if recorded.episode is not None:
        return (recorded.prompt.ground_truth, recorded.prompt.data_source) == (prompt.ground_truth, prompt.data_source)
    return recorded.prompt.token_ids == prompt.token_ids
