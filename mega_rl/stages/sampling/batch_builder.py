"""What one step learns from: prompts drawn, responses sampled and scored, groups without a signal replaced."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch.distributed as dist

from mega_rl.algorithms.advantage import dr_grpo_advantages, turn_advantages
from mega_rl.config import RunConfig
from mega_rl.config.checks.modes import mixed_problems, tail_problems
from mega_rl.config.schema.sections import AlgorithmConfig, DynamicSamplingConfig
from mega_rl.data.prompts import PromptStream
from mega_rl.errors import InputError
from mega_rl.evaluation.evaluate import AnsweredPrompt, ValidationSet, evaluate
from mega_rl.megatron.checkpoint.saving import Late
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.collect.collect import FleetGroup, GroupSummary, PromptGroup, Quota, Round
from mega_rl.rollout.collect.partial_groups import PartialGroups, begun_of_rows
from mega_rl.rollout.collect.records import to_group, to_rows
from mega_rl.rollout.collect.replicas import collect_everywhere, engine_ranks
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.engine import ProbedSampler, Request
from mega_rl.rollout.requests import make_requests
from mega_rl.stages.learn.learning import rewards_of_turns
from mega_rl.stages.run.episodes import without_reward
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.weights.weight_sync import Sync
from mega_rl.types import Prompt, Response, Score, Trajectory

# What to do about a checkpoint whose responses cannot go on.
ON_RESUME = "remove the key, or start from the checkpoint's weights with another trainer.output_dir"
Scored = TypeVar("Scored", bound=Response)
ROUNDING = 1e-9  # in units of the reward: sums of the same rewards of turns in another order differ by less


@dataclass(frozen=True)
class Batch:
    """The groups of one step."""

    learnt: list[GroupSummary]  # that the step learns from: carried ones first, then in the order of their prompts
    carried: list[GroupSummary]  # kept ones above ``data.train_batch_size``: the next step's first
    dropped: list[GroupSummary]  # whose samples all have the same reward
    metrics: Mapping[str, float]
    trajectory_store: TrajectoryStore  # where the tokens of all of them are to be had
    # The step, from 1, that all of them were sampled for, where the weights may be older; None: that of their version.
    sampled_for: int | None = None

    @property
    def generated(self) -> list[GroupSummary]:
        """Everything that the step sampled or took over."""
        return [group for groups in self.by_outcome.values() for group in groups]

    @property
    def by_outcome(self) -> dict[str, list[GroupSummary]]:
        return {"learnt": self.learnt, "carried": self.carried, "dropped": self.dropped}


class Batches(Protocol):
    """Where the groups of every step come from; what a checkpoint holds of it is as of a ``Source``."""

    def build(self, step: int) -> Batch:
        """The groups of one step, after the push of the weights that it trains. Collective."""
        ...

    def judged(self, batch: Batch) -> Batch:
        """The batch with the scores of a reward model, if there is one; the engines sleep by then. Collective."""
        ...

    def validation(self, sync: Sync, version: int) -> list[AnsweredPrompt]:
        """The held-out prompts with the answers of the trainer's exact weights, each on one rank. Collective."""
        ...

    def state_dict(self) -> dict[str, Any] | Late: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Sample no more; not collective."""
        ...


class BatchBuilder:
    """Turns the prompt stream into scored groups; the same on every rank.

    Which groups a step has does not depend on the engines' layout, nor on their speed, unless ``rollout.oversample`` is
    above 1.

    With ``algorithm.dynamic_sampling`` (DAPO, arXiv 2503.14476, section 3.2) a group whose samples all have the same
    reward teaches nothing and is replaced by the next prompt's group, while others are still being sampled. A step that
    used up its budget learns from the groups that it has.

    With ``rollout.oversample`` a step ends when enough groups are there; the next one goes on with the others first.
    """

    def __init__(
        self,
        job: SamplingJob,
        stream: PromptStream,
        engine: ProbedSampler,
        scorer: Scorer,
        validation: ValidationSet | None = None,
    ) -> None:
        """Collective over all ranks. ``validation``: what validations ask; None: there are none."""
        layout = job.engine_layout
        self._config, self._layout, self._timers = job.config, layout, job.timers
        self._stream, self._engine, self._scorer = stream, engine, scorer
        self._is_leader = layout.tensor_rank(dist.get_rank()) == 0
        self._ranks = engine_ranks(layout, job.config.trainer.collective_timeout_s)
        self._rendezvous = job.rendezvous
        self._scoring_time = BusyTime()
        self._trajectory_store, self._validation = job.trajectory_store, validation
        self._carried: list[GroupSummary] = []
        self._tails = PartialGroups(layout, dist.get_rank())
        self._done: list[GroupSummary] = []  # of the step before, whose tokens are still here

    def build(self, step: int) -> Batch:
        """The groups of one step; collective. The tokens of the step before that were not carried are forgotten."""
        self._trajectory_store.drop(summary for group in self._done for summary in group.summaries)
        config, carried, quota = self._config, self._carried, self._quota()
        self._scoring_time.take()  # since the last step, beside the training: members of groups that wait
        found = self._found(step, quota) if quota.num_initial else []
        self._timers.add("reward", self._scoring_time.take())  # beside the sampling
        dropped = [group for group in found if not quota.is_kept(group)]
        kept = carried + [group for group in found if quota.is_kept(group)]
        wanted = config.data.train_batch_size
        if len(kept) < wanted and not self._settings.enabled:
            raise InputError(
                f"rollout.replay={config.rollout.replay} has {len(kept)} of the {wanted} groups of step {step + 1}: "
                "replay with the data, the seeds, data.train_batch_size and rollout.oversample of the recorded run"
            )
        self._carried, self._done = kept[wanted:], kept[:wanted] + dropped
        is_short = self._settings.enabled and len(kept) < wanted
        figures = {
            "generated": len(found),
            "dropped": len(dropped),
            "kept": len(kept[:wanted]),
            "carried_in": len(carried),
            "carried_out": len(self._carried),
            "budget_exhausted": float(is_short),
        }
        metrics = {f"rollout/groups_{name}": float(value) for name, value in figures.items()}
        if config.rollout.oversample > 1 and config.rollout.replay is None:  # records hold no tails
            metrics |= {f"rollout/{name}": value for name, value in self._tails.figures().items()}
        metrics |= staleness_metrics(step, kept[:wanted])
        return Batch(kept[:wanted], self._carried, dropped, metrics, self._trajectory_store)

    def _found(self, step: int, quota: Quota) -> list[GroupSummary]:
        """The groups that end in a step, in the order of tickets: those that waited first; collective."""
        config, tails, trajectory_store = self._config, self._tails, self._trajectory_store
        # A whole batch of the stream is drawn only where a step samples one.
        one_by_one = self._settings.enabled or config.rollout.oversample > 1 or bool(tails) or bool(self._carried)
        prompts = _Tickets(self._stream, one_by_one, [place.prompt_index for place in tails.places])

        def draw(ticket: int) -> list[Request]:
            return make_requests(
                [prompts[ticket]],
                n=config.rollout.n,
                step=step,
                seed=config.trainer.seed,
                max_tokens=config.data.max_response_length,
                temperature=config.rollout.temperature,
                with_routing=config.rollout.routing_replay == "rollout",
            )

        store, ranks = self._rendezvous.store, self._ranks
        of_step = Round(step, quota, draw, self._start_scoring, store, self._is_leader, ranks, tails.own())
        shares = tails.shares(quota.num_initial - len(tails), config.rollout.n)
        found = collect_everywhere(self._engine, self._layout, of_step, shares, self._rendezvous, trajectory_store)
        prompts.finish(len(found.groups) + len(found.waiting))
        tails.replace(found.waiting, found.own)
        return found.groups

    def judged(self, batch: Batch) -> Batch:
        """As of ``Batches``."""
        batch = judged(batch, self._scorer)
        self._carried = batch.carried
        return batch

    def validation(self, sync: Sync, version: int) -> list[AnsweredPrompt]:
        """As of ``Batches``."""
        asked, mine = self._validation, list[AnsweredPrompt]()
        assert asked is not None, "a validation without prompts"
        sync.push(version, is_validation=True)
        evaluate(self._engine, self._scorer, asked.prompts, asked.settings, mine.append, self._rendezvous)
        sync.end_sampling()
        return mine

    def close(self) -> None:
        """Do nothing: its engines end with their processes."""

    def _start_scoring(self, trajectory: Trajectory) -> Future[Score]:
        self._scoring_time.begin()
        score = self._scorer.start(to_score(self._config, trajectory))
        score.add_done_callback(lambda _: self._scoring_time.end())
        return score

    @property
    def _settings(self) -> DynamicSamplingConfig:
        return self._config.algorithm.dynamic_sampling

    def _quota(self) -> Quota:
        config, settings, size = self._config, self._settings, self._config.data.train_batch_size
        oversample, num_waiting = config.rollout.oversample, len(self._tails)
        if not settings.enabled and oversample == 1 and not num_waiting and not self._carried:
            return Quota(size, size, size, is_kept=lambda group: True)
        missing = max(0, size - len(self._carried))
        is_kept = partial(teaches, config.algorithm) if settings.enabled else lambda group: True
        factor = max(oversample, settings.oversample if settings.enabled else 1.0)
        initial = max(num_waiting, math.ceil(factor * size) - len(self._carried)) if missing else 0
        most = math.ceil((settings.budget if settings.enabled else factor) * size)
        budget = max(num_waiting, min(most, len(self._stream.dataset)))  # no prompt twice in a step
        return Quota(missing, min(initial, budget), budget, is_kept, self._stops_at())

    def _stops_at(self) -> Literal["never", "ended", "kept", "idle"]:
        if self._config.rollout.oversample == 1:
            return "never"
        if self._config.rollout.replay is not None:  # the recorded step has stopped already
            return "idle"
        return "kept" if self._settings.enabled else "ended"

    def state_dict(self) -> dict[str, Any]:
        """Where the next step goes on: plain values. Collective; on rank 0, the others have no groups."""
        groups = self._trajectory_store.groups_to_first(self._carried)
        state = {"stream": self._stream.state_dict(), "carried": [to_rows(group) for group in groups]}
        return state | ({"waiting": self._tails.to_first()} if self._tails else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; raises InputError if it belongs to other data."""
        self._stream.load_state_dict(state["stream"])
        groups = [to_group(rows) for rows in state["carried"]]
        if self._config.rollout.routing_replay != "rollout":  # the run that saved them may have replayed
            groups = [_without_routing(group) for group in groups]
        summaries = iter(
            self._trajectory_store.adopt([trajectory for group in groups for trajectory in group.trajectories])
        )
        self._carried = [GroupSummary(tuple(islice(summaries, len(group.scores))), group.scores) for group in groups]
        waiting = state.get("waiting", [])
        found: list[str] = []
        if waiting:
            found += tail_problems(self._config, "the checkpoint has responses that were begun", ON_RESUME)
        if any(len(summary.versions) > 1 for group in self._carried for summary in group.summaries):
            found += mixed_problems(self._config, "the checkpoint has responses that weights of several steps sampled")
        if found:
            raise InputError(found[0])
        self._tails.adopt([begun_of_rows(rows, self._begun_request) for rows in waiting])

    def _begun_request(self, prompt: Prompt, sample_index: int, seed: int, tail: Trajectory | None) -> Request:
        """One of a checkpoint, which goes on as the configuration says now."""
        config = self._config
        limit, num_sampled = config.data.max_response_length, 0 if tail is None else tail.num_sampled
        if num_sampled >= limit:
            raise InputError(
                f"data.max_response_length is {limit}, but the checkpoint has a response that was begun with "
                f"{num_sampled} tokens: set it to more"
            )
        return Request(prompt, sample_index, seed, limit, config.rollout.temperature, tail=tail)


