"""What the scheduler decides, event by event."""

from __future__ import annotations

import ast
from typing import Any, TypeVar

import pytest

from mega_rl.errors import InputError
from mega_rl.fleet import events, membership
from mega_rl.fleet.engines import Condition, Engine, EngineLimits
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import Key, Rules, held_out
from tests.launching.launch import REPO

LIMITS = EngineLimits(slots=4, progress_s=10.0, start_s=60.0, restarts=1)
T = TypeVar("T")


def of(kind: type[T], decisions: list[Any]) -> list[T]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def serving(rules: Rules, engines: int = 1, limits: EngineLimits = LIMITS) -> tuple[FleetScheduler, list[events.Issue]]:
    """A scheduler whose engines have version 0, and what it has issued."""
    scheduler = FleetScheduler(rules, limits, range(engines))
    out = scheduler.begin(0.0)
    for engine in range(engines):
        out += scheduler.handle(events.Started(engine, 0), 1.0)
    for load in of(events.Load, out):
        out += scheduler.handle(events.Loaded(load.engine, load.life, load.version), 2.0)
    return scheduler, of(events.Issue, out)


def answer(scheduler: FleetScheduler, issue: events.Issue, version: int, now: float) -> list[Any]:
    """The engine ends all of an issue's samples; groups are scored and kept at once."""
    out: list[Any] = []
    for sample in issue.samples:
        result = f"{issue.key}/{sample}"
        out += scheduler.handle(events.Answered(issue.engine, issue.life, issue.attempt, sample, version, result), now)
    for score in of(events.ScoreGroup, out):
        out += scheduler.handle(events.Scored(score.key, True), now)
    return out


def test_versions_and_places_of_tickets() -> None:
    rules = Rules(num_groups=4, group_size=2, total_steps=9, eta=2, budget=6)
    assert [rules.oldest_version(step) for step in range(5)] == [0, 0, 0, 1, 2]
    assert [rules.num_steps(version) for version in (0, 1, 8)] == [3, 4, 9]
    assert [rules.replacement(dropped) for dropped in (1, 2, 3)] == [4, 5, None]
    assert Rules(4, 2, 9).replacement(1) is None
    assert rules.place(Key(2, 3)) == ("main", 0, 11) and rules.place(Key(2, 5)) == ("spare", 2, 1)
    assert Rules(1, 5, 1, num_parts=2).parts() == [(0, 1, 2), (3, 4)]


def test_an_engine_without_progress_is_replaced_and_its_work_goes_to_others() -> None:
    scheduler, issues = serving(Rules(num_groups=2, group_size=2, total_steps=1), engines=2)
    assert [(i.engine, i.key) for i in issues] == [(0, Key(0, 0)), (1, Key(0, 1))]
    answer(scheduler, issues[1], 0, 9.0)
    assert scheduler.handle(events.Pulsed(0, 0, 5), 9.0) == []
    assert scheduler.handle(events.Ticked(), 18.0) == []  # 9 s since its last step
    scheduler.handle(events.Pulsed(0, 0, 5), 18.5)  # no step more
    out = scheduler.handle(events.Ticked(), 19.5)
    assert out[0] == events.Kill(0, 0, "10 s were not enough for it to go on with 2 responses")
    assert out[1] == events.Start(0, 1)
    (again,) = of(events.Issue, out)
    assert (again.engine, again.key, again.samples) == (1, Key(0, 0), (0, 1)) and again.attempt != issues[0].attempt
    assert scheduler.handle(events.Died(0, 0, "it was killed"), 19.6) == []  # its next life goes on
    late = events.Answered(0, 0, issues[0].attempt, 0, 0, "late")
    assert scheduler.handle(late, 20.0) == [] and scheduler.window.num_refused == 1
    (batch,) = of(events.Deliver, answer(scheduler, again, 0, 21.0))
    assert [key for key, _ in batch.groups] == [Key(0, 0), Key(0, 1)]
    assert "late" not in str(batch) and answer(scheduler, again, 0, 22.0) == []  # told twice


