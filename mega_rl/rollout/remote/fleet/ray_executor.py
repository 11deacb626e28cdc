"""Engines in other processes at the scheduler's word, through Ray: no call waits for one, and none is collective."""

from __future__ import annotations

import atexit
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mega_rl import platform
from mega_rl.bridge.reshard.proof import Difference
from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.errors import shortened
from mega_rl.fleet.events import (
    Answered,
    Arriving,
    Died,
    Event,
    Issue,
    Kill,
    Load,
    Loaded,
    Missed,
    Release,
    Start,
    Started,
)
from mega_rl.fleet.executor import PlacesError, Requests, Whereabouts
from mega_rl.rollout.collect.handed_trajectories import OwnerAddress
from mega_rl.rollout.engine_checks import FleetChecks
from mega_rl.rollout.remote.engine_process import LoadResult, WorkerPlace
from mega_rl.rollout.remote.fleet.calls import Calls, Life, nothing
from mega_rl.rollout.remote.fleet.lease_actor import Fenced
from mega_rl.rollout.remote.fleet.leases import EngineLease, LeasedPlaces
from mega_rl.rollout.remote.fleet.nodes import Arrival, Nodes
from mega_rl.rollout.remote.fleet.partial_responses import LEAST_TOKENS
from mega_rl.rollout.remote.fleet.places import Places, Survivor
from mega_rl.rollout.remote.fleet.pulses import Pulses
from mega_rl.rollout.remote.load_checks import LoadChecks, own_load
from mega_rl.rollout.remote.placement import connected_ray, nodes
from mega_rl.rollout.remote.ray_room import bundle, check_room
from mega_rl.rollout.remote.weight_store import Location, Store, StoredVersion

LOG = logging.getLogger(__name__)
MAX_STEPS = 16  # of an engine between two words of it: so long it may take until it hears of new requests
MANY_WORKERS = 256  # of a fleet; with so many times more an engine makes so many times more steps between two words
NUM_AHEAD = 2  # calls to sample on that an engine has at a time, so that it need not wait for the next
RETRY_S = 30.0  # between an engine without a place and the next try: restarts are few, and Ray may be back soon
REST_S = 60.0  # for an engine that was attached to, which may be amid some steps or a load


@dataclass(frozen=True)
class Work:
    """What engines are asked, all of it in the scheduler's thread."""

    requests: Requests
    checks: FleetChecks
    picture_set: PictureSet | None = None  # has the pictures of prompts, whose encoded bytes go with the requests
    owners: tuple[OwnerAddress, ...] = ()  # to whom engines hand the responses of steps; (): to this process


def _started(decision: Start, slots: list[int | None]) -> list[Event]:
    return [Started(*decision, slots[0])]


def _accepted(decision: Start, life: Life, _: list[Any]) -> list[Event]:
    return [Started(*decision, life.num_slots)]