def judged(batch: Batch, scorer: Scorer) -> Batch:
    """The batch with the scores of the scorer's reward model, if it has one. Collective."""
    if scorer.collective is None:
        return batch
    groups = batch.generated
    summaries = [summary for group in groups for summary in group.summaries]
    found = iter(
        scorer.collective.complete(
            summaries, [score for group in groups for score in group.scores], batch.trajectory_store
        )
    )
    learnt, carried, dropped = (
        [replace(group, scores=tuple(islice(found, len(group.scores)))) for group in part]
        for part in batch.by_outcome.values()
    )
    return replace(batch, learnt=learnt, carried=carried, dropped=dropped)


def to_score(config: RunConfig, trajectory: Scored) -> Scored:
    """What is scored of a trajectory: of an episode that a limit has ended perhaps without its reward."""
    if (episode := trajectory.episode) is None or config.environment.unfinished != "leave_out":
        return trajectory
    return replace(trajectory, episode=without_reward(episode))


def teaches(algorithm: AlgorithmConfig, group: FleetGroup | GroupSummary) -> bool:
    """Whether the rewards of a group differ; dynamic sampling replaces it if they do not."""
    if algorithm.credit == "turn":
        return has_signal_by_turn(group.scores, group.num_turns, algorithm.turn_discount)
    return has_signal(algorithm.dynamic_sampling.metric, group.scores)