def test_an_engine_that_does_not_start_is_started_again_and_then_left_out() -> None:
    scheduler = FleetScheduler(Rules(1, 1, 1), LIMITS, range(1))
    assert scheduler.begin(0.0) == [events.Start(0, 0)]
    assert of(events.Start, scheduler.handle(events.Ticked(), 61.0)) == [events.Start(0, 1)]
    scheduler.handle(events.Started(0, 1), 62.0)
    (kill, released, end) = scheduler.handle(events.Ticked(), 123.0)
    assert (
        isinstance(kill, events.Kill)
        and released == events.Release(0)
        and isinstance(end, events.Finish)
        and end.is_failure
    )
    assert end.sentence.startswith(
        "no rollout engine is left (engine 0: it was to load version 0, and has said nothing for 10 s):"
    )
    assert scheduler.handle(events.Joined(3), 124.0) == []


def test_engines_join_and_leave_while_work_is_under_way() -> None:
    rules = Rules(num_groups=1, group_size=4, total_steps=1)
    scheduler, (issue,) = serving(rules)
    assert issue.samples == (0, 1, 2, 3) and membership.joining(scheduler.engines, [1], 2) == [2, 3]
    for engine in (2, 3):
        assert scheduler.handle(events.Joined(engine), 3.0) == [events.Start(engine, 0)]
    assert scheduler.rules.num_parts == scheduler.window.rules.num_parts == 3, (
        "of the groups that are drawn from now on"
    )
    answered = scheduler.handle(events.Answered(0, 0, issue.attempt, 2, 0, "third"), 4.0)
    assert answered == []
    assert scheduler.handle(events.Started(2, 0), 5.0) == [events.Load(2, 0, 0)]
    left = [events.Kill(0, 0, "it is no longer wanted"), events.Release(0)]
    assert scheduler.handle(events.Left(0), 6.0) == left
    assert scheduler.handle(events.Answered(0, 0, issue.attempt, 3, 0, "late"), 6.5) == []
    (again,) = of(events.Issue, scheduler.handle(events.Loaded(2, 0, 0), 7.0))
    assert (again.engine, again.key, again.samples) == (2, Key(0, 0), (0, 1, 3)), "what has ended is not sampled again"
    assert scheduler.handle(events.Left(0), 7.5) == [], "twice"
    (batch,) = of(events.Deliver, answer(scheduler, again, 0, 8.0))
    assert "late" not in str(batch) and "third" in str(batch)


def test_who_leaves_is_named_or_loses_least_and_one_stays() -> None:
    engines = {number: Engine(number, Condition.SERVING, version=1, load=load) for number, load in enumerate((5, 0, 2))}
    engines |= {3: Engine(3), 7: Engine(7, Condition.GONE)}
    assert membership.in_use(engines) == [0, 1, 2, 3] and membership.joining(engines, [], 2) == [8, 9]
    assert membership.leaving(engines, [], 1) == [3], "it is not ready, so it loses nothing"
    assert membership.leaving(engines, [], 3) == [1, 2, 3] and membership.leaving(engines, [2, 0, 2], 0) == [0, 2]
    engines[0].version = held_out(4)
    assert membership.leaving(engines, [], 3) == [1, 2, 3], "a validation's work is work"
    with pytest.raises(InputError, match="there is no engine 7 in use: name some of 0, 1, 2, 3"):
        membership.leaving(engines, [0, 7], 0)
    for named, count in (([], 4), ([], 9), ([3, 2, 1, 0], 0)):
        with pytest.raises(InputError, match="4 of 4 engines cannot be removed, since at least one must go on"):
            membership.leaving(engines, named, count)


