"""Metrics are declared once and reduce the same in any split; timers add up."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given, settings, strategies as st

from mega_rl.observe.metrics.declared import CHARTS, METRICS, PHASES, SECTIONS, Metrics, laid_out, match
from mega_rl.observe.metrics.metric import DISTRIBUTION
from mega_rl.observe.timers import Timers


def test_declarations_are_unique_complete_and_formattable():
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    for spec in METRICS:
        assert spec.unit and spec.description
        assert spec.reduction in ("mean", "sum", "max", "min", "last", DISTRIBUTION)
        if spec.console:
            assert spec.console.format("a", "b", value=0.5)
    for phase in PHASES:
        assert match(f"time/{phase}_s")[0].unit == "s"


def test_every_metric_has_its_section_and_every_chart_its_metrics():
    keys = [section.key for section in SECTIONS]
    assert {spec.section for spec in METRICS} == set(keys) and len(set(keys)) == len(keys)
    section_of = {spec.name: spec.section for spec in METRICS}
    shared = [name for names in CHARTS.values() for name in names]
    assert len(set(shared)) == len(shared)
    for title, names in CHARTS.items():
        assert len({section_of[name] for name in names}) == 1, f"the metrics of {title!r} are in different sections"


def test_the_layout_has_sections_and_charts_in_reading_order():
    names = ["aqn/sigma", "time/step_s", "reward/exact", "actor/kl", "reward/min", "no/such", "reward/mean", "reward/a"]
    found = [(section.key, charts) for section, charts in laid_out(names)]
    assert found == [
        ("learning", {"reward": ["reward/mean", "reward/min"], "rewards by name": ["reward/a", "reward/exact"]}),
        ("health", {"actor/kl": ["actor/kl"]}),
        ("speed", {"time/step_s": ["time/step_s"]}),
        ("aqn", {"sigma": ["aqn/sigma"]}),
    ]


def test_a_distribution_is_not_added_up():
    with pytest.raises(AssertionError, match="rewards is a distribution"):
        Metrics().add("rewards", 1.0)


@pytest.mark.parametrize(
    ("name", "declared", "stars"),
    [
        ("reward/mean", "reward/mean", ()),  # exact before the pattern reward/*
        ("reward/math_exact", "reward/*", ("math_exact",)),
        ("val-core/openai/gsm8k/acc/mean@1", "val-core/*/acc/mean@*", ("openai/gsm8k", "1")),
        ("val-core/x/acc/best@8", "val-core/*/acc/best@*", ("x", "8")),
        ("val-core/x/greedy/acc", "val-core/*/greedy/acc", ("x",)),
        ("val-aux/x/response_length/mean", "val-aux/*/response_length/mean", ("x",)),
    ],
)
def test_names_and_patterns(name, declared, stars):
    spec, found = match(name)
    assert (spec.name, found) == (declared, stars)


@pytest.mark.parametrize("name", ["actor/los", "reward/", "val-core//acc/mean@1", "val-core/x/acc/mean@", "time/nap_s"])
def test_an_undeclared_metric_raises(name):
    with pytest.raises(KeyError, match="is not declared"):
        Metrics().add(name, 1.0)


def test_reductions():
    metrics = Metrics()
    for value, weight in ((-1.0, 3.0), (2.0, 1.0)):
        for name in ("actor/loss", "actor/skipped_steps", "reward/max", "reward/min", "actor/lr"):
            metrics.add(name, value, weight)
    assert metrics.result() == {
        "actor/loss": -0.25,  # weighted, sign kept
        "actor/skipped_steps": 1.0,
        "reward/max": 2.0,
        "reward/min": -1.0,
        "actor/lr": 2.0,
    }


def test_nan_is_never_lost_and_empty_parts_do_not_spoil_a_mean():
    metrics = Metrics()
    for value in (1.0, math.nan, 2.0):
        for name in ("actor/kl", "reward/max", "reward/min"):
            metrics.add(name, value)
    assert all(math.isnan(value) for value in metrics.result().values())
    part = Metrics()
    part.add("actor/kl", math.nan, weight=0)
    assert math.isnan(part.result()["actor/kl"])
    part.add("actor/kl", 4.0, weight=2)
    assert part.result() == {"actor/kl": 4.0}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), min_size=1, max_size=8),
    st.integers(0, 8),
    st.sampled_from(["actor/loss", "actor/skipped_steps", "reward/max", "reward/min", "actor/lr"]),
)
def test_merging_parts_equals_adding_everything_at_once(observations, cut, name):
    def accumulate(part):
        metrics = Metrics()
        for value, weight in part:
            metrics.add(name, value, weight)
        return metrics

    parts = [pickle.loads(pickle.dumps(accumulate(p))) for p in (observations[:cut], observations[cut:])]
    merged, whole = Metrics().merge(parts).result(), accumulate(observations).result()
    assert merged.keys() == whole.keys()
    assert merged[name] == pytest.approx(whole[name], nan_ok=True)


class TestTimers:
    @pytest.fixture
    def timers(self):
        self.now = 100.0
        return Timers(clock=lambda: self.now)

    def test_blocks_add_up_nest_and_start_anew(self, timers):
        with timers("step"):
            for seconds in (1.0, 2.0):
                with timers("update"):
                    self.now += seconds
            self.now += 0.5
        assert timers.collect() == {"time/update_s": 3.0, "time/step_s": 3.5}
        assert timers.collect() == {}

    def test_a_block_that_raises_is_counted(self, timers):
        with pytest.raises(ZeroDivisionError), timers("save"):
            self.now += 1.0
            raise ZeroDivisionError
        with timers("save"):
            self.now += 1.0
        assert timers.collect() == {"time/save_s": 2.0}

    def test_an_undeclared_phase_raises(self, timers):
        with pytest.raises(KeyError), timers("nap"):
            pass

    def test_reset_forgets(self, timers):
        with timers("sync"):
            self.now += 1.0
        timers.reset()
        assert timers.collect() == {}

    def test_peaks_count_to_every_running_phase_and_the_largest_stays(self):
        readings = iter([9, 1, 7, 3, 2, 1, 4, 1, 5, 1])  # GiB: phases begin and end, collecting
        timers = Timers(clock=lambda: 0.0, memory=lambda: {"host": next(readings) << 30})
        with timers("step"):  # 9 before it
            with timers("update"):  # 1 before it, 7 within
                pass
            with timers("save"):  # 3 before it, 2 within
                pass
        names = {"": 9.0, "/step": 7.0, "/update": 7.0, "/save": 2.0}
        assert timers.collect_peaks() == {f"memory/peak_host_gib{phase}": gib for phase, gib in names.items()}
        with timers("sync"):
            pass
        assert timers.collect_peaks() == {"memory/peak_host_gib": 9.0, "memory/peak_host_gib/sync": 5.0}
        for name in names:
            assert match(f"memory/peak_host_gib{name}")[0].reduction == "max"