def has_signal(metric: str | None, scores: Sequence[Score]) -> bool:
    """Whether a group's samples with a known reward differ in it.

    Args:
        metric: the part of it that counts instead, where the data source of the group has that reward.
    """
    known = [score for score in scores if score.is_known]
    values = {score.value if metric is None else score.parts.get(metric, score.value) for score in known}
    return len(values) > 1


def has_signal_by_turn(scores: Sequence[Score], num_turns: Sequence[int], discount: float) -> bool:
    """Whether samples with a known reward differ in the return of a turn that several of the group have come to.

    Args:
        num_turns: of every sample.
        discount: ``algorithm.turn_discount``.
    """
    rewards = [rewards_of_turns(number, score) for number, score in zip(num_turns, scores, strict=True)]
    advantages = turn_advantages(dr_grpo_advantages, rewards, [0] * len(rewards), discount)
    return any(abs(advantage) > ROUNDING for of_sample in advantages for advantage in of_sample)


def staleness_metrics(step: int, groups: Sequence[GroupSummary]) -> dict[str, float]:
    """How many steps older than the trained ones the weights are that sampled the tokens; ``step`` counts from 0."""
    ages = [summary.staleness(step) for group in groups for summary in group.summaries]
    if not any(map(len, ages)):
        return {}
    all_ages = np.concatenate(ages)
    return {"rollout/staleness_mean": float(all_ages.mean()), "rollout/staleness_max": float(all_ages.max())}