def test_an_engine_is_given_as_much_as_it_says_it_takes() -> None:
    """And one that does not say is given what the limits say, whatever another takes."""
    limits = EngineLimits(slots=256)
    scheduler = FleetScheduler(Rules(num_groups=512, group_size=8, total_steps=1), limits, range(2))
    scheduler.begin(0.0)
    out = [*scheduler.handle(events.Started(0, 0, slots=1024), 1.0), *scheduler.handle(events.Started(1, 0), 1.0)]
    for load in of(events.Load, out):
        out += scheduler.handle(events.Loaded(load.engine, load.life, load.version), 2.0)
    given = [sum(len(issue.samples) for issue in of(events.Issue, out) if issue.engine == engine) for engine in (0, 1)]
    assert given == [1024, 256] == [engine.load for engine in scheduler.engines.values()]
    scheduler.handle(events.Died(0, 0, "it was killed"), 3.0)
    scheduler.handle(events.Started(0, 1, slots=8), 4.0)
    scheduler.handle(events.Loaded(0, 1, 0), 5.0)
    assert scheduler.engines[0].load == 8, "its next life may be on another card"


def test_an_answer_of_other_weights_is_no_answer() -> None:
    scheduler, (issue,) = serving(Rules(num_groups=1, group_size=1, total_steps=2, eta=1), limits=EngineLimits(slots=1))
    out = scheduler.handle(events.Answered(0, 0, issue.attempt, 0, 1, "x"), 3.0)
    assert of(events.Kill, out)[0].why == "it sampled step 0 with version 1 instead of version 0"
    assert not of(events.Deliver, out) and scheduler.window.num_waiting == 2


def test_pinned_engines_change_weights_only_between_tickets() -> None:
    scheduler, first = serving(Rules(num_groups=1, group_size=2, total_steps=4, eta=1), limits=EngineLimits(slots=2))
    assert [issue.key for issue in first] == [Key(0, 0)]
    out = answer(scheduler, first[0], 0, 3.0)
    (second,) = of(events.Issue, out)
    assert second.key == Key(1, 0) and not of(events.Load, out)
    assert of(events.Load, scheduler.handle(events.Published(1), 4.0)) == []  # it is busy with version 0
    assert of(events.Load, answer(scheduler, second, 0, 5.0)) == [events.Load(0, 0, 1)]
    (third,) = of(events.Issue, scheduler.handle(events.Loaded(0, 0, 1), 6.0))
    assert third.key == Key(2, 0)


def test_a_checkpoint_is_committed_when_what_its_weights_cannot_sample_is_there() -> None:
    rules = Rules(num_groups=1, group_size=1, total_steps=6, eta=2)
    scheduler, issues = serving(rules, limits=EngineLimits(slots=1))
    out = answer(scheduler, issues[0], 0, 3.0)
    scheduler.handle(events.Published(1), 4.0)
    assert scheduler.handle(events.Saved(1), 4.0) == []  # steps 1 and 2 are pinned to version 0
    out = answer(scheduler, of(events.Issue, out)[0], 0, 5.0)
    assert not of(events.Commit, out)
    (commit,) = of(events.Commit, answer(scheduler, of(events.Issue, out)[0], 0, 6.0))
    assert commit.version == 1 and sorted(commit.state["steps"]) == [1, 2]

    resumed = FleetScheduler(rules, LIMITS, range(1), commit.state)
    delivered = of(events.Deliver, resumed.begin(0.0))
    assert [batch.step for batch in delivered] == [1, 2] and "ticket=0" in str(delivered[0])
    with pytest.raises(InputError, match="samples up to step 2, which are older than eta=0 allows: go on with the eta"):
        FleetScheduler(Rules(1, 1, 6, eta=0), LIMITS, range(1), commit.state)


def test_an_old_ticket_gets_an_engine_though_it_has_newer_work() -> None:
    rules = Rules(num_groups=2, group_size=1, total_steps=4, eta=1)
    scheduler, issues = serving(rules, engines=2, limits=EngineLimits(slots=2, restarts=0))
    assert [(i.engine, i.key) for i in issues] == [(0, (0, 0)), (0, (0, 1)), (1, (1, 0)), (1, (1, 1))]
    for issue in issues[:2]:
        answer(scheduler, issue, 0, 3.0)
    assert of(events.Load, scheduler.handle(events.Published(1), 4.0)) == [events.Load(0, 0, 1)]
    newer = of(events.Issue, scheduler.handle(events.Loaded(0, 0, 1), 5.0))
    assert [issue.key for issue in newer] == [(2, 0), (2, 1)]
    assert not of(events.Issue, scheduler.handle(events.Died(1, 0, "it was killed"), 6.0))
    assert not of(events.Load, answer(scheduler, newer[0], 1, 7.0))
    assert of(events.Load, answer(scheduler, newer[1], 1, 8.0)) == [events.Load(0, 0, 0)]
    again = of(events.Issue, scheduler.handle(events.Loaded(0, 0, 0), 9.0))
    assert [(issue.engine, issue.key) for issue in again] == [(0, (1, 0)), (0, (1, 1))]


