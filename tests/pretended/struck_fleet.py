"""Runs whose engines are processes of Ray that are killed and stopped from outside: what they do is written down.

``tests/distributed/fleet/run_struck_fleet.py`` is the run; whoever strikes it reads the lines of its log with ``Told``.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mega_rl.fleet import events
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.rollout.remote import placement
from mega_rl.rollout.remote.fleet import leases, partial_responses, ray_executor
from mega_rl.rollout.remote.fleet.calls import Life
from mega_rl.rollout.remote.fleet.ray_executor import RayExecutor, Work
from mega_rl.rollout.remote.load_checks import LoadChecks
from mega_rl.rollout.remote.weight_store import Location, Store, StoredVersion, take
from mega_rl.stages.sampling import fleet_batches, sampling
from mega_rl.stages.sampling.batch_builder import Batch
from mega_rl.stages.sampling.fleet_batches import FleetBatches
from tests.launching.launch import Running
from tests.launching.training import STRUCK_LOG
from tests.pretended.engine_process import PretendedKeptProcess, PretendedProcess, digest, empty_parameters
from tests.pretended.fleet_engines import PretendedExecutor

LOG = STRUCK_LOG
IDLE_S = 0.1  # a shorter time without work is not written down


def write(what: str, **values: Any) -> None:
    """One line, whole or not at all, whoever kills this process."""
    line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), "what": what, **values}) + "\n"
    with Path(os.environ[LOG]).open("ab", buffering=0) as file:
        file.write(line.encode())


class WatchedExecutor(RayExecutor):
    """Writes down what the scheduler decides and what engines say."""

    def carry(self, decision: events.Start | events.Kill | events.Release | events.Load | events.Issue) -> None:
        note(decision)
        super().carry(decision)

    def events(self, wait_s: float) -> list[events.Event]:
        said = super().events(wait_s)
        for event in said:
            note(event)
        return said

    def _is_placed(self, engine: int, life: Life, found: list[tuple[str, int]]) -> list[events.Event]:
        said = super()._is_placed(engine, life, found)
        write("Placed", engine=engine, life=life.number, processes=life.processes, node=life.node)
        return said

    def _take(self, decision: events.Load, location: Location) -> list[events.Event]:
        """``store``: the process whose memory the engine takes weights from."""
        life = self._lives[decision.engine]
        write("Taken", engine=decision.engine, version=decision.version, node=life.node, store=location.process)
        return super()._take(decision, location)


class PatientExecutor(RayExecutor):
    """Has an engine wait for newer weights that the rest of its responses may have, once these have a few tokens.

    So weights change within responses, whoever is faster. Of one engine, which is killed as soon as it has told of a
    response of the second step: the engine after it is to go on with that.
    """

    def __init__(self, *arguments: Any) -> None:
        self._steps: dict[tuple[int, int], int] = {}  # of the responses under way, by attempt and sample
        self._version, self._has_begun, self._is_struck = -1, False, False
        super().__init__(*arguments)

    def carry(self, decision: events.Start | events.Kill | events.Release | events.Load | events.Issue) -> None:
        if isinstance(decision, events.Issue):
            self._steps |= {(decision.attempt, sample): decision.key.step for sample in decision.samples}
            for prefix in decision.prefixes:
                if prefix is not None:
                    print(f"GOES ON {prefix.num_sampled} {len(prefix.prompt.images)}", flush=True)
        elif isinstance(decision, events.Kill):
            self._steps.clear()
        super().carry(decision)

    def events(self, wait_s: float) -> list[events.Event]:
        self._to_ask |= self._lives  # whoever was not asked the last time
        said = super().events(wait_s)
        for event in said:
            if isinstance(event, events.Answered):
                del self._steps[event.attempt, event.sample]
            elif isinstance(event, events.Loaded):
                self._version, self._has_begun = event.version, False
            elif isinstance(event, events.Advanced) and not self._is_struck and self._steps[event[2:4]]:
                self._is_struck = True
                os.kill(self._lives[event.engine].processes[0], signal.SIGKILL)
        return said

    def _ask(self, engine: int, life: Life) -> None:
        may_have_newer = bool(self._steps) and min(self._steps.values()) > self._version
        if may_have_newer and self._has_begun:
            return
        self._has_begun = may_have_newer
        super()._ask(engine, life)


def note(word: Any) -> None:
    if not isinstance(word, events.Pulsed):
        plain = {name: value for name, value in word._asdict().items() if isinstance(value, int | str)}
        step = {"step": word.key.step} if isinstance(word, events.Issue) else {}
        write(type(word).__name__, **plain, **step)


class WatchedScheduler(FleetScheduler):
    """Writes down how long an engine that serves had nothing to do while responses waited."""

    _idle: dict[int, float]  # engine -> since when

    def handle(self, event: events.Event, now: float) -> list[events.Decision]:
        decisions = super().handle(event, now)
        before = getattr(self, "_idle", {})
        idle = {e.number for e in self.engines.values() if e.serves and not e.load and self.window.num_waiting}
        for engine, since in before.items():
            if engine not in idle and now - since > IDLE_S:
                write("idle", engine=engine, seconds=now - since)
        self._idle = {engine: before.get(engine, now) for engine in idle}
        for decision in decisions:
            if isinstance(decision, events.Deliver):
                write("Deliver", step=decision.step)
        return decisions


def calm_executor(
    checks: LoadChecks,
    num_engines: int,
    work: Work,
    store: Store,
    stored: Mapping[int, StoredVersion],
    *_: object,
) -> PretendedExecutor:
    """Engines of this process that have the tokens of ``PretendedProcess``, in the place of a ``RayExecutor``."""

    @cache
    def taken(version: int) -> int:
        live = empty_parameters(store.form)
        take(store, 0, store.form.slot(version), stored[version].of(0), live)
        return digest(live)

    return PretendedExecutor(work.requests, taken, is_pinned=True)


def hold(steps: Sequence[int]) -> None:
    """Have the loop wait before these steps until there is a file that ``go`` makes."""
    build = FleetBatches.build

    def held(self: FleetBatches, step: int) -> Batch:
        if step in steps:
            write("Held", step=step)
            while not Path(f"{os.environ[LOG]}.{step}").exists():
                time.sleep(0.05)
        return build(self, step)

    FleetBatches.build = held  # type: ignore[method-assign]


def go(log: Path, step: int) -> None:
    Path(f"{log}.{step}").touch()


def watch(kind: str, held: Sequence[int] = ()) -> None:
    """Change the run in this process before it begins; ``kind``: of its engines, calm, pretended, vllm or patient.

    Those of vllm and patient are real.
    """
    if kind == "patient":
        sampling.RayExecutor = PatientExecutor  # type: ignore[misc]
        ray_executor.MAX_STEPS, ray_executor.NUM_AHEAD = 2, 1
        ray_executor.LEAST_TOKENS, partial_responses.TELL_S = 1, 0.0
        return
    sampling.RayExecutor = calm_executor if kind == "calm" else WatchedExecutor  # type: ignore[misc, assignment]
    fleet_batches.FleetScheduler = WatchedScheduler  # type: ignore[misc]
    if kind == "pretended":  # on a Ray of the run, or on a cluster
        placement.EngineProcess = PretendedProcess  # type: ignore[misc]
        leases.KeptEngine = PretendedKeptProcess  # type: ignore[misc]
    hold(held)


class Told:
    """The lines of a run so far, and which engines they say there are."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[dict[str, Any]] = []
        self.alive: dict[int, dict[str, Any]] = {}  # engine -> life, processes, whether it serves
        path.touch()

    def read(self) -> list[dict[str, Any]]:
        """The new ones."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        self._offset += len(whole) + bool(whole)
        new = [json.loads(line) for line in whole.splitlines() if line]
        for line in new:
            self._take(line)
        self.lines += new
        return new

    def has(self, what: str, **values: Any) -> bool:
        return any(line["what"] == what and values.items() <= line.items() for line in self.lines)

    def ended(self) -> set[int]:
        """Engines of which a life was ended."""
        return {line["engine"] for line in self.lines if line["what"] == "Kill"}

    def wait_for(self, is_so: Callable[[], bool], running: Running, limit_s: float = 600.0) -> None:
        """Read on until it is so; an assertion with the run's output if that ends before."""
        until = time.monotonic() + limit_s
        while not is_so():
            is_over = running.process.poll() is not None or time.monotonic() > until
            assert not is_over, f"{self.lines[-5:]}\n{running.output()[-4000:]}"
            time.sleep(0.05)
            self.read()

    def _take(self, line: dict[str, Any]) -> None:
        what, engine = line["what"], line.get("engine")
        if what == "Start":
            self.alive[engine] = {"life": line["life"], "processes": [], "node": "", "serves": False}
        elif what == "Kill":
            self.alive.pop(engine, None)
        elif engine in self.alive and self.alive[engine]["life"] == line.get("life"):
            if what == "Placed":
                self.alive[engine] |= {"processes": line["processes"], "node": line.get("node", "")}
            self.alive[engine]["serves"] |= what == "Loaded"
