"""Every guard in every mode, in a fresh run and in a resumed one: an engine that is wrong is named before a token of it
is learnt.

Engines are pretended; what guards them is real: the scheduler in its thread, the executor of a fleet, the checks of an
engine's life and the gates of every step. One of two engines is wrong. A wrong token has an id of its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.config import RunConfig
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import GateFailure, InputError
from mega_rl.fleet.engines import EngineLimits
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.microbatch import Microbatch, TokenStats
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.engine import Request
from mega_rl.rollout.engine_checks import CheckPlan, FleetChecks
from mega_rl.rollout.remote.engine_process import LoadResult
from mega_rl.rollout.remote.sink import remote_sink
from mega_rl.rollout.remote.weight_store import StoredVersion, WantedVersion
from mega_rl.rollout.scheduling.fleet_state import decoded, encoded
from mega_rl.rollout.scheduling.scheduler_thread import SchedulerThread
from mega_rl.stages.learn.gate_watch import GateWatch
from mega_rl.stages.weights.engine_probe import EngineProbe, FleetProbe
from mega_rl.stages.weights.weight_sync import Pushed
from mega_rl.types import Prompt, Sample, Score, Span, Trajectory
from tests.pretended.owners import not_handed
from tests.pretended.remote.fake_ray import PROOFS, FakeRay, Worker, executor_on
from tests.pretended.tokens import first_logprobs
from tests.unit.rollout.test_sinks import SHAPE, Worker as LoadedWorker, elsewhere, load_proof, swapped_halves, weights

Mode = Literal["synchronous", "pinned", "in_flight"]
MODES: tuple[Mode, ...] = ("synchronous", "pinned", "in_flight")
STARTS = ("fresh", "resumed")
RAW = r"rollout engine 1 returns log-probabilities of another distribution than it samples from .* they show 1\)"
FAR = r"engine: mean \|trainer - engine\| of the \d+ tokens of rollout engine 1 is \S+, and \S+ is allowed"
SWAPPED = (
    r"cannot write \S+\.gate_proj\.weight, of which (the engine on rank|engine) 1 holds other values than model\.path"
)
# What is wrong with engine 1 -> how a run with it ends, and in how many steps wrong tokens may have been learnt.
FAULTS: dict[str, tuple[type[Exception] | None, str, int]] = {
    "nothing": (None, "", 0),
    "swaps gate and up": (InputError, SWAPPED, 0),
    "raw log-probabilities": (InputError, RAW, 0),
    "old adapters": (GateFailure, "rollout engine 1 answers with weight version .* bit for bit as with version", 0),
    "adapters left out": (GateFailure, "rollout engine 1 answers with weight version .* bit for bit as without its", 0),
    "shifts by 0.3 nats": (GateFailure, FAR, 2),
    "late and swaps": (InputError, SWAPPED, 0),
    "late and raw": (InputError, RAW, 0),
    "late and shifted": (GateFailure, FAR, 0),
}
CELLS = [(fault, mode, start) for fault in FAULTS for mode in MODES for start in STARTS]
RESUMED_AT, TOTAL, LENGTH, ETA = 4, 9, 60, 1
RIGHT, WRONG = 5, 9  # ids of tokens


def logprob(version: int) -> float:
    """Of every token, under the weights of a version."""
    return -1.0 - 0.01 * version


@dataclass
class Faults:
    """What engine 1 does."""

    fault: str
    first: int  # step of the process
    step: int = 0  # that the trainer is at
    was_lost: bool = False  # the engine, which has been started again

    @property
    def begins(self) -> bool:
        """Whether what begins in the middle of a run has begun."""
        return self.step >= max(3, self.first)

    def swaps(self, engine: int, is_late: bool) -> bool:
        """Whether its kernel has the halves of a weight the other way round, once the weight is loaded."""
        return engine == 1 and (self.fault == "swaps gate and up" or (self.fault == "late and swaps" and is_late))

    def answers(self, engine: int, is_late: bool, version: int, question: tuple[Any, float, bool]) -> dict[int, float]:
        """As of ``first_logprobs``."""
        prompt_ids, temperature, with_adapter = question
        is_raw = self.fault == "raw log-probabilities" or (self.fault == "late and raw" and is_late)
        if engine == 1 and self.fault == "old adapters":
            version = self.first
        if not with_adapter or (engine == 1 and self.fault == "adapters left out"):
            version = 0
        return first_logprobs(version, prompt_ids, 1.0 if engine == 1 and is_raw else temperature)

    def token(self, engine: int, is_late: bool, version: int) -> tuple[int, float]:
        """Its id and its log-probability."""
        if engine != 1 or self.fault == "nothing":
            return RIGHT, logprob(version)
        if self.fault == "shifts by 0.3 nats":
            return (WRONG, logprob(version) + 0.3) if self.begins else (RIGHT, logprob(version))
        if self.fault == "late and shifted":
            return (WRONG, logprob(version) + 0.5) if is_late else (RIGHT, logprob(version))
        if self.fault == "old adapters":
            return (RIGHT if version == self.first else WRONG), logprob(version)
        if self.fault == "adapters left out":
            return (WRONG if version else RIGHT), logprob(version)
        is_wrong = is_late or self.fault in ("raw log-probabilities", "swaps gate and up")
        return WRONG if is_wrong else RIGHT, logprob(version)


def trajectory_of(request: Request, tokens: Sequence[tuple[int, float, int]]) -> Trajectory:
    """``tokens``: ids, log-probabilities, versions."""
    ids, logprobs, versions = zip(*tokens, strict=True)
    whole = Trajectory.single_turn(request.prompt, request.sample_index, ids, logprobs, "", "stop", versions[0])
    start = len(request.prompt.token_ids)
    changes = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    return dataclasses.replace(whole, spans=tuple(Span(start + i, versions[i]) for i in changes))


class FaultyWorker(Worker):
    """The first two are the engines in their first life; all others are engine 1 again."""

    faults: Faults

    def __init__(self, process: int, rank: int) -> None:
        super().__init__(process, rank)
        self.tokens: dict[tuple[int, int], list[tuple[int, float, int]]] = {}
        self.engine, self.is_late = min(process, 1), process > 1
        if self.faults.swaps(self.engine, self.is_late):
            self.card, self.rearrange = "another card", swapped_halves

    def do_load(self, location: Any, wanted: WantedVersion) -> LoadResult:
        self.version = wanted.version
        return LoadResult.WHOLE

    def do_first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        question = prompt_ids, temperature, with_adapter
        return [self.faults.answers(self.engine, self.is_late, self.version, question)]

    def do_issue(
        self, step: int, attempt: int, samples: Sequence[int], requests: Sequence[Request], *pictures: Any
    ) -> None:
        super().do_issue(step, attempt, samples, requests, *pictures)
        for sample, request in zip(samples, requests, strict=True):
            assert request.tail is None
            self.todo[attempt, sample] = request, LENGTH
            self.tokens[attempt, sample] = []

    def do_proceed(self, max_steps: int) -> list[tuple[int, int, Trajectory]]:
        self.num_steps += max_steps
        if self.engine and not self.is_late and self.faults.begins and self.faults.fault.startswith("late"):
            self.state, self.faults.was_lost = "gone", True
        ended = []
        for ticket, (request, _) in list(self.todo.items()):
            tokens, left = self.tokens[ticket], max_steps
            while left and len(tokens) < LENGTH:
                tokens.append((*self.faults.token(self.engine, self.is_late, self.version), self.version))
                left -= 1
            if len(tokens) == LENGTH:
                del self.todo[ticket]
                ended.append((*ticket, trajectory_of(request, self.tokens.pop(ticket))))
        return ended

    def do_grown(self, least: int) -> list[Any]:
        return []


@dataclass
class Run:
    """A run from its beginning, or from a checkpoint, and what it has learnt."""

    mode: Mode
    faults: Faults
    metrics: dict[str, float] | None = None  # of the last step
    state: Any = None  # of a fleet's scheduler, as in a checkpoint
    learnt: list[set[int]] = field(default_factory=list)  # by step: ids of tokens
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = RunConfig()
        self.config.model.dtype, self.config.rollout.mode = "float32", self.mode
        self.plan = CheckPlan(50, 0.7, "float32", self.said.append)
        self.gates = GateWatch(self.config, True, self.said.append, self.faults.first, self.metrics)

    def pushed(self, version: int) -> Pushed:
        merged = {} if self.faults.fault == "adapters left out" else {"adapter/unchanged_fraction": 0.0}
        return Pushed(version, 0.0, {"adapter/largest_b": version * 1e-3, **merged})

    def learn(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """As the loop does: the gates come before the weights change."""
        samples = [Sample(trajectory.summary(), Score(1.0), 0.0) for trajectory in trajectories]
        gates = self.gates.of_step(step, step, 0.0)
        batch = packed(trajectories)
        stats = TokenStats(torch.full((batch.num_tokens,), logprob(step)), torch.zeros(1))
        actor: Any = type("Actor", (), {"token_stats": lambda _, batches: [stats for _ in batches]})()
        (ready,) = gates.recompute(actor, [batch])
        gates.watched(lambda found, _: (found.logprobs.sum(), None))(stats, ready)  # type: ignore[arg-type,return-value]
        self.metrics = gates.check(1.0, 1.0, samples, lambda: None)
        gaps = [abs(logprob(step) - one) for trajectory in trajectories for one in trajectory.sampled_logprobs.tolist()]
        self.metrics |= {"rollout/logprob_diff_mean": sum(gaps) / len(gaps)}
        self.learnt.append({token for trajectory in trajectories for token in trajectory.sampled_ids.tolist()})

    def num_wrong(self) -> int:
        return sum(WRONG in ids for ids in self.learnt)


def packed(trajectories: Sequence[Trajectory]) -> Microbatch:
    lengths = [len(trajectory.token_ids) - 1 for trajectory in trajectories]
    total = sum(lengths)
    ids = torch.zeros(total, dtype=torch.int64)
    return Microbatch(
        token_ids=ids,
        target_ids=ids,
        position_ids=ids,
        loss_mask=torch.cat([torch.from_numpy(t.loss_mask[1:].copy()).float() for t in trajectories]),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        max_seqlen=max(lengths),
        sequence_indices=tuple(range(len(trajectories))),
        rollout_logprobs=torch.cat([torch.from_numpy(t.logprobs[1:].copy()) for t in trajectories]),
    )


def requests(key: Key, samples: Sequence[int]) -> list[Request]:
    prompt = Prompt(key.ticket, (5, 6), "", "", "test")
    return [Request(prompt, sample, seed=sample, max_tokens=LENGTH) for sample in samples]


def synchronous(run: Run, steps: range) -> None:
    """Two engines that are asked and sample in turn; those that start with the process are the ones that come late."""
    faults = run.faults
    held = [steps.start]

    class Engines:
        def first_logprobs(
            self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
        ) -> list[dict[int, float]]:
            return [faults.answers(e, True, held[0], (prompt_ids, temperature, with_adapter)) for e in range(2)]

    workers = [LoadedWorker(SHAPE), LoadedWorker(SHAPE)]
    for engine, worker in enumerate(workers):
        if faults.swaps(engine, True):
            swapped_halves(worker.live)
    remote_sink(elsewhere(workers), weights(), load_proof(num_loading=2), "auto")
    probe = EngineProbe(Engines(), EngineLayout(1, 1), run.plan)
    for step in steps:
        faults.step = held[0] = step
        probe.check(run.pushed(step))
        found = []
        for ticket in range(4):
            for request in requests(Key(step, ticket), (0, 1)):
                engine = ticket % 2
                tokens = [(*faults.token(engine, True, step), step)] * LENGTH
                found.append(dataclasses.replace(trajectory_of(request, tokens), engine=engine))
        run.learn(step, found)


def fleet(patch: pytest.MonkeyPatch, run: Run, steps: range) -> None:
    platform.select("cpu")
    faults = run.faults
    rules = Rules(num_groups=4, group_size=2, total_steps=TOTAL, eta=ETA, is_pinned=run.mode == "pinned")
    stored = {steps.start: StoredVersion(steps.start, 2, PROOFS)}
    checks = FleetChecks(run.plan)
    probe = FleetProbe(checks)
    probe.check(run.pushed(steps.start))
    worker = type("Made", (FaultyWorker,), {"faults": faults})
    rollout = RolloutConfig(mode=run.mode, placement="separate", num_engines=2)
    executor = executor_on(patch, FakeRay(worker, SHAPE), rollout, requests, stored, checks=checks)
    state, scores = decoded(json.loads(run.state)) if run.state else (None, {})
    limits = EngineLimits(slots=4, restarts=2)
    scheduler = FleetScheduler(rules, limits, range(2), state)
    thread = SchedulerThread(scheduler, executor, scored, lambda group: True, scores, limit_s=60.0)
    with closing(thread):
        for step in steps:
            faults.step = step
            stored[step] = StoredVersion(step, 2, PROOFS)
            if step > steps.start:
                probe.check(run.pushed(step))
                thread.published(step)
            found = thread.take(step)
            run.learn(step, [one for group in found.kept.values() for one in group.trajectories])
            if step + 1 == steps.stop:
                thread.saved(step + 1)
                if step + 1 < TOTAL:  # the steps in the air belong to the checkpoint
                    stored[step + 1] = StoredVersion(step + 1, 2, PROOFS)
                    committed = thread.committed(step + 1, 60.0)
                    assert committed is not None
                    run.state = json.dumps(encoded(*committed, not_handed))


def scored(key: Key, trajectory: Trajectory) -> Future[Score]:
    found: Future[Score] = Future()
    found.set_result(Score(1.0))
    return found


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def go(patch: pytest.MonkeyPatch, run: Run, steps: range) -> None:
    if run.mode == "synchronous":
        synchronous(run, steps)
    else:
        fleet(patch, run, steps)


@pytest.mark.parametrize(("fault", "mode", "start"), CELLS, ids=lambda value: value.replace(" ", "-"))
def test_a_wrong_engine_is_named_before_it_teaches(
    monkeypatch: pytest.MonkeyPatch, fault: str, mode: Mode, start: str
) -> None:
    run = Run(mode, Faults(fault, 0))
    if start == "resumed":
        before = Run(mode, Faults("nothing", 0))
        go(monkeypatch, before, range(RESUMED_AT))
        run = Run(mode, Faults(fault, RESUMED_AT), before.metrics, before.state)
    steps = range(run.faults.first, TOTAL)
    error, words, most = FAULTS[fault]
    if error is None:
        go(monkeypatch, run, steps)
        assert len(run.learnt) == len(steps)
        return
    with pytest.raises(error, match=words):
        go(monkeypatch, run, steps)
    if fault == "old adapters" and start == "resumed" and mode != "synchronous":
        # The first weights of its life may be those of changed adapters already, which the next ones are compared with.
        most = 1
    assert run.num_wrong() <= most, f"{run.num_wrong()} steps learnt of wrong tokens"


def test_no_cell_is_left_out() -> None:
    assert len(set(CELLS)) == len(FAULTS) * 3 * 2 and {mode for _, mode, _ in CELLS} == set(MODES)
    checked: Callable[[str], bool] = lambda fault: FAULTS[fault][0] is not None  # noqa: E731
    assert sum(checked(fault) for fault, _, _ in CELLS) == 48
