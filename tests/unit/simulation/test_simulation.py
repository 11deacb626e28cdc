"""The simulated cluster against what can be calculated, and against a published run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mega_rl.errors import InputError
from mega_rl.fleet import events
from mega_rl.fleet.tickets import Rules
from mega_rl.simulation import cluster, lengths
from mega_rl.simulation.choice import (
    SimulatedBatch,
    SimulatedSetting,
    Trial,
    recommended,
    simulate,
    simulate_all,
    splits,
)
from mega_rl.simulation.cluster import Cluster, Simulation

SMALL = Cluster(engines=2, slots=64, fixed_s=0.01, per_response_s=0.001, train_s=3.0, load_s=0.5)
EVEN = SimulatedBatch(4, 4, lengths.Constant(100))
SAMPLING_S = 100 * (0.01 + 0.001 * 8)  # 8 responses on each engine


def run(mode: str, eta: int, cluster: Cluster = SMALL, batch: SimulatedBatch = EVEN, steps: int = 8) -> Trial:
    return simulate(SimulatedSetting(mode, eta, 1, cluster), batch, steps)


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    outcome = run("synchronous", 0).outcome
    assert outcome.step_s == pytest.approx(SAMPLING_S + 0.5 + 3.0)
    assert outcome.trainer_idle == pytest.approx((SAMPLING_S + 0.5) / outcome.step_s)
    assert (outcome.mean_staleness, outcome.max_staleness, outcome.num_deaths) == (0.0, 0, 0)
    assert outcome.tokens_per_s == pytest.approx(1600 / outcome.step_s)


def test_tokens_that_are_shorter_than_the_clock_can_tell_end_too() -> None:
    outcome = run("synchronous", 0, replace(SMALL, load_s=1e9, fixed_s=1e-9, per_response_s=0.0)).outcome
    assert outcome.step_s == pytest.approx(1e9 + 3.0)


def test_overlap_takes_the_longer_of_both() -> None:
    """In flight a step's last responses share their engines with the next step's first ones, and end later."""
    even = replace(SMALL, train_s=SAMPLING_S, load_s=0.0)
    synchronous = run("synchronous", 0, even).outcome.step_s
    pinned, in_flight = (run(mode, 1, even, steps=20).outcome for mode in ("pinned", "in_flight"))
    assert pinned.step_s <= 1.05 * SAMPLING_S and synchronous >= 1.85 * pinned.step_s
    assert pinned.mean_staleness == pytest.approx(1.0) and pinned.max_staleness == in_flight.max_staleness == 1
    assert synchronous >= 1.5 * in_flight.step_s and in_flight.mean_staleness <= 1.0


def test_train_time_by_token_and_parts_of_groups() -> None:
    by_token = replace(SMALL, train_s=0.0, train_token_s=0.001)
    assert run("synchronous", 0, by_token).outcome.step_s == pytest.approx(SAMPLING_S + 0.5 + 1.6)
    many = replace(SMALL, engines=8)  # two for each group
    assert run("synchronous", 0, many).outcome.step_s == pytest.approx(100 * 0.012 + 0.5 + 3.0)


def test_weights_that_change_under_way_cost_the_prefix_again_and_mix_versions() -> None:
    uneven = SimulatedBatch(8, 2, lengths.LogNormal(100, 1.0, 2000))
    fast_trainer = replace(SMALL, train_s=0.1, load_s=0.0)
    fresh, pinned = run("in_flight", 4, fast_trainer, uneven).outcome, run("pinned", 4, fast_trainer, uneven).outcome
    assert fresh.mean_staleness < pinned.mean_staleness == 4.0 and fresh.max_staleness <= 4
    slow = replace(fast_trainer, prefill_tokens_per_s=100.0)
    again, kept = (run("in_flight", 1, cluster, uneven).outcome.step_s for cluster in (slow, fast_trainer))
    assert again > kept


def test_deaths_cost_time_and_nothing_else() -> None:
    busy = replace(SMALL, train_s=0.1)
    mortal = replace(busy, hours_between_deaths=10 / 3600, restart_s=2.0)
    for mode, eta in (("synchronous", 0), ("pinned", 2), ("in_flight", 2)):
        outcome = run(mode, eta, mortal, steps=30).outcome
        assert outcome.num_deaths > 3 and outcome.max_staleness <= eta
        assert outcome.step_s > run(mode, eta, busy, steps=30).outcome.step_s


class Watched(Simulation):
    """Keeps the lengths of the responses of every step."""

    def _carry_out(self, decisions: list[events.Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, events.Deliver):
                self.delivered = getattr(self, "delivered", []) + [[results for _, results in decision.groups]]
        super()._carry_out(decisions)


def test_in_flight_goes_on_with_what_dead_engines_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines live hardly longer than a response takes; it keeps its length, however often it changes hands."""
    monkeypatch.setattr(cluster, "TELL_S", 0.1)
    mortal = replace(SMALL, train_s=0.1, load_s=0.0, hours_between_deaths=1.5 / 3600, restart_s=0.1)
    steps = {}
    for mode in ("pinned", "in_flight"):
        rules = Rules(4, 4, total_steps=19, eta=2, is_pinned=mode == "pinned")
        simulation = Watched(mortal, rules, lengths.Constant(100), num_steps=16)
        outcome = simulation.run()
        steps[mode] = outcome.step_s
        assert outcome.num_deaths > 10 and outcome.max_staleness <= 2
        found = np.array(simulation.delivered)
        assert found.shape[1:] == (4, 4) and abs(found - 100).max() <= 5, "a token at most is lost at each death"
    assert steps["in_flight"] < 0.7 * steps["pinned"], steps