class RayExecutor:
    """A ``FleetExecutor``: every engine is some actors, in a placement group that its next life uses again."""

    def __init__(
        self,
        loads: LoadChecks,
        num_engines: int,
        work: Work,
        store: Store,
        stored: Mapping[int, StoredVersion],
        kept_by: EngineLease | None = None,
    ) -> None:
        """Find room for the engines; none is started.

        Args:
            loads: what engines are started with, and which may serve.
            store: of this node.
            stored: what is in it, by version; a version is there before a ``Load`` names it, and may be gone when it
                has come to the engine's node.
            kept_by: for engines that outlive this process; None: they end with it.

        Raises:
            InputError: there is no Ray, or no room in its cluster.
        """
        spec = loads.spec
        self._loads, self._work, self._stored = loads, work, stored
        # What an engine has of a response is asked for where another one may go on with it: an environment cannot be
        # moved, and a string that ends a response may begin in what one engine has and end in what the next adds.
        self._tells = spec.rollout.mode == "in_flight" and spec.episodes is None and not spec.rollout.stop
        size = spec.rollout.tensor_parallel_size
        self._ray, self._logs = connected_ray(num_engines * size)
        options = platform.current().actor_options
        # Each call to a worker costs this process 0.1 ms or more. Episodes may wait for tools in each step.
        is_large = spec.episodes is None and num_engines * size > MANY_WORKERS
        self._max_steps = MAX_STEPS * num_engines * size // MANY_WORKERS if is_large else MAX_STEPS
        self._lives: dict[int, Life] = {}
        self._calls = Calls(self._ray)
        self._to_ask: dict[int, Life] = {}  # engines that may have to be told to sample on
        self._said: list[Event] = []  # what follows from decisions at once
        self._placeless: dict[int, tuple[float, Died]] = {}  # engine -> when its death is told
        check_room(nodes(self._ray), bundle(options), num_engines, size)
        place = self._ray, num_engines, size, options
        self._places = Places(*place) if kept_by is None else LeasedPlaces(*place, spec, kept_by)
        self._nodes = Nodes(self._ray, store)
        self._pulses = Pulses(self._nodes)
        atexit.register(self.close)  # runs before Ray's own handler, which does not end the workers

    @property
    def num_survivors(self) -> int:
        """Engines of an earlier trainer that were of use when this one came."""
        return self._places.num_survivors

    def carry(self, decision: Start | Kill | Release | Load | Issue) -> None:
        if isinstance(decision, Start | Kill):
            self._placeless.pop(decision.engine, None)  # that life has ended
        if isinstance(decision, Start):
            self._start(decision)
            return
        if isinstance(decision, Release):
            try:
                with self._of_places():
                    self._places.release(decision.engine)
            except PlacesError as error:  # Ray frees it when this process ends
                LOG.warning("the place of rollout engine %d was not given back: %s", decision.engine, error)
            return
        life = self._lives.get(decision.engine)
        if life is None or life.number != decision.life:
            return
        if isinstance(decision, Kill):
            self._kill(decision.engine)
            self._replace_loader()
        elif isinstance(decision, Load):
            self._said += self._load(decision, life)
        else:
            self._issue(decision, life)

    def events(self, wait_s: float) -> list[Event]:
        """
        Raises:
            InputError: an engine refuses its configuration or fails a check, or Ray is gone.
            GateFailure: an engine fails a check.
        """
        self._nodes.check_own()
        for engine, (due_s, died) in list(self._placeless.items()):
            if time.monotonic() >= due_s:
                del self._placeless[engine]
                self._said.append(died)
        self._said += self._pulses.heard(self._lives.values())
        to_ask, self._to_ask = self._to_ask, {}
        for engine, life in to_ask.items():
            if self._lives.get(engine) is life:
                self._ask(engine, life)
        for arrival in self._nodes.heard():
            self._said += self._has_arrived(arrival)
        if self._said:
            said, self._said = self._said, []
            return said
        return self._calls.heard(wait_s)

    def reserve(self, engine: int) -> None:
        with self._of_places():
            self._places.reserve(engine)

    def has_room(self, engine: int) -> bool:
        with self._of_places():
            return self._places.has_room(engine)

    def free(self) -> str:
        with self._of_places():
            return self._places.free()

    def whereabouts(self) -> dict[int, Whereabouts]:
        with self._of_places():
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        return {
            engine: Whereabouts(addresses.get(life.node, life.node), tuple(life.processes))
            for engine, life in self._lives.items()
        }

    def close(self) -> None:
        if self._ray is None:
            return
        with suppress(Fenced):  # then they are another's
            for engine in list(self._lives):
                self._kill(engine)
        self._places.close()
        self._ray.shutdown()
        self._ray = None
        atexit.unregister(self.close)
        if self._logs is not None:  # those of a run that failed are left to be read
            shutil.rmtree(self._logs, ignore_errors=True)

    @contextmanager
    def _of_places(self) -> Iterator[None]:
        try:
            yield
        except (self._ray.exceptions.RayError, OSError) as error:
            why = shortened(f"{type(error).__name__}: {error}")
            raise PlacesError(f"Ray failed with {why}: look at the cluster with `ray status`, and ask again") from error

    # What the scheduler decides.

    def _start(self, decision: Start) -> None:
        engine = decision.engine
        if (survivor := self._places.survivor(engine)) is not None:
            self._attach(decision, survivor)
            return
        try:
            with self._of_places():
                workers = self._places.workers(engine)
        except PlacesError as error:
            died = Died(engine, decision.life, f"it has no place: {error}")
            self._placeless[engine] = time.monotonic() + RETRY_S, died
            return
        life = self._lives[engine] = self._new_life(decision, workers)
        self._calls.ask(life, "starting", "whereabouts", then=partial(self._is_placed, engine, life))
        self._calls.ask(life, "starting", "kind", self._loads.spec, then=partial(self._has_kind, decision, life))

    def _has_kind(self, decision: Start, life: Life, found: list[str]) -> list[Event]:
        spec = self._loads.spec_of(decision, " and ".join(dict.fromkeys(found)))
        point = life.workers[0].open.remote(spec)  # Ray gives its answer to the others
        starts = [worker.start.remote(spec, rank, point) for rank, worker in enumerate(life.workers)]
        attached = [worker.attach.remote(self._nodes.form, self._work.owners) for worker in life.workers]
        self._calls.wait(life, "starting", [*starts, *attached], partial(self._has_started, decision, life))
        return []

    def _has_started(self, decision: Start, life: Life, slots: list[int | None]) -> list[Event]:
        life.num_slots, form = slots[0], self._nodes.form
        questions = self._loads.questions(decision, form.workers, form.dtype)
        if questions is None:
            self._accept(self._loads.started(decision))
            self._replace_loader()
            return []
        pairs = zip(life.workers, questions, strict=True)
        answers = [worker.inspect.remote(own_load, *question) for worker, question in pairs]
        self._calls.wait(life, "showing what it has loaded", answers, partial(self._has_shown, decision))
        return []

    def _has_shown(self, decision: Start, found: list[str | Difference]) -> list[Event]:
        self._accept(self._loads.compared(decision, found))
        return []

    def _accept(self, starts: Sequence[Start]) -> None:
        for start in starts:
            life = self._lives[start.engine]
            self._calls.ask(life, "starting", "accept", then=partial(_accepted, start, life))

    def _replace_loader(self) -> None:
        """Where the engine that was to show what its kind loads has ended, one that waits for it begins anew."""
        for waiting in self._loads.abandoned():
            self._begin_anew(waiting)

    def _new_life(self, decision: Start, workers: list[Any]) -> Life:
        return Life(decision.engine, decision.life, workers, checks=self._work.checks.of_life(decision.engine))

    def _attach(self, decision: Start, survivor: Survivor) -> None:
        """Begin with an engine that is there: what it still does is dropped; one that cannot is started anew.

        Only an engine that the trainer before has accepted is one, so what engines of its kind load was compared.
        It has said that it is there, but in a thread beside the one that works, which may be stuck.
        """
        engine = decision.engine
        life = self._lives[engine] = self._new_life(decision, survivor.workers)
        self._said += self._is_placed(engine, life, survivor.whereabouts)
        rests = [worker.rest.remote() for worker in survivor.workers]
        rests += [worker.attach.remote(self._nodes.form, self._work.owners) for worker in survivor.workers]
        then, instead = partial(_started, decision), partial(self._begin_anew, decision)
        self._calls.wait(life, "dropping its old work", rests, then, instead, REST_S)

    def _begin_anew(self, decision: Start) -> list[Event]:
        self._kill(decision.engine)
        self._start(decision)
        return []

    def _is_placed(self, engine: int, life: Life, found: list[WorkerPlace]) -> list[Event]:
        life.node, life.processes = found[0].node, [place.process for place in found]
        life.pulses_at = [(place.process, place.pulse) for place in found]
        if (met := self._nodes.meet(life.node)) is not None:
            self._calls.wait(life, "starting, and its node was taking memory for the weights", [met], nothing)
        return []

    def _kill(self, engine: int) -> None:
        """
        Raises:
            Fenced: it is not this trainer's any more.
        """
        self._places.check()
        life = self._lives.pop(engine)
        self._calls.drop(life)
        self._loads.left(Start(engine, life.number))
        if life.processes:
            self._nodes.kill(life.node, life.processes)
        self._nodes.done(engine)
        if life.loading is not None:
            self._nodes.forget(life.node, life.loading)
        self._places.kill(life.workers)

    def _load(self, decision: Load, life: Life) -> list[Event]:
        stored = self._stored.get(decision.version)
        if stored is None:
            return self._missed(decision)
        life.loading = decision.version
        # A call that Ray holds back for its arguments would hold back all later ones to the engine.
        location = self._nodes.location(decision, life.node, stored)
        return [] if location is None else self._take(decision, location)

    def _has_arrived(self, arrival: Arrival) -> list[Event]:
        """There is something to say of weights on their way to an engine's node."""
        decision = arrival.load
        if arrival.why is not None:
            self._calls.drop(self._lives[decision.engine])
            return [Died(decision.engine, decision.life, arrival.why)]
        return [Arriving(*decision)] if arrival.location is None else self._take(decision, arrival.location)

    def _take(self, decision: Load, location: Location) -> list[Event]:
        """Have an engine load a version that is on its node, if newer ones have not taken its place meanwhile."""
        stored = self._stored.get(decision.version)  # which the loop's thread changes
        if stored is None:
            return self._missed(decision)
        life = self._lives[decision.engine]
        life.is_held = bool(life.checks.questions(self._work.checks.held(decision.version)))
        loads = [worker.load.remote(location, stored.of(rank)) for rank, worker in enumerate(life.workers)]
        self._calls.wait(life, "loading weights", loads, partial(self._has_loaded, decision, life))
        return []

    def _missed(self, decision: Load, is_torn: bool = False) -> list[Event]:
        life = self._lives[decision.engine]
        life.loading, life.is_held = None, False
        self._to_ask[decision.engine] = life
        self._nodes.done(decision.engine)
        return [Missed(*decision, is_torn)]

    def _issue(self, decision: Issue, life: Life) -> None:
        requests, picture_set = self._work.requests(decision.key, decision.samples), self._work.picture_set
        if self._tells and decision.key.step >= 0:  # a validation is pinned
            requests = life.partial.begin(decision, requests, time.monotonic())
            pairs = zip(decision.samples, decision.prefixes, strict=True)
            life.continued |= {(decision.attempt, sample) for sample, prefix in pairs if prefix is not None}
        life.load += len(requests)
        self._to_ask[decision.engine] = life
        shown = {} if picture_set is None else picture_set.encoded(request.prompt for request in requests)
        pictures = [self._ray.put(shown)] if shown else []
        ticket = decision.key.step, decision.attempt, decision.samples
        self._calls.ask(life, "taking requests", "issue", *ticket, requests, *pictures)

    # What the engines say.

    def _ask(self, engine: int, life: Life) -> None:
        """Have an engine with work sample on."""
        may_sample = not life.is_torn and not life.is_held
        while life.load and may_sample and life.num_sampling < NUM_AHEAD:
            life.num_sampling += 1
            self._calls.ask(life, "sampling", "proceed", self._max_steps, then=partial(self._has_sampled, engine, life))
        if life.partial.is_due(time.monotonic()):
            life.partial.ask(time.monotonic())
            then = partial(self._has_grown, engine, life)
            self._calls.ask(life, "telling what it has", "grown", LEAST_TOKENS, then=then)

    def _has_loaded(self, decision: Load, life: Life, answers: list[LoadResult]) -> list[Event]:
        """Ask the engine what it must show of its weights, before it is told to have them or samples with them."""
        result, held = min(answers), self._work.checks.held(decision.version)
        life.is_torn = result is LoadResult.TORN or (life.is_torn and result is LoadResult.MISSED)
        if result is not LoadResult.WHOLE:
            return self._missed(decision, life.is_torn)
        if not (questions := life.checks.questions(held)):
            return self._serves(decision, life)
        asked = [worker.first_logprobs.remote(*question) for question in questions for worker in life.workers]

        def heard(answers: list[Any]) -> list[Event]:
            of_engine = [answer for (answer,) in answers[:: len(life.workers)]]
            life.checks.hear(held, dict(zip(questions, of_engine, strict=True)))
            return self._serves(decision, life)

        self._calls.wait(life, "answering what it is asked of its weights", asked, heard)
        return []

    def _serves(self, decision: Load, life: Life) -> list[Event]:
        life.loading, life.is_held = None, False
        self._to_ask[decision.engine] = life
        self._nodes.done(decision.engine)
        return [Loaded(*decision)]

    def _has_sampled(self, engine: int, life: Life, answers: list[Any]) -> list[Event]:
        life.num_sampling -= 1
        life.load -= len(answers[0])
        self._to_ask[engine] = life
        said: list[Event] = []
        for attempt, sample, trajectory in answers[0]:
            life.partial.end(attempt, sample)
            is_own = (attempt, sample) not in life.continued
            life.continued.discard((attempt, sample))
            named = replace(trajectory, engine=engine) if is_own else trajectory
            said.append(Answered(engine, life.number, attempt, sample, named.oldest_version, named))
        return said

    def _has_grown(self, engine: int, life: Life, answers: list[Any]) -> list[Event]:
        return [*life.partial.grow(engine, life.number, answers[0])]
