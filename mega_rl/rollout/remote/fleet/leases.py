"""Engines on a cluster of the user's own outlive the trainer: the next one of the same run attaches to them."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_rl.fleet.executor import PlacesError
from mega_rl.rollout.remote.engine_process import EngineSpec, WorkerPlace
from mega_rl.rollout.remote.fleet.kept_engine import BESIDE, KeptEngine, digest
from mega_rl.rollout.remote.fleet.lease_actor import Fenced, LeaseActor, LeasedEngine
from mega_rl.rollout.remote.fleet.places import Places, Survivor
from mega_rl.rollout.remote.placement import wait_for_room
from mega_rl.rollout.remote.ray_room import bundle

RUN_NAME = ".fleet"  # a file of the output directory, with what tells the run from others on the same cluster
KEEPER = "keeper"  # its name in Ray
ANSWER_S = 120.0  # for a lease actor, its start included
HOLD_S = 30.0  # for engines that are asked whom they obey
BEAT_S = 5.0  # between two words to the lease actor; shorter with a short lease
NUM_TRIES = 3  # to find a lease actor, or to make one
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLease:
    """What engines that outlive the trainer are kept by."""

    namespace: str  # of Ray; of one run
    lease_s: float  # how long they wait for the next trainer


def keeping(output_dir: Path, lease_s: float) -> EngineLease | None:
    """For the run of this output directory; None if Ray is to end with this process, which starts it."""
    if not os.environ.get("RAY_ADDRESS"):
        return None
    path = output_dir / RUN_NAME
    if not path.exists():
        path.write_text(secrets.token_hex(16))
    name = f"{path.read_text()} {output_dir.resolve()}"  # a copy of the directory is another run
    return EngineLease(f"mega_rl_{hashlib.sha256(name.encode()).hexdigest()[:16]}", lease_s)


def numbered(engines: Collection[int], num_engines: int) -> dict[int, int]:
    """The number of each engine that a run of so many goes on with: its own where the run has that, else a free one."""
    kept = {engine: engine for engine in engines if engine < num_engines}
    free = [number for number in range(num_engines) if number not in kept]
    return kept | dict(zip(sorted(engine for engine in engines if engine >= num_engines), free, strict=False))


class Guarded:
    """A kept engine's actor, seen from the trainer that holds it: as the actor of an ``EngineProcess``."""

    def __init__(self, actor: Any, token: str) -> None:
        self.actor, self._token = actor, token

    def __getattr__(self, method: str) -> _GuardedMethod:
        return _GuardedMethod(self.actor.call, self._token, method)


@dataclass(frozen=True)
class _GuardedMethod:
    call: Any
    token: str
    method: str

    def options(self, **options: Any) -> _GuardedMethod:
        return _GuardedMethod(self.call.options(**options), self.token, self.method)

    def remote(self, *arguments: Any) -> Any:
        return self.call.remote(self.token, self.method, *arguments)


