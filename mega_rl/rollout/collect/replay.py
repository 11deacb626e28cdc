"""Recorded rollouts in place of an engine, so that only the training side runs again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_rl.errors import InputError
from mega_rl.fleet import events
from mega_rl.fleet.executor import Requests, Whereabouts
from mega_rl.models.mixture import Mixture
from mega_rl.rollout.collect.records import read_step, trajectory_of_row
from mega_rl.rollout.engine import Request
from mega_rl.types import Prompt, Trajectory

MOST_STEPS = 16  # that are kept beside the newest; an older one would be read again


class Records:
    """What a run recorded, step by step.

    Args:
        directory: holds one file per step, as ``logging.dump_rollouts`` writes them.
        mixture: the experts of the model that learns; None if it has none.
    """

    def __init__(self, directory: Path, mixture: Mixture | None) -> None:
        self._directory, self._mixture = directory, mixture
        self._steps: dict[int, dict[tuple[int, int], Trajectory]] = {}  # step -> (prompt, sample) -> response

    def read(self, step: int) -> None:
        """Have what was sampled for a step, counted from 1; earlier ones are forgotten.

        Raises:
            InputError: no rollouts of that step were recorded.
        """
        # synchronous runs keep what is carried in both files
        groups = _groups(read_step(self._directory, step))
        own = [row for group in groups if _sampled_for(group) == step for row in group]
        of_step = {(t.prompt.index, t.sample_index): t for t in map(trajectory_of_row, own)}
        self._steps = {known: found for known, found in self._steps.items() if known >= step - MOST_STEPS}
        self._steps[step] = of_step

    def has_read(self, step: int) -> bool:
        return step in self._steps

    def has(self, step: int, request: Request) -> bool:
        """Whether it was sampled for a step that has been read; else its group ended in a later one."""
        return (request.prompt.index, request.sample_index) in self._steps.get(step, {})

    def find(self, step: int, request: Request) -> Trajectory:
        """The response to a request of a step that has been read.

        Raises:
            InputError: there is none, its pictures have changed, or it has not the experts that are asked for.
        """
        key = request.prompt.index, request.sample_index
        found = self._steps.get(step, {}).get(key)
        where = f"prompt {key[0]} at step {step}"
        if found is not None and (other := _other_picture(found.prompt, request.prompt, where)) is not None:
            raise InputError(f"rollout.replay={self._directory} has {other} when the run was recorded")
        if found is None or not _is_of(found, request.prompt):
            raise InputError(
                f"rollout.replay={self._directory} has no sample {key[1]} of {where}: replay "
                "with the data, data.seed, data.train_batch_size, rollout.n, rollout.mode and rollout.max_staleness of "
                "the recorded run"
            )
        if not request.with_routing:
            return dataclasses.replace(found, routed_experts=None)
        if found.routed_experts is None or not self._fits(found.routed_experts):
            what = "no experts" if found.routed_experts is None else "another model's experts"
            raise InputError(
                f"rollout.replay={self._directory} has {what} of sample {key[1]} of {where}: "
                "set rollout.routing_replay=off, or record with this model and rollout.routing_replay=rollout"
            )
        return found

    def _fits(self, routed_LMK: npt.NDArray[np.unsignedinteger[Any]]) -> bool:
        mixture = self._mixture
        if mixture is None or routed_LMK.shape[1:] != (len(mixture.layers), mixture.experts_per_token):
            return False
        ordered = np.sort(routed_LMK, axis=-1)
        return bool((ordered < mixture.num_experts).all() and (ordered[..., 1:] != ordered[..., :-1]).all())


class ReplayEngine:
    """A ``Sampler`` that answers with what a run recorded at the same step; it has no weights.

    Every response is the recorded one, so a run with the same configuration repeats the training of the recorded run
    bit for bit; rewards are computed again.
    """

    def __init__(self, directory: Path, mixture: Mixture | None, waits: bool = False) -> None:
        """
        Args:
            directory, mixture: as of ``Records``.
            waits: of responses that are not recorded at this step the groups ended in a later one: they are under way
                until they are taken out.
        """
        self._records = Records(directory, mixture)
        self._version, self._waits = 0, waits
        self._under_way: list[Request] = []  # that are recorded at this step
        self._waiting: list[Request] = []

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not self._is_later(request):
                self._find(request)

    def submit(self, requests: Sequence[Request]) -> None:
        self.check(requests)
        for request in requests:
            (self._waiting if self._is_later(request) else self._under_way).append(request)

    def step(self) -> list[Trajectory]:
        ended, self._under_way = [self._find(request) for request in self._under_way], []
        return ended

    def interrupt(self) -> tuple[list[Trajectory], list[Request]]:
        """As of ``ResumingSampler``; no tail gets any longer."""
        assert not self._under_way, "a response that is recorded at this step was not asked for"
        stopped, self._waiting = self._waiting, []
        return [], stopped

    def _is_later(self, request: Request) -> bool:
        return self._waits and not self._records.has(self._version + 1, request)

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        self.submit(requests)
        return self.step()

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        """Nobody may ask: there is no engine."""
        raise AssertionError("recorded responses have no engine that could be asked")

    def _find(self, request: Request) -> Trajectory:
        return self._records.find(self._version + 1, request)

    def turn_to(self, version: int) -> None:
        """Answer from now on with the rollouts of the step that trains the weights of ``version``.

        Raises:
            InputError: no rollouts of that step were recorded.
        """
        self._records.read(version + 1)
        self._version = version


def _groups(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The rows of each group: they stand side by side, by sample number."""
    group: list[Mapping[str, Any]] = []
    for row in rows:
        if group and not (
            row["prompt"]["index"] == group[0]["prompt"]["index"] and row["sample_index"] > group[-1]["sample_index"]
        ):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _sampled_for(group: Sequence[Mapping[str, Any]]) -> int:
    """The step, counted from 1, in which a group ended."""
    known: int | None = group[0].get("sampled_for")
    return max(row["weight_version"] for row in group) + 1 if known is None else known


