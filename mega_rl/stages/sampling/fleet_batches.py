"""What one step learns from where engines sample on while the trainer trains: ``rollout.mode`` pinned and in_flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.data.prompts import PromptStream
from mega_rl.errors import InputError
from mega_rl.evaluation.evaluate import AnsweredPrompt, ValidationSet, answered
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.executor import FleetExecutor, Requests
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.step_window import STATE_VERSION
from mega_rl.fleet.tickets import Rules
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import together
from mega_rl.parallel.sending import spread
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.collect.collect import FleetGroup, GroupSummary
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.scheduling.fleet_state import Scores, decoded, encoded
from mega_rl.rollout.scheduling.scheduler_thread import SchedulerThread
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.sampling.batch_builder import Batch, BusyTime, judged, staleness_metrics, teaches
from mega_rl.stages.sampling.ticket_requests import TicketRequests, TicketScoring
from mega_rl.stages.weights.engine_probe import Probe
from mega_rl.stages.weights.weight_sync import Sync
from mega_rl.types import Prompt

T = TypeVar("T")
SILENCE = 2.0  # times the longest limit of an engine: the scheduler has acted long before


@dataclass(frozen=True)
class Fleet:
    """Engines that only a scheduler speaks with."""

    num_engines: int
    limits: EngineLimits
    open: Callable[[Requests], FleetExecutor]  # starts nothing yet; called on rank 0
    probe: Probe  # is told of everything that is pushed for training


def rules_of(config: RunConfig, num_engines: int, num_prompts: int, total_steps: int) -> Rules:
    """What a run samples, in the scheduler's words."""
    rollout, settings, size = config.rollout, config.algorithm.dynamic_sampling, config.data.train_batch_size
    return Rules(
        num_groups=size,
        group_size=rollout.n,
        total_steps=total_steps,
        eta=rollout.max_staleness,
        is_pinned=rollout.mode == "pinned",
        # no prompt twice in a step
        budget=min(math.ceil(settings.budget * size), num_prompts) if settings.enabled else None,
        num_parts=min(rollout.n, -(-num_engines // size)),
    )


class FleetBatches:
    """``Batches`` of a fleet. Rank 0 has a scheduler in a thread, and owns all trajectories.

    Every group is of the step that it was sampled for; none is carried. A dropped group is replaced by a prompt of an
    order of the step's own (``BatchOrder.spare``), so that no step waits for the drops of the steps before it.
    """

    def __init__(
        self,
        job: SamplingJob,
        stream: PromptStream,
        fleet: Fleet,
        scorer: Scorer,
        total_steps: int,
        validation: ValidationSet | None = None,
    ) -> None:
        """``validation``: what validations ask; None: there are none."""
        self._config, self._timers, self._stream, self._fleet = job.config, job.timers, stream, fleet
        self._scorer, self._rendezvous, self._trajectory_store = scorer, job.rendezvous, job.trajectory_store
        self._rules = rules_of(job.config, fleet.num_engines, len(stream.dataset), total_steps)
        self._validation = validation
        # What the scheduler's thread calls, which reads nothing else of this object; both are frozen.
        self._requests = TicketRequests.of_run(job.config, self._rules, stream.batch_order, validation)
        self._scoring = TicketScoring(job.config, scorer, BusyTime())
        self._state: Mapping[str, Any] | None = None  # encoded, to go on from
        self._thread: SchedulerThread | None = None  # on rank 0, from the first step on
        self._done: list[GroupSummary] = []  # of the step before
        self._awaited: set[int] = set()  # versions of checkpoints that wait for their late part; on rank 0
        self._num_built = 0  # steps of the run so far
        self._published = 0  # the newest version that the scheduler knows of

    def build(self, step: int) -> Batch:
        """As of ``Batches``. The tokens of the step before are forgotten.

        Raises:
            InputError: on every rank, if no engine is left.
        """
        self._trajectory_store.drop(summary for group in self._done for summary in group.summaries)
        self._stream.next_batch()  # what the main tickets of this step draw
        found = self._on_first("sampling", partial(self._taken, step))
        ((kept, dropped, oldest),) = spread(found, [0])
        self._trajectory_store.forget_handed(oldest)
        self._timers.add("reward", self._scoring.busy_time.take())  # beside the sampling
        self._done, self._num_built = kept + dropped, step + 1
        figures = {
            "generated": len(kept) + len(dropped),
            "dropped": len(dropped),
            "kept": len(kept),
            "budget_exhausted": float(len(kept) < self._rules.num_groups),
        }
        metrics = {f"rollout/groups_{name}": float(value) for name, value in figures.items()}
        metrics |= staleness_metrics(step, kept) | ({} if self._thread is None else self._thread.record.figures())
        return Batch(kept, [], dropped, metrics, self._trajectory_store, sampled_for=step + 1)

    def validation(self, sync: Sync, version: int) -> list[AnsweredPrompt]:
        """As of ``Batches``, on rank 0. Engines go on with the steps in the air, the newest included, besides."""
        sync.push(version, is_validation=True)
        if version < self._rules.total_steps:
            self._fleet.probe.check(sync.push(version))  # for the step that may begin with it
        found = self._on_first("validation", partial(self._validated, version))
        sync.end_sampling()
        return found or []

    def _validated(self, version: int) -> list[AnsweredPrompt]:
        assert self._validation is not None, "a validation without prompts"
        prompts, settings = self._validation.prompts, self._validation.settings
        if self._thread is None:  # before the first step
            self._thread = self._started(version, num_drawn=version)
        self._thread.validate(version, len(prompts), settings.n + settings.is_greedy)
        self._publish(self._thread, version)
        groups = self._thread.validated(version)
        return [self._answered(prompts[key.ticket], group) for key, group in groups.items()]

    def _answered(self, prompt: Prompt, group: FleetGroup) -> AnsweredPrompt:
        assert self._validation is not None, "an answer to no validation"
        found = dict(enumerate(map(self._trajectory_store.whole, group.trajectories)))
        return answered(prompt, self._validation.settings, found, dict(enumerate(group.scores)))

    def _on_first(self, what: str, function: Callable[[], T]) -> T | None:
        """What a function returns on rank 0; None on the others, which wait for it. Raises on all what it raises."""
        failure: Exception | None = None
        found: T | None = None
        if dist.get_rank() == 0:
            try:
                found = function()
            except Exception as error:  # noqa: BLE001 - the other ranks must learn of it before it is raised again
                failure = error
        self._rendezvous.wait(what)
        with together(what):
            if failure is not None:
                raise failure
        return found

    def judged(self, batch: Batch) -> Batch:
        """As of ``Batches``."""
        return judged(batch, self._scorer)

    def close(self) -> None:
        """End the engines, wherever the run is."""
        self._trajectory_store.close_owners()
        if self._thread is not None:
            self._thread.close()

    def state_dict(self) -> LateState:
        """What gives the state after the last built step, when that is whole: see ``Commit``."""
        if self._thread is not None:
            self._thread.saved(self._num_built)
            self._awaited.add(self._num_built)
        rest = {"stream": self._stream.state_dict(), "carried": [], "rules": self._named_rules()}
        return LateState(self._thread, self._num_built, rest, self._trajectory_store, self._awaited)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, also by a synchronous run.

        Raises:
            InputError: it belongs to other data, or to other rules, whose samples do not fit these.
        """
        self._stream.load_state_dict(state["stream"])
        if "fleet" not in state:
            if self._rules.eta and self._rules.is_pinned:
                self._refuse("was written by a run with rollout.mode=synchronous")
            if state["carried"]:
                self._refuse("has groups that a run with rollout.mode=synchronous carried from step to step")
            if state.get("waiting"):
                self._refuse("has responses that a run with rollout.oversample above 1 was to go on with")
            return
        for name, value in self._named_rules().items():
            if state["rules"].get(name, value) != value:
                self._refuse(f"was written with {name}={state['rules'][name]}, and this run has {name}={value}")
        fleet = state["fleet"]
        missing = min(self._rules.eta, self._rules.total_steps - fleet["trained"]) - len(fleet["steps"])
        if self._rules.is_pinned and missing > 0:
            self._refuse(f"was written near the end of a run of fewer steps, and {missing} steps were not begun")
        if dist.get_rank() == 0:
            self._state = fleet

    def _refuse(self, why: str) -> NoReturn:
        raise InputError(
            f"the checkpoint {why}, so it has not the samples that rollout.mode={self._config.rollout.mode} with "
            f"rollout.max_staleness={self._rules.eta} goes on with: set these keys as they were, or start from the "
            "weights with another trainer.output_dir"
        )

    def _named_rules(self) -> dict[str, Any]:
        rollout, size = self._config.rollout, self._config.data.train_batch_size
        return {
            "rollout.mode": rollout.mode,
            "rollout.max_staleness": rollout.max_staleness,
            "rollout.n": rollout.n,
            "rollout.batch_invariant": rollout.batch_invariant,
            "rollout.routing_replay": rollout.routing_replay,
            "data.train_batch_size": size,
        }

    def _taken(self, step: int) -> tuple[list[GroupSummary], list[GroupSummary], int]:
        """The kept and the dropped groups of a step, on rank 0, with their tokens in the trajectory store.

        Then the oldest step of which a trajectory may still be asked for: a checkpoint may wait for later ones.
        """
        if self._thread is None:
            self._thread = self._started(step, num_drawn=step + 1)
        self._publish(self._thread, step)
        delivered = self._thread.take(step)
        kept, dropped = (
            [self._owned(group) for group in part.values()] for part in (delivered.kept, delivered.dropped)
        )
        return kept, dropped, min([step, *self._awaited])

    def _owned(self, group: FleetGroup) -> GroupSummary:
        return GroupSummary(tuple(map(self._trajectory_store.add, group.trajectories)), group.scores)

    def _publish(self, thread: SchedulerThread, version: int) -> None:
        if self._published < version < self._rules.total_steps:  # a scheduler whose steps are all trained ends
            thread.published(version)
            self._published = version

    def _started(self, step: int, num_drawn: int) -> SchedulerThread:
        """``num_drawn``: batches of the stream so far."""
        self._published = step
        state: Mapping[str, Any] = {"format": STATE_VERSION, "trained": step, "steps": {}}
        scores: Scores = {}
        if self._state is not None:
            state, scores = decoded(self._state)
            assert state["trained"] == step, f"a state of version {state['trained']} at step {step}"
            self._state = None
        elif not self._stream.is_after(num_drawn):
            self._refuse(f"is of a synchronous run whose {step} steps drew something else than {step} whole batches")
        fleet, settings = self._fleet, self._config.algorithm.dynamic_sampling
        is_kept = partial(teaches, self._config.algorithm) if settings.enabled else _keep_all
        limit_s = SILENCE * max(fleet.limits.start_s, fleet.limits.load_s, fleet.limits.progress_s)
        scheduler = FleetScheduler(self._rules, fleet.limits, range(fleet.num_engines), state)
        with HEART.waiting("room for the rollout engines", is_for_ranks=False):
            executor = fleet.open(self._requests)
        output_dir = Path(self._config.trainer.output_dir)
        thread = SchedulerThread(scheduler, executor, self._scoring.start, is_kept, scores, limit_s, output_dir)
        self._timers.watch = lambda phase, seconds: thread.record.of_trainer(phase, seconds, HEART.step)
        return thread


@dataclass(frozen=True)
class LateState:
    """What the checkpoint of a version holds of its data, once the steps in the air that it needs are sampled."""

    thread: SchedulerThread | None  # on rank 0
    version: int
    rest: Mapping[str, Any]  # what is known already
    trajectory_store: TrajectoryStore
    awaited: set[int]  # versions whose trajectories are kept until then

    def get_late(self, wait_s: float) -> dict[str, Any] | None:
        """As of ``Late``."""
        assert self.thread is not None, "rank 0 asks"
        found = self.thread.committed(self.version, wait_s)
        if found is None:
            return None
        data = {**self.rest, "fleet": encoded(*found, self.trajectory_store.whole)}
        self.awaited.discard(self.version)
        return data


def _keep_all(group: FleetGroup) -> bool:
    return True