def test_the_fleet_knows_no_engine_no_process_group_and_no_clock() -> None:
    for path in (REPO / "mega_rl" / "fleet").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names}
            assert not roots & {"torch", "vllm", "ray", "time", "threading", "datetime"}, (path, roots)


def test_an_engine_that_missed_its_weights_is_given_newer_ones_and_no_restart() -> None:
    rules = Rules(num_groups=1, group_size=1, total_steps=4, eta=1, is_pinned=False)
    scheduler, issues = serving(rules, engines=2, limits=EngineLimits(slots=1))
    answer(scheduler, issues[0], 0, 3.0)
    assert of(events.Load, scheduler.handle(events.Published(1), 4.0))[0] == events.Load(0, 0, 1)
    scheduler.handle(events.Died(1, 0, "it was killed"), 4.5)
    assert scheduler.handle(events.Missed(0, 1, 1), 5.0) == [], "another life"
    assert scheduler.handle(events.Missed(0, 0, 1), 5.0) == [events.Load(0, 0, 1)], "the newest that it knows"
    assert scheduler.handle(events.Missed(0, 0, 0), 5.0) == [], "late"

    scheduler = FleetScheduler(Rules(num_groups=1, group_size=1, total_steps=4, eta=1), LIMITS, range(2))
    scheduler.begin(0.0)
    assert [of(events.Load, scheduler.handle(events.Started(engine, 0), 1.0)) for engine in range(2)] == [
        [events.Load(0, 0, 0)],
        [events.Load(1, 0, 0)],
    ]
    (first,) = of(events.Issue, scheduler.handle(events.Loaded(1, 0, 0), 2.0))
    (second,) = of(events.Issue, answer(scheduler, first, 0, 3.0))
    answer(scheduler, second, 0, 4.0)
    scheduler.handle(events.Published(1), 5.0)
    scheduler.handle(events.Published(2), 6.0)
    assert scheduler.handle(events.Missed(0, 0, 0), 7.0) == [events.Load(0, 0, 2)], "engine 1 is on its way to 1"


@pytest.mark.parametrize("is_pinned", [False, True])
def test_an_engine_with_torn_weights_is_given_no_work_before_it_has_whole_ones(is_pinned: bool) -> None:
    rules = Rules(num_groups=1, group_size=1, total_steps=4, eta=1, is_pinned=is_pinned)
    scheduler, issues = serving(rules, limits=EngineLimits(slots=4))
    for issue in issues if is_pinned else issues[:1]:  # in flight the other response is under way
        answer(scheduler, issue, 0, 3.0)
    (load,) = of(events.Load, scheduler.handle(events.Published(1), 4.0))
    decisions = scheduler.handle(events.Missed(0, 0, 1, is_torn=True), 5.0)
    assert decisions == [load], "the newest, or what it needs, at once"
    assert not scheduler.engines[0].serves and scheduler.engines[0].version == -1
    assert not of(events.Issue, scheduler.handle(events.Ticked(), 5.5))
    scheduler.handle(events.Loaded(0, 0, 1), 6.0)
    assert scheduler.engines[0].serves and scheduler.engines[0].version == 1