class RecordedExecutor:
    """A ``FleetExecutor`` whose engines answer at once with what a run recorded for the same step."""

    def __init__(self, records: Records, requests: Requests) -> None:
        self._records, self._requests = records, requests
        self._said: list[events.Event] = []

    def carry(self, decision: events.Start | events.Kill | events.Release | events.Load | events.Issue) -> None:
        """As of ``FleetExecutor``; InputError if the records have no such step or sample."""
        if isinstance(decision, events.Start):
            self._said.append(events.Started(decision.engine, decision.life))
        elif isinstance(decision, events.Load):
            self._said.append(events.Loaded(decision.engine, decision.life, decision.version))
        elif isinstance(decision, events.Issue):
            self._answer(decision)

    def _answer(self, issue: events.Issue) -> None:
        step = issue.key.step + 1
        if not self._records.has_read(step):
            self._records.read(step)
        for sample, request in zip(issue.samples, self._requests(issue.key, issue.samples), strict=True):
            found = self._records.find(step, request)
            oldest = found.spans[0].version
            self._said.append(events.Answered(issue.engine, issue.life, issue.attempt, sample, oldest, found))

    def events(self, wait_s: float) -> list[events.Event]:
        """As of ``FleetExecutor``; there is never anything to wait for but the loop."""
        said, self._said = self._said, []
        if not said:
            time.sleep(wait_s)
        return said

    def reserve(self, engine: int) -> None:
        """Do nothing: there is no engine."""

    def has_room(self, engine: int) -> bool:
        return False

    def free(self) -> str:
        return "the responses of this run are recorded ones (rollout.replay), so no engine would make it faster"

    def whereabouts(self) -> dict[int, Whereabouts]:
        return {}

    def close(self) -> None:
        """Do nothing."""


def _other_picture(recorded: Prompt, prompt: Prompt, where: str) -> str | None:
    """What is wrong with the first picture whose digest or size is not the recorded one; None: all are the same.

    Args:
        where: the prompt and the step, for the sentence.
    """
    pairs = zip(recorded.images, prompt.images, strict=False)
    for number, (old, new) in enumerate(pairs, start=1):
        if old.key != new.key:
            if old.key.partition("-")[0] == new.key.partition("-")[0]:  # what stands before it is the file's digest
                return f"picture {number} of {where} in another size: set data.max_pixels as it was"
            return f"other pictures than the data: picture {number} of {where}; put its file back as it was"
    return None


def _is_of(recorded: Trajectory, prompt: Prompt) -> bool:
    """Whether it answers this prompt; one of an episode may have got further messages from its environment."""
    if recorded.episode is not None:
        return (recorded.prompt.ground_truth, recorded.prompt.data_source) == (prompt.ground_truth, prompt.data_source)
    return (recorded.prompt.token_ids, recorded.prompt.images) == (prompt.token_ids, prompt.images)
