"""Engines are asked about, added and removed while a scheduler's thread goes on, by files in the output directory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mega_rl.errors import InputError
from mega_rl.fleet import events
from mega_rl.fleet.engines import Condition
from mega_rl.fleet.executor import PlacesError
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.tickets import held_out
from mega_rl.observe.timeline import read_trace
from mega_rl.rollout.scheduling import control_requests, fleet_requests
from mega_rl.rollout.scheduling.control_requests import ControlRequests
from mega_rl.rollout.scheduling.fleet_record import TIMELINE, FleetRecord
from mega_rl.rollout.scheduling.fleet_requests import ANSWER, DIRECTORY, QUESTION, ControlQuestion, Mailbox, ask
from mega_rl.rollout.scheduling.scheduler_thread import SchedulerThread
from tests.pretended.fleet_engines import PretendedExecutor
from tests.unit.rollout.scheduling.test_scheduler_thread import MANY_LIVES, RULES, differ, requests, rest, score


@contextmanager
def running(run: Path, engines: int = 2, room: int = 0) -> Iterator[tuple[SchedulerThread, PretendedExecutor]]:
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("")
    executor = PretendedExecutor(requests, lambda v: v, True, seed=3, death=20, room=room)
    thread = SchedulerThread(FleetScheduler(RULES, MANY_LIVES, range(engines)), executor, score, differ, {}, 60.0, run)
    try:
        yield thread, executor
    finally:
        thread.close()


def numbers(status: dict[str, Any], *conditions: str) -> list[int]:
    return [e["engine"] for e in status["engines"] if (e["condition"] in conditions) == bool(conditions)]


def test_what_is_learnt_does_not_change_with_engines_that_join_and_leave(tmp_path: Path) -> None:
    with running(tmp_path / "plain", engines=1) as (thread, _):
        whole = rest(thread)
    run = tmp_path / "changed"
    with running(run, engines=2, room=3) as (thread, executor):
        found = [thread.take(0)]
        status = ask(run, ControlQuestion("add", count=3, wait_s=30.0))
        assert [e["engine"] for e in status["engines"]] == [0, 1, 2, 3, 4] and executor.room == 0
        removed = ask(run, ControlQuestion("remove", engines=(0, 3)))
        assert numbers(removed, "out of use") == [0, 3] and executor.num_released == executor.room == 2
        with pytest.raises(InputError, match="3 of 3 engines cannot be removed, since at least one must go on"):
            ask(run, ControlQuestion("remove", count=3))
        with pytest.raises(InputError, match="there is no engine 0 in use: name some of 1, 2, 4"):
            ask(run, ControlQuestion("remove", engines=(0,)))
        with pytest.raises(
            InputError, match="no room for 9 more engines within 0 s: there is room for -7 engines; none"
        ):
            ask(run, ControlQuestion("add", count=9))
        assert executor.room == 2, "what was reserved of it has been given back"
        thread.published(1)
        found.append(thread.take(1))
        assert len(numbers(ask(run, ControlQuestion("remove", count=2)), "out of use")) == 4
        for step in (2, 3):
            thread.published(step)
            found.append(thread.take(step))
        status = ask(run, ControlQuestion("status"))
        thread.record.of_trainer("update", 0.5, step=3)  # though version 3 has been published
    figures = thread.record.figures()  # now that no engine dies any more
    assert found == whole
    (last,) = [e for e in status["engines"] if e["condition"] != "out of use"]
    assert last["node"] == "here"
    assert (status["mode"], status["max_staleness"], status["trained_steps"], status["total_steps"]) == (
        "pinned",
        1,
        3,
        4,
    )
    assert status["steps_in_the_air"] == [4] and last["staleness"] in (None, *range(4))
    assert (figures["fleet/engines"], figures["fleet/joined"], figures["fleet/left"]) == (1, 3, 4)
    assert figures["fleet/restarts"] == executor.num_deaths and figures["fleet/steps_in_the_air"] == 1
    assert 0 < figures["fleet/busy_fraction"] <= 1 and 0 <= figures["fleet/loading_fraction"] <= 1
    activities = read_trace(run / DIRECTORY / TIMELINE)
    changes = [a.name for a in activities if a.lane == "fleet" and a.name.endswith(("joined", "left"))]
    assert changes[:5] == ["engine 2 joined", "engine 3 joined", "engine 4 joined", "engine 0 left", "engine 3 left"]
    assert len(changes) == 7
    assert {a.name for a in activities if a.lane == "engine 4"} >= {"starting", "loading weights"}
    assert {a.details["version"] for a in activities if a.name == "sampling"} == {0, 1, 2}
    (update,) = [a for a in activities if a.lane == "trainer"]
    assert (update.name, update.details) == ("update", {"step": 2})
    assert update.end_s - update.begin_s == pytest.approx(0.5, abs=1e-3)


def test_an_ended_run_and_a_directory_without_one_are_said_in_a_sentence(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(InputError, match="is not the output directory of a run: it has no config.yaml"):
        ask(run, ControlQuestion("status"))
    run.mkdir()
    (run / "config.yaml").write_text("")
    with pytest.raises(InputError, match="has no fleet: .* rollout.mode=pinned or in_flight"):
        ask(run, ControlQuestion("status"))
    with running(run):
        assert ask(run, ControlQuestion("status"))["engines"]
    with pytest.raises(InputError, match="no run goes on in .*: it has ended"):
        ask(run, ControlQuestion("status"))
    assert not [*(run / DIRECTORY).glob(f"*{QUESTION}"), *(run / DIRECTORY).glob(f"*{ANSWER}")], "nothing is left"
    with running(run):  # as after a resume
        assert ask(run, ControlQuestion("status"))["engines"]
    names = [a.name for a in read_trace(run / DIRECTORY / TIMELINE) if a.lane == "engine 0"]
    assert names.count("starting") >= 2, "the timeline goes on"


@contextmanager
def sitting(
    run: Path, executor: PretendedExecutor | None = None, handle: Callable[[events.Event], None] = lambda event: None
) -> Iterator[tuple[ControlRequests, FleetScheduler, FleetRecord]]:
    """The control of three engines without a thread."""
    scheduler = FleetScheduler(RULES, MANY_LIVES, range(3))
    record = FleetRecord(scheduler, run)
    record.hear(None, scheduler.begin(0.0))
    executor = executor or PretendedExecutor(requests, lambda v: v, True)
    control = ControlRequests(Mailbox(run), scheduler, executor, record, handle)
    try:
        yield control, scheduler, record
    finally:
        control.close()


def attended(control: ControlRequests, run: Path, question: ControlQuestion) -> dict[str, Any]:
    """What it answers at once."""
    (run / DIRECTORY / f"a{QUESTION}").write_text(json.dumps(asdict(question)))
    control.attend()
    answer = run / DIRECTORY / f"a{ANSWER}"
    found: dict[str, Any] = json.loads(answer.read_text())
    answer.unlink()
    return found


class Away(PretendedExecutor):
    """What has the places fails in one of its methods, when it has been called so many times."""

    def __init__(self, method: str, calls: int = 0, error: Exception | None = None) -> None:
        super().__init__(requests, lambda v: v, True, room=5)
        self._left, whole = calls, getattr(self, method)

        def fail(*arguments: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise error or PlacesError("Ray is away: look")
            return whole(*arguments)

        setattr(self, method, fail)


@pytest.mark.parametrize(("method", "calls", "released"), [("reserve", 2, 2), ("has_room", 1, 3)])
def test_places_that_cannot_be_had_are_an_answer(tmp_path: Path, method: str, calls: int, released: int) -> None:
    executor = Away(method, calls)
    with sitting(tmp_path, executor) as (control, _, _):
        assert attended(control, tmp_path, ControlQuestion("add", count=3, wait_s=60.0)) == {
            "error": "Ray is away: look"
        }
        assert executor.num_released == released and executor.room == 5, "what was reserved has been given back"
        assert len(attended(control, tmp_path, ControlQuestion("status"))["answer"]["engines"]) == 3


def test_a_status_without_the_cluster_says_what_is_known(tmp_path: Path) -> None:
    with sitting(tmp_path, Away("whereabouts")) as (control, _, _):
        engines = attended(control, tmp_path, ControlQuestion("status"))["answer"]["engines"]
    assert [engine["node"] for engine in engines] == ["", "", ""]


def test_room_is_asked_for_within_a_bound(tmp_path: Path) -> None:
    executor = PretendedExecutor(requests, lambda v: v, True)
    with sitting(tmp_path, executor) as (control, _, _):
        found = attended(control, tmp_path, ControlQuestion("add", count=100_000, wait_s=60.0))
        assert found == {"error": "at most 1,024 engines can be waited for: ask for fewer"} and executor.room == 0
        (tmp_path / DIRECTORY / f"0{QUESTION}").write_text(
            json.dumps(asdict(ControlQuestion("add", count=3, wait_s=60.0)))
        )
        found = attended(control, tmp_path, ControlQuestion("add", count=1022))
        assert found["error"] == "at most 1,024 engines can be waited for, and 3 are waited for already: ask for fewer"


def test_each_look_at_room_asks_a_bounded_number_of_times_and_once_of_what_is_there(tmp_path: Path) -> None:
    asked: list[int] = []
    joined: list[events.Event] = []

    class Roomy(PretendedExecutor):
        def has_room(self, engine: int) -> bool:
            asked.append(engine)
            return super().has_room(engine)

    count = 2 * control_requests.MAX_LOOKS + 5
    executor = Roomy(requests, lambda v: v, True, room=count)
    with sitting(tmp_path, executor, joined.append) as (control, _, _):
        (tmp_path / DIRECTORY / f"a{QUESTION}").write_text(json.dumps(asdict(ControlQuestion("add", count=count))))
        for looks in (1, 2, 3):
            control.attend()
            assert len(asked) == min(count, looks * control_requests.MAX_LOOKS)
            assert (tmp_path / DIRECTORY / f"a{ANSWER}").exists() == (looks == 3), "nothing is refused before"
        assert len(set(asked)) == len(asked) == len(joined)


def test_what_ends_a_run_is_no_answer_to_a_question(tmp_path: Path) -> None:
    """Else what else was decided would be lost."""

    def handle(event: events.Event) -> None:
        raise InputError("a picture cannot be read")

    with (
        sitting(tmp_path, handle=handle) as (control, _, _),
        pytest.raises(InputError, match="a picture cannot be read"),
    ):
        attended(control, tmp_path, ControlQuestion("remove", count=1))
    fenced = Away("reserve", error=InputError("another trainer has them"))
    with sitting(tmp_path, fenced) as (control, _, _), pytest.raises(InputError, match="another trainer has them"):
        attended(control, tmp_path, ControlQuestion("add", count=1))


def test_a_directory_that_is_away_is_looked_into_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = Mailbox(tmp_path)
    (tmp_path / DIRECTORY / f"a{QUESTION}").write_text(json.dumps(asdict(ControlQuestion("status"))))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", lambda *_: (_ for _ in ()).throw(OSError("stale")))
        assert mailbox.questions() == []
    assert mailbox.questions() == [("a", ControlQuestion("status"))]
    mailbox.close()


def test_a_run_whose_timeline_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY / TIMELINE).mkdir(parents=True)
    with (
        pytest.raises(InputError, match="fleet cannot be written .*: make it a directory of your own"),
        running(tmp_path),
    ):
        pass


def test_weights_of_a_validation_are_named(tmp_path: Path) -> None:
    with sitting(tmp_path) as (control, scheduler, record):
        for engine, version in enumerate((held_out(3), 2)):
            scheduler.engines[engine].condition, scheduler.engines[engine].load = Condition.SERVING, 1
            scheduler.engines[engine].version = version
            record.hear(events.Started(engine, 0), [])
        status = control.status()["engines"]
    assert [(e["version"], e["staleness"]) for e in status] == [("validation of 3", None), (2, -2), (None, None)]
    record.close()
    sampled = [a.details["version"] for a in read_trace(tmp_path / TIMELINE) if a.name == "sampling"]
    assert sampled == ["validation of 3", 2]


def later(do: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=do)
    thread.start()
    return thread


def test_a_run_that_ends_or_is_silent_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    mailbox = Mailbox(tmp_path)
    with pytest.raises(InputError, match="has not answered in 0.2 s"):
        ask(tmp_path, ControlQuestion("status"), patience_s=0.2)
    assert mailbox.questions() == [], "it was taken back"
    sentences: list[str] = []

    def asking() -> None:
        try:
            ask(tmp_path, ControlQuestion("status"))
        except InputError as error:
            sentences.append(str(error))

    thread = later(asking)
    while not list((tmp_path / DIRECTORY).glob(f"*{QUESTION}")):
        time.sleep(0.01)
    mailbox._lock.close()  # killed
    thread.join(60)
    assert sentences == [f"the run in {tmp_path} has ended before it answered"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xff\x00", "cannot be read"),
        (b"[" * 50_000, "cannot be read"),
        (b"x" * 70_000, "at most 65536 bytes"),
        (b"[1]", "has a command"),
        (b'{"command": "status", "run": 1}', "no other keys"),
        (b'{"command": "stop"}', "no command 'stop'"),
        (b'{"command": ["add"]}', "no command"),
        (b'{"command": "add", "count": -1}', "-1 is no number of engines"),
        (b'{"command": "add", "count": true}', "True is no number"),
        (b'{"command": "add", "count": 1e300}', "is no number"),
        (b'{"command": "add"}', "nothing is asked for"),
        (b'{"command": "add", "count": 1, "wait_s": NaN}', "nan is no time"),
        (b'{"command": "remove", "engines": "12"}', "give a list"),
        (b'{"command": "remove", "engines": [[1]]}', "is no number"),
    ],
)
def test_what_is_no_question_is_answered_with_why(tmp_path: Path, text: bytes, why: str) -> None:
    mailbox = Mailbox(tmp_path)
    (tmp_path / DIRECTORY / f"a{QUESTION}").write_bytes(text)
    assert mailbox.questions() == []
    assert why in json.loads((tmp_path / DIRECTORY / f"a{ANSWER}").read_text())["error"]
    mailbox.close()


def test_the_lock_is_taken_though_somebody_looks_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Mailbox(tmp_path).close()
    lock = (tmp_path / DIRECTORY / fleet_requests.LOCK).open()
    fleet_requests.fcntl.flock(lock, fleet_requests.fcntl.LOCK_SH)
    monkeypatch.setattr(fleet_requests.time, "sleep", lambda _: lock.close())
    mailbox = Mailbox(tmp_path)
    assert fleet_requests._is_held(tmp_path / DIRECTORY / fleet_requests.LOCK)
    mailbox.close()