@pytest.mark.parametrize("samples_on", [False, True])
def test_weights_may_be_late_while_the_engine_says_something(samples_on: bool) -> None:
    limits = EngineLimits(progress_s=10.0, load_s=100.0, restarts=5)
    rules = Rules(num_groups=1, group_size=1, total_steps=3, eta=1, is_pinned=False)
    scheduler, issues = serving(rules, limits=limits)
    answer(scheduler, issues[0], 0, 3.0)
    (load,) = of(events.Load, scheduler.handle(events.Published(1), 4.0))  # under another response
    for now in range(5, 100, 9):
        scheduler.handle(events.Pulsed(0, load.life, now * samples_on), float(now))
        assert not of(events.Kill, scheduler.handle(events.Ticked(), float(now)))
    scheduler.handle(events.Pulsed(0, load.life, 104 * samples_on), 104.0)
    (kill,) = of(events.Kill, scheduler.handle(events.Ticked(), 105.0))
    assert kill.why == "100 s were not enough for it to load version 1"
    scheduler, issues = serving(rules, limits=limits)
    answer(scheduler, issues[0], 0, 3.0)
    scheduler.handle(events.Published(1), 4.0)
    (kill,) = of(events.Kill, scheduler.handle(events.Ticked(), 14.5))
    assert kill.why == "it was to load version 1, and has said nothing for 10 s"


def test_a_validation_is_served_before_steps_that_wait_and_holds_its_engine() -> None:
    """In flight too, where engines else take new weights under way; and again after a death."""
    rules = Rules(num_groups=2, group_size=1, total_steps=9, eta=1, is_pinned=False)
    scheduler, issues = serving(rules, engines=2, limits=EngineLimits(slots=1, restarts=1))
    assert [issue.key for issue in issues] == [(0, 0), (0, 1)]
    assert not scheduler.handle(events.Validate(0, 2, 3), 3.0), "all engines have something else under way"
    name = held_out(0)
    assert of(events.Load, answer(scheduler, issues[0], 0, 4.0)) == [events.Load(0, 0, name)]
    (first,) = of(events.Issue, scheduler.handle(events.Loaded(0, 0, name), 5.0))
    assert (first.key, first.samples) == (Key(name, 0), (0, 1, 2))
    assert of(events.Load, answer(scheduler, issues[1], 0, 6.0)) == [events.Load(1, 0, name)]
    out = scheduler.handle(events.Published(1), 7.0)
    assert not of(events.Load, out), "one engine has tickets of the validation, the other is on its way to them"
    (second,) = of(events.Issue, scheduler.handle(events.Loaded(1, 0, name), 8.0))
    out = scheduler.handle(events.Died(1, 0, "it was killed"), 9.0)
    out += answer(scheduler, first, name, 10.0)
    (again,) = of(events.Issue, out)
    assert (again.engine, again.key, again.samples) == (0, second.key, second.samples)
    out = answer(scheduler, again, name, 11.0)
    (whole,) = of(events.Validated, out)
    assert whole == (0, tuple((Key(name, i), tuple(f"{Key(name, i)}/{k}" for k in range(3))) for i in range(2)))
    assert not of(events.Deliver, out) and of(events.Load, out) == [events.Load(0, 0, 1)]


def test_an_answer_of_other_weights_than_its_validation_s_is_not_taken() -> None:
    rules = Rules(num_groups=1, group_size=1, total_steps=9, is_pinned=False)
    scheduler, issues = serving(rules)
    scheduler.handle(events.Validate(0, 1, 1), 3.0)
    answer(scheduler, issues[0], 0, 4.0)
    (issue,) = of(events.Issue, scheduler.handle(events.Loaded(0, 0, held_out(0)), 5.0))
    (kill,) = of(events.Kill, answer(scheduler, issue, 0, 6.0))
    of_validation = "the weights for the validation after step 0"
    assert kill.why == f"it sampled the validation after step 0 with version 0 instead of {of_validation}"


def test_weights_of_a_validation_that_are_late_have_no_negative_number() -> None:
    scheduler, issues = serving(Rules(num_groups=1, group_size=1, total_steps=9))
    scheduler.handle(events.Validate(0, 1, 1), 3.0)
    assert of(events.Load, answer(scheduler, issues[0], 0, 4.0)) == [events.Load(0, 0, held_out(0))]
    (kill,) = of(events.Kill, scheduler.handle(events.Ticked(), 14.5))
    assert kill.why == "it was to load the weights for the validation after step 0, and has said nothing for 10 s"