def _without_routing(group: PromptGroup) -> PromptGroup:
    return replace(group, trajectories=tuple(replace(t, routed_experts=None) for t in group.trajectories))


class BusyTime:
    """Seconds in which at least one of several things was under way; they begin and end in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open, self._seen_s, self._seconds = 0, 0.0, 0.0

    def begin(self) -> None:
        with self._lock:
            self._look()
            self._num_open += 1

    def end(self) -> None:
        with self._lock:
            self._look()
            self._num_open -= 1

    def take(self) -> float:
        """The seconds since the last call of this method, also of what is still under way."""
        with self._lock:
            self._look()
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def _look(self) -> None:
        """Add the time since the last look; with the lock."""
        now = time.perf_counter()
        if self._num_open:
            self._seconds += now - self._seen_s
        self._seen_s = now


class _Tickets:
    """Prompts by ticket, drawn as one whole batch or one by one, each at most once; drawing moves the stream on.

    Args:
        waiting: the prompts, by their indices, of groups that were begun before: theirs are the first tickets.
    """

    def __init__(self, stream: PromptStream, one_by_one: bool, waiting: Sequence[int]) -> None:
        self._stream, self._num_waiting = stream, len(waiting)
        self._drawn: list[Prompt] = []
        self._source = self._one_by_one(set(waiting)) if one_by_one else iter(stream.next_batch())

    def __getitem__(self, ticket: int) -> Prompt:
        place = ticket - self._num_waiting
        assert place >= 0, "a group that was begun before has its prompt"
        while len(self._drawn) <= place:
            self._drawn.append(next(self._source))
        return self._drawn[place]

    def finish(self, num_tickets: int) -> None:
        """Leave the stream behind the last ticket that any engine drew."""
        if num_tickets > self._num_waiting:
            self[num_tickets - 1]
        assert len(self._drawn) == num_tickets - self._num_waiting, "this rank drew a ticket that nobody sampled"

    def _one_by_one(self, seen: set[int]) -> Iterator[Prompt]:
        while True:
            prompt = self._stream.next_item()
            if prompt.index not in seen:
                seen.add(prompt.index)
                yield prompt
