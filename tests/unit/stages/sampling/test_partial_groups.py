"""Steps of a run that end before all responses have: batches, checkpoints and replay, on an engine without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.stream import Stream
from mega_rl.errors import InputError
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.rollout.collect.collect import GroupSummary
from mega_rl.rollout.collect.records import to_rows, trajectory_of_row, write_step
from mega_rl.rollout.collect.replay import ReplayEngine
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.stages.sampling import batch_builder
from mega_rl.stages.sampling.batch_builder import Batch, BatchBuilder
from mega_rl.types import Prompt, Score, Trajectory
from tests.pretended.tailing_engine import TailingEngine, check_whole

SIZE, MAX_TOKENS, STEPS = 3, 12, 6
Rows = dict[str, list[dict[str, Any]]]
both = pytest.mark.parametrize("is_dynamic", [False, True])


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def scored(trajectory: Trajectory) -> Future[Score]:
    known: Future[Score] = Future()
    known.set_result(Score(float(trajectory.token_ids.sum() % 2)))
    return known


class Run:
    def __init__(self, engine: TailingEngine | ReplayEngine, is_dynamic: bool, oversample: float = 2.5) -> None:
        self.config = config = RunConfig()
        config.data.train_batch_size, config.data.max_response_length, config.rollout.n = SIZE, MAX_TOKENS, 2
        config.rollout.oversample = oversample
        config.algorithm.dynamic_sampling.enabled = is_dynamic
        if isinstance(engine, ReplayEngine):
            config.rollout.replay = "records"
        self.trajectory_store, self.engine = TrajectoryStore(ParallelLayout.create(1), 0), engine
        dataset = PromptDataset([Prompt(index, (1, 2 + index % 5), "", "", "made") for index in range(20)])
        timers: Any = SimpleNamespace(add=lambda name, seconds: None)
        scorer: Any = SimpleNamespace(start=scored, collective=None)
        meeting, layout = Rendezvous(dist.HashStore(), 0, 1), EngineLayout(1, 1)
        stream = Stream(dataset, SIZE, True, 5)
        job: Any = SimpleNamespace(
            config=config,
            engine_layout=layout,
            timers=timers,
            rendezvous=meeting,
            trajectory_store=self.trajectory_store,
        )
        self.builder = BatchBuilder(job, stream, engine, scorer)

    def step(self, step: int) -> tuple[Batch, Rows]:
        """The groups, and as rows by what became of them."""
        if isinstance(self.engine, ReplayEngine):
            self.engine.turn_to(step)
        else:
            self.engine.weight_version = step
        batch = self.builder.build(step)
        return batch, {outcome: self.rows(groups) for outcome, groups in batch.by_outcome.items()}

    def rows(self, groups: list[GroupSummary]) -> list[dict[str, Any]]:
        return [row for group in self.trajectory_store.groups_to_first(groups) for row in to_rows(group)]


@both
def test_a_step_learns_from_a_full_batch_and_keeps_the_rest(is_dynamic: bool) -> None:
    run, learnt, found = Run(TailingEngine(2), is_dynamic), list[int](), list[Trajectory]()
    for step in range(STEPS):
        batch, rows = run.step(step)
        assert len(batch.learnt) == SIZE
        in_hand = batch.metrics["rollout/groups_carried_out"] + batch.metrics["rollout/groups_waiting"]
        assert in_hand <= 2 * SIZE + (len(batch.dropped) if is_dynamic else 0) and run.engine.num_unfinished == 0
        learnt += [group.summaries[0].prompt_index for group in batch.learnt]
        found += [trajectory_of_row(row) for row in rows["learnt"] + rows["dropped"]]
    for trajectory in found:
        check_whole(trajectory, MAX_TOKENS)
    assert batch.metrics["rollout/staleness_max"] >= 1 and batch.metrics["rollout/tails"] > 0
    assert any(len(trajectory.spans) > 2 for trajectory in found), "no response went on over two steps"
    if not is_dynamic:  # nothing is left behind for ever
        order = Stream(run.builder._stream.dataset, SIZE, True, 5)
        drawn = [order.next_item().index for _ in range(20)]
        assert set(drawn[:SIZE]) <= set(learnt) and len(learnt) == SIZE * STEPS


@both
def test_a_killed_run_goes_on_exactly(is_dynamic: bool) -> None:
    whole, cut, resumed = (Run(TailingEngine(4), is_dynamic) for _ in range(3))
    expected = [whole.step(step) for step in range(STEPS)]
    for step in range(3):
        cut.step(step)
    state = json.loads(json.dumps(cut.builder.state_dict()))  # as a checkpoint has it
    rows = [row for group in state["waiting"] for row in group]
    assert any("seed" in row and row.get("token_ids") for row in rows) and any("score" in row for row in rows)
    cut.step(3)  # and then it was killed
    resumed.builder.load_state_dict(state)
    for step in range(3, STEPS):
        batch, rows_of_step = resumed.step(step)
        assert rows_of_step == expected[step][1] and batch.metrics == expected[step][0].metrics


@both
def test_a_recorded_run_is_replayed(is_dynamic: bool, tmp_path: Path) -> None:
    run = Run(TailingEngine(7), is_dynamic)
    expected, states = [], []
    for step in range(STEPS):
        states.append(json.loads(json.dumps(run.builder.state_dict())))
        batch, rows = run.step(step)
        expected.append(rows)
        marked = [{"outcome": outcome, **row} for outcome, part in rows.items() for row in part]
        write_step(tmp_path, step + 1, marked, -1)
    assert any(rows["carried"] for rows in expected)
    for first in (0, 3):  # from the beginning, and from a checkpoint
        replayed = Run(ReplayEngine(tmp_path, None, waits=True), is_dynamic)
        replayed.builder.load_state_dict(states[first])
        for step in range(first, STEPS):
            assert replayed.step(step)[1] == expected[step], (first, step)


def test_a_replay_without_enough_groups_is_refused(tmp_path: Path) -> None:
    run = Run(TailingEngine(7), False)
    _, rows = run.step(0)
    write_step(tmp_path, 1, rows["learnt"][:-2], -1)
    with pytest.raises(InputError, match="has 2 of the 3 groups of step 1: replay with the data"):
        Run(ReplayEngine(tmp_path, None, waits=True), False).step(0)


def test_without_the_key_what_waits_is_ended_first() -> None:
    """A checkpoint with tails, gone on with by a run that waits for every response, and then has groups to use up."""
    run = Run(TailingEngine(1), False)
    first, _ = run.step(0)
    state = json.loads(json.dumps(run.builder.state_dict()))
    waiting = [group[0]["prompt"]["index"] for group in state["waiting"]]
    later = Run(TailingEngine(1), False, oversample=1.0)
    later.builder.load_state_dict(state)
    learnt = [group.summaries[0].prompt_index for group in first.learnt]
    for step in range(1, 6):
        batch, _ = later.step(step)
        assert "rollout/tails" not in batch.metrics and len(batch.learnt) == SIZE
        learnt += [group.summaries[0].prompt_index for group in batch.learnt]
    assert set(waiting) <= set(learnt) and "waiting" not in later.builder.state_dict()
    assert batch.metrics["rollout/groups_carried_out"] == 0 and batch.metrics["rollout/staleness_max"] == 0
    order = Stream(later.builder._stream.dataset, SIZE, True, 5)
    assert sorted(learnt) == sorted(order.next_item().index for _ in learnt), "a prompt was left out or taken twice"


def test_what_cannot_go_on_is_refused() -> None:
    run = Run(TailingEngine(1), False)
    run.step(0)
    state = run.builder.state_dict()
    later = Run(TailingEngine(1), False)
    later.config.data.max_response_length = 1
    with pytest.raises(InputError, match="data.max_response_length is 1, but the checkpoint has a response"):
        later.builder.load_state_dict(state)
    later = Run(TailingEngine(1), False, oversample=1.0)
    later.config.rollout.stop = ["#"]
    with pytest.raises(
        InputError,
        match="checkpoint has responses that were begun, but an engine would not see a string of rollout.stop",
    ):
        later.builder.load_state_dict(state)
    later = Run(TailingEngine(1), False, oversample=1.0)
    later.config.environment.name = "number_guessing"
    remedy = "remove the key, or start from the checkpoint's weights with another trainer.output_dir$"
    with pytest.raises(InputError, match=rf"\(environment.name 'number_guessing'\): {remedy}"):
        later.builder.load_state_dict(state)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_carried_responses_of_several_weights_need_a_correction(is_mixed: bool) -> None:
    """Those of one are what dynamic sampling always carries."""
    run, groups = Run(TailingEngine(7), is_dynamic=not is_mixed), list[Any]()
    for step in range(STEPS):
        run.step(step)
        state = run.builder.state_dict()
        groups += [group for group in state["carried"] if any("spans" in row for row in group) == is_mixed]
    assert groups
    later = Run(TailingEngine(7), False, oversample=1.0)
    later.config.algorithm.importance_cap = None
    with pytest.raises(InputError, match="algorithm.importance_cap is null") if is_mixed else nullcontext():
        later.builder.load_state_dict({"stream": state["stream"], "carried": groups})


def test_scores_that_come_while_the_trainer_works_are_not_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(batch_builder, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    busy = batch_builder.BusyTime()
    for at, what in ((1, busy.begin), (3, busy.begin), (4, busy.end)):
        now[0] = at
        what()
    now[0] = 6
    assert busy.take() == 5, "one is still under way"
    now[0] = 100
    assert busy.take() == 94
    now[0] = 101
    busy.end()
    now[0] = 200
    assert busy.take() == 1

    run, told = Run(TailingEngine(1), False), list[tuple[str, float]]()
    monkeypatch.setattr(run.builder._timers, "add", lambda name, seconds: told.append((name, seconds)))
    run.step(0)
    run.builder._scoring_time.begin()  # of a member of a group that waits
    now[0] += 50
    run.step(1)
    assert told == [("reward", 0.0), ("reward", 0.0)]