def test_timeline_holds_all_that_was_done() -> None:
    trial = simulate(SimulatedSetting("pinned", 1, 1, SMALL), EVEN, 4, records=True)
    names = {(a.lane, a.name) for a in trial.outcome.activities}
    assert names == {
        ("trainer", "waiting"),
        ("trainer", "training"),
        *((f"engine {i}", name) for i in (0, 1) for name in ("sampling", "loading weights")),
    }
    for lane in ("trainer", "engine 0", "engine 1"):
        spans = [(a.begin_s, a.end_s) for a in trial.outcome.activities if a.lane == lane]
        assert all(end > begin for begin, end in spans)
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in zip(spans, spans[1:], strict=False))


def test_a_published_run_is_met_within_15_percent() -> None:
    """verl on 128 cards, 7B, mathematics: 356 s a step synchronous, 151 s fully asynchronous (FSDP2, 64 + 64 cards).

    A quarter of its prompts and engines are simulated; lengths and speeds of decoding are assumed, not published.
    """
    batch = SimulatedBatch(128, 16, lengths.LogNormal(750, 1.0, 28000))
    separate = Cluster(engines=16, slots=512, fixed_s=0.0058, per_response_s=0.00006, train_s=113.0, load_s=5.0)
    colocated = replace(separate, engines=32, train_s=114.0 + 54.0, load_s=10.0)
    synchronous = simulate(SimulatedSetting("synchronous", 0, 128, colocated), batch, 24).outcome.step_s
    assert synchronous == pytest.approx(356, rel=0.15)
    assert simulate(SimulatedSetting("pinned", 1, 64, separate), batch, 16).outcome.step_s == pytest.approx(
        151, rel=0.15
    )
    assert synchronous / simulate(SimulatedSetting("pinned", 2, 64, separate), batch, 12).outcome.step_s >= 2.7


def test_the_freshest_of_the_fast_is_recommended() -> None:
    slow_tail = SimulatedBatch(8, 4, lengths.LogNormal(100, 0.8, 1500))
    settings = [SimulatedSetting("synchronous", 0, 2, SMALL)]
    settings += [SimulatedSetting(mode, eta, 1, SMALL) for mode in ("pinned", "in_flight") for eta in (1, 2, 3)]
    trials = simulate_all(settings, slow_tail, 12)
    best = recommended(trials)
    assert best.setting.mode == "pinned"
    fastest = min(t.outcome.step_s for t in trials if t.setting.mode == "pinned")
    fresher = [t for t in trials if t.setting.mode == "pinned" and t.setting.eta < best.setting.eta]
    assert best.outcome.step_s <= 1.05 * fastest < min((t.outcome.step_s for t in fresher), default=1e9)
    instant = replace(SMALL, fixed_s=1e-6, per_response_s=0.0, load_s=0.0)
    assert recommended(simulate_all([replace(s, cluster=instant) for s in settings], EVEN, 4)).setting.eta == 0


def test_splits_leave_whole_engines() -> None:
    assert splits(8, 2, 2) == [2, 4, 6] and splits(8, 1, 4) == [4] and splits(4, 4, 2) == []
    assert splits(64, 4, 8, num_wanted=3) == [16, 32, 48]


def test_lengths() -> None:
    normal = lengths.LogNormal(500, 0.7, 4000, seed=3)
    drawn = normal(2, 200, 8)
    assert drawn.shape == (200, 8) and drawn.max() <= 4000 and np.median(drawn) == pytest.approx(500, rel=0.15)
    assert (normal(2, 200, 8) == drawn).all() and (normal(3, 200, 8) != drawn).any()
    logs = np.log(drawn)
    assert 0.3 < logs.mean(axis=1).var() / logs.var() < 0.7  # alike within a group
    recorded = lengths.Recorded(((5, 6), (70, 80)), longest=75)(0, 50, 4)
    assert set(np.unique(recorded)) == {5, 6, 70, 75}
    assert all((row < 10).all() or (row > 10).all() for row in recorded)


def test_lengths_of_files(tmp_path: Path) -> None:
    rows = [{"prompt": {"index": index}, "token_ids": [1] * n} for index, n in ((3, 2), (3, 4), (7, 1))]
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    file = tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lengths.read(tmp_path / "run") == lengths.read(tmp_path / "run" / "rollouts") == [[2, 4], [1]]
    assert lengths.read(file) == [[2, 4], [1]]
    plain = tmp_path / "lengths.txt"
    plain.write_text("12\n\n345\n")
    assert lengths.read(plain) == [[12], [345]]


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.txt", "12\n-3\n", "a.txt:2 is '-3': write one whole number of at least 1 a line"),
        ("a.txt", "", "a.txt is empty"),
        ("a.txt", "1e3\n", "a.txt:1 is '1e3'"),
        ("a.jsonl", '{"prompt": {}}\n', "a.jsonl:1 is not a recorded rollout (KeyError: 'index')"),
        ("a.jsonl", "[" * 200_000 + "\n", "a.jsonl:1 is not a recorded rollout (RecursionError: "),
        ("a.jsonl", "[1\n", "a.jsonl:1 is not a recorded rollout"),
    ],
)
def test_bad_files_of_lengths_are_one_sentence(tmp_path: Path, name: str, text: str, part: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as error:
        lengths.read(tmp_path / name)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_missing_lengths_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no rollouts/step"):
        lengths.read(tmp_path)
    with pytest.raises(InputError, match="does not exist: name a run's directory"):
        lengths.read(tmp_path / "none")