class LeasedPlaces(Places):
    """Places that a lease actor has for the run, with the engines of the trainer before in them."""

    def __init__(
        self, ray: Any, num_engines: int, size: int, options: Mapping[str, Any], spec: EngineSpec, kept_by: EngineLease
    ) -> None:
        """Take over what is of use, end the rest, and reserve what is missing.

        Without room for what is missing, engines that are of use stay for as long as they wait for a trainer.

        Args:
            spec: what engines must have been started with to be of use.

        Raises:
            InputError: there is no room.
        """
        self._ray, self._size, self._options, self._kept_by = ray, size, options, kept_by
        self._token = secrets.token_hex(8)
        self._num_spawned = 0
        self._lock = threading.Lock()  # of calls to the lease actor
        self._noted: dict[int, LeasedEngine] = {}
        self._groups: dict[int, Any] = {}
        self._keeper, found = self._attached()
        self._is_closing = threading.Event()
        threading.Thread(target=self._beat, name="lease of the engines", daemon=True).start()
        proved = self._proved(found, digest(spec))
        numbers = numbered(proved, num_engines)
        self._survivors = {number: proved[engine] for engine, number in numbers.items()}
        self.num_survivors = len(self._survivors)
        self._noted = {number: found[engine] for engine, number in numbers.items()}
        self._groups = {engine: kept.group for engine, kept in self._noted.items()}
        try:
            for engine in found.keys() - numbers.keys():
                self._ask("free", engine)
            if moved := {engine: number for engine, number in numbers.items() if engine != number}:
                self._ask("renumber", moved)
            for engine in range(num_engines):
                if engine not in self._groups:
                    wait_for_room(ray, self._reserve(engine), size, bundle(options))
        except Exception:
            if self._survivors:
                self._is_closing.set()  # the lease runs from now on
            else:
                self.close()
            raise

    def survivor(self, engine: int) -> Survivor | None:
        return self._survivors.pop(engine, None)

    def workers(self, engine: int) -> list[Any]:
        group = self._groups.get(engine)
        if group is None or self._ray.util.placement_group_table(group)["state"] == "REMOVED":
            group = self._reserve(engine)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        kind = self._ray.remote(concurrency_groups={BESIDE: 1})(KeptEngine)
        self._num_spawned += 1
        name = f"engine {engine}, life {self._token}-{self._num_spawned}"
        names = [f"{name}, worker {part}" for part in range(self._size)]
        options = {**self._options, "lifetime": "detached", "namespace": self._kept_by.namespace}
        actors = [
            kind.options(**options, name=name, scheduling_strategy=strategy(group, part)).remote(self._token)
            for part, name in enumerate(names)
        ]
        self._noted[engine] = LeasedEngine(group, names)
        self._keeper.note.remote(self._token, engine, self._noted[engine])
        return [Guarded(actor, self._token) for actor in actors]

    def reserve(self, engine: int) -> None:
        self._reserve(engine)

    def release(self, engine: int) -> None:
        self._noted.pop(engine, None)
        group = self._groups.pop(engine)
        with suppress(self._ray.exceptions.RayError):  # without a lease actor Ray frees it anyhow
            self._ask("free", engine)
            self._ray.util.remove_placement_group(group)  # a lease actor that took another's place may not know it

    def check(self) -> None:
        with suppress(
            self._ray.exceptions.RayError, PlacesError
        ):  # without a lease actor there is no other trainer either
            self._ask("hear")

    def kill(self, workers: Sequence[Any]) -> None:
        for worker in workers:
            self._ray.kill(worker.actor)

    def close(self) -> None:
        self._is_closing.set()
        with self._lock:
            self._ray.wait([self._keeper.end.remote(self._token)], timeout=ANSWER_S)

    def _attached(self, is_back: bool = False) -> tuple[Any, dict[int, LeasedEngine]]:
        """The run's lease actor, which obeys this trainer from now on, and what it has.

        Args:
            is_back: this trainer has attached before, and lost its lease actor: it takes nothing from another trainer.

        Raises:
            Fenced: another trainer has attached since.
        """
        remote_class = self._ray.remote(LeaseActor)
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        here = affinity(self._ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": KEEPER, "namespace": self._kept_by.namespace, "lifetime": "detached", "num_cpus": 0}
        for _ in range(NUM_TRIES):
            lease_actor = remote_class.options(**options, get_if_exists=True, scheduling_strategy=here).remote()
            try:
                attached = lease_actor.attach.remote(self._token, self._kept_by.lease_s, is_back)
                return lease_actor, self._ray.get(attached, timeout=ANSWER_S)
            except self._ray.exceptions.RayError as error:
                if isinstance(cause := getattr(error, "cause", None), Fenced):
                    raise cause from None
            if not is_back:  # else it may be another trainer's
                self._ray.kill(lease_actor)  # then Ray frees what it has reserved
            time.sleep(1)
        raise PlacesError(
            f"the lease actor of the rollout engines (Ray's namespace {self._kept_by.namespace}) gave no answer in "
            f"{ANSWER_S:g} s, {NUM_TRIES} times; look at the cluster with `ray status`"
        )

    def _proved(self, found: Mapping[int, LeasedEngine], wanted: str) -> dict[int, Survivor]:
        """The engines whose every worker answers, and is what a new one would be.

        Workers of one engine must have begun with the same calls: a trainer that dies amid a call of all has called
        some, which would wait for the others in a collective.
        """
        actors: dict[int, list[Any]] = {}
        for engine, kept in found.items():
            with suppress(ValueError):  # one is dead
                actors[engine] = [self._ray.get_actor(name, self._kept_by.namespace) for name in kept.actors]
        asked = {
            engine: [actor.hold.options(concurrency_group=BESIDE).remote(self._token) for actor in workers]
            for engine, workers in actors.items()
        }
        everything = [answer for answers in asked.values() for answer in answers]
        ready = self._ray.wait(everything, num_returns=len(everything), timeout=HOLD_S)[0] if everything else []
        survivors = {}
        for engine, answers in asked.items():
            if len(answers) != self._size or not set(answers) <= set(ready):
                continue
            with suppress(self._ray.exceptions.RayError):
                workers = self._ray.get(answers)
                if {worker.digest for worker in workers} == {wanted} and len({w.num_calls for w in workers}) == 1:
                    guarded = [Guarded(actor, self._token) for actor in actors[engine]]
                    survivors[engine] = Survivor(guarded, [WorkerPlace(w.node, w.process, w.pulse) for w in workers])
        return survivors

    def _reserve(self, engine: int) -> Any:
        self._groups[engine] = self._ask("reserve", engine, [bundle(self._options)] * self._size)
        return self._groups[engine]

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the lease actor, or a new one if it is gone, and wait.

        Raises:
            Fenced: another trainer has attached.
            RayError: no answer.
        """
        errors = self._ray.exceptions
        with self._lock:
            for is_last in (False, True):
                try:
                    call = getattr(self._keeper, method).remote(self._token, *arguments)
                    return self._ray.get(call, timeout=ANSWER_S)
                except errors.RayTaskError as error:
                    if isinstance(error.cause, Fenced):
                        raise error.cause from None
                    raise
                except errors.RayActorError:
                    if is_last:
                        raise
                    self._keeper, _ = self._attached(is_back=True)
                    for engine, kept in list(self._noted.items()):  # another thread may add to them
                        self._keeper.note.remote(self._token, engine, kept)

    def _beat(self) -> None:
        """Tell the lease actor that this trainer is there, until it is not or has lost the engines.

        No failure ends it: without it the engines would end under a trainer that is there.
        """
        has_warned = False
        while not self._is_closing.wait(min(BEAT_S, self._kept_by.lease_s / 5)):
            try:
                self._ask("hear")
            except Fenced:
                return
            except Exception as error:  # noqa: BLE001 - as said
                if not has_warned:
                    LOG.warning(
                        "the lease actor of the rollout engines could not be told that the run goes on: %s", error
                    )
                has_warned = True
