"""Engines in other processes at the steward's word, through Ray: no call waits for one, and none is collective."""

from __future__ import annotations

import atexit
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mega_rl import platform
from mega_rl.errors import InputError
from mega_rl.fleet.carrier import Requests
from mega_rl.fleet.events import Answered, Died, Event, Issue, Kill, Load, Loaded, Missed, Pulsed, Start, Started
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.nodes import Nodes
from mega_rl.rollout.remote.placement import connected_ray, nodes, reserve, spawn
from mega_rl.rollout.remote.ray_room import bundle, check_room
from mega_rl.rollout.remote.weight_store import Location, Store, Stored
from mega_rl.rollout.vllm.options import without_weights

MAX_STEPS = 16  # of an engine between two words of it: so long it may take until it hears of new requests
NUM_AHEAD = 2  # calls to sample on that an engine has at a time, so that it need not wait for the next
PULSE = "pulse"  # a set of calls that do not wait for others
PULSE_S = 1.0  # between two questions how far an engine is


@dataclass
class Life:
    """One life of an engine: its processes."""

    number: int
    workers: list[Any]
    node: str = ""  # "" until it is known
    processes: list[int] = field(default_factory=list)
    loading: int | None = None  # the version that it has been told to load
    load: int = 0  # responses under way
    num_sampling: int = 0  # calls to sample on that have no answer yet
    pulsed_s: float = -PULSE_S  # when it was last asked how far it is
    is_asked: bool = False  # and has not answered


@dataclass
class Call:
    """What all workers of an engine were asked."""

    engine: int
    life: int
    doing: str
    answers: list[Any]  # Ray's references, by worker
    left: set[Any]
    then: Callable[[list[Any]], list[Event]]
    instead: Callable[[], list[Event]] | None = None  # of the engine's death, if it fails


def _nothing(answers: list[Any]) -> list[Event]:
    """What follows from answers that say nothing."""
    return []


class RayCarrier:
    """A ``Carrier``: every engine is some actors, in a placement group that its next life uses again."""

    def __init__(
        self, spec: EngineSpec, num_engines: int, requests: Requests, store: Store, stored: Mapping[int, Stored]
    ) -> None:
        """Find room for the engines; none is started.

        Args:
            store: of this node.
            stored: what is in it, by version; a version is there before a ``Load`` names it, and may be gone when it
                has come to the engine's node.

        Raises:
            InputError: there is no Ray, or no room in its cluster.
        """
        self._spec, self._requests, self._stored = spec, requests, stored
        self._size = spec.rollout.tensor_parallel_size
        self._ray, self._logs = connected_ray(num_engines * self._size)
        atexit.register(self.close)  # runs before Ray's own handler, which does not end the workers
        self._options = platform.current().actor_options
        self._lives: dict[int, Life] = {}
        self._calls: list[Call] = []
        self._said: list[Event] = []  # what follows from decisions at once
        check_room(nodes(self._ray), bundle(self._options), num_engines, self._size)
        self._places = {engine: reserve(self._ray, self._size, self._options) for engine in range(num_engines)}
        self._nodes = Nodes(self._ray, store)

    def carry(self, decision: Start | Kill | Load | Issue) -> None:
        if isinstance(decision, Start):
            self._start(decision)
            return
        life = self._lives.get(decision.engine)
        if life is None or life.number != decision.life:
            return
        if isinstance(decision, Kill):
            self._kill(decision.engine)
        elif isinstance(decision, Load):
            self._said += self._load(decision, life)
        else:
            self._issue(decision, life)

    def events(self, wait_s: float) -> list[Event]:
        """
        Raises:
            InputError: an engine refuses its configuration.
        """
        for engine, life in self._lives.items():
            self._ask(engine, life)
        if self._said:
            said, self._said = self._said, []
            return said
        # Once each: engines of a node wait for the same copy of weights to it, and Ray refuses to hear of it twice.
        pending = list(dict.fromkeys(answer for call in self._calls for answer in call.left))
        if not pending:
            time.sleep(wait_s)
            return []
        self._ray.wait(pending, timeout=wait_s)
        ready = set(self._ray.wait(pending, num_returns=len(pending), timeout=0)[0])
        return [event for call in list(self._calls) for event in self._heard(call, ready)]

    def close(self) -> None:
        if self._ray is None:
            return
        for engine in list(self._lives):
            self._kill(engine)
        self._ray.shutdown()
        self._ray = None
        atexit.unregister(self.close)
        if self._logs is not None:  # those of a run that failed are left to be read
            shutil.rmtree(self._logs, ignore_errors=True)

    # What the steward decides.

    def _start(self, decision: Start) -> None:
        engine = decision.engine
        if engine not in self._places:  # one that has joined; Ray begins with it as soon as there is room
            worker = bundle(self._options)
            self._places[engine] = self._ray.util.placement_group([worker] * self._size, strategy="STRICT_PACK")
        workers = spawn(self._ray, self._places[engine], self._size, self._options, {PULSE: 1})
        life = self._lives[engine] = Life(decision.life, workers)
        self._call(engine, "starting", "whereabouts", then=partial(self._is_placed, engine, life))
        spec = replace(self._spec, rollout=without_weights(self._spec.rollout))  # which come from the store
        point = workers[0].open.remote(spec)  # Ray gives its answer to the others
        starts = [worker.start.remote(spec, rank, point) for rank, worker in enumerate(workers)]
        self._await(engine, "starting", starts, lambda _: [Started(engine, decision.life)])

    def _is_placed(self, engine: int, life: Life, found: list[tuple[str, int]]) -> list[Event]:
        life.node, life.processes = found[0][0], [process for _, process in found]
        if (met := self._nodes.meet(life.node)) is not None:
            self._await(engine, "starting, and its node was taking memory for the weights", [met], _nothing)
        return []

    def _kill(self, engine: int) -> None:
        life = self._lives.pop(engine)
        self._calls = [call for call in self._calls if call.engine != engine]
        if life.processes:
            self._nodes.kill(life.node, life.processes)
        if life.loading is not None:
            self._nodes.forget(life.node, life.loading)
        for worker in life.workers:
            self._ray.kill(worker)

    def _load(self, decision: Load, life: Life, failed: Any = None) -> list[Event]:
        """``failed``: Ray's reference to a copy of the weights to the node that failed; one more is asked for."""
        if decision.version not in self._stored:
            return self._missed(decision)
        life.loading = decision.version
        location = self._nodes.location(life.node, decision.version, failed)
        if isinstance(location, Location):
            return self._take(decision, [location])
        # A call that Ray holds back for its arguments would hold back all later ones to the engine.
        then = partial(self._take, decision)
        again = partial(self._load, decision, life, location) if failed is None else None
        self._await(decision.engine, "waiting for weights to come to its node", [location], then, again)
        return []

    def _take(self, decision: Load, found: list[Location]) -> list[Event]:
        """Have an engine load a version that is on its node, if newer ones have not taken its place meanwhile."""
        stored = self._stored.get(decision.version)  # which the loop's thread changes
        if stored is None:
            return self._missed(decision)
        arguments = self._nodes.form, *found, stored
        self._call(decision.engine, "loading weights", "load", *arguments, then=partial(self._is_loaded, decision))
        return []

    def _missed(self, decision: Load) -> list[Event]:
        self._lives[decision.engine].loading = None
        return [Missed(*decision)]

    def _issue(self, decision: Issue, life: Life) -> None:
        requests = self._requests(decision.key, decision.samples)
        life.load += len(requests)
        self._call(decision.engine, "taking requests", "issue", decision.attempt, decision.samples, requests)

    # What the engines say.

    def _ask(self, engine: int, life: Life) -> None:
        """Have an engine with work sample on, and one that has anything to do say now and then how far it is."""
        while life.load and life.num_sampling < NUM_AHEAD:
            life.num_sampling += 1
            self._call(engine, "sampling", "proceed", MAX_STEPS, then=partial(self._has_sampled, engine, life))
        is_busy = life.load or life.loading is not None
        if is_busy and not life.is_asked and time.monotonic() >= life.pulsed_s + PULSE_S:
            life.is_asked, life.pulsed_s = True, time.monotonic()
            pulses = [worker.pulse.options(concurrency_group=PULSE).remote() for worker in life.workers]
            self._await(engine, "saying how far it is", pulses, partial(self._has_pulsed, engine, life))

    def _is_loaded(self, decision: Load, _: list[Any]) -> list[Event]:
        self._lives[decision.engine].loading = None
        return [Loaded(*decision)]

    def _has_sampled(self, engine: int, life: Life, answers: list[Any]) -> list[Event]:
        life.num_sampling -= 1
        life.load -= len(answers[0])
        return [
            Answered(engine, life.number, attempt, sample, trajectory.spans[0].version, trajectory)
            for attempt, sample, trajectory in answers[0]
        ]

    def _has_pulsed(self, engine: int, life: Life, answers: list[int]) -> list[Event]:
        life.is_asked = False
        return [Pulsed(engine, life.number, min(answers))]

    def _call(
        self, engine: int, doing: str, method: str, *arguments: Any, then: Callable[[list[Any]], list[Event]] = _nothing
    ) -> None:
        """Call a method of all workers of an engine; calls are carried out in their order."""
        answers = [getattr(worker, method).remote(*arguments) for worker in self._lives[engine].workers]
        self._await(engine, doing, answers, then)

    def _await(
        self,
        engine: int,
        doing: str,
        answers: list[Any],
        then: Callable[[list[Any]], list[Event]],
        instead: Callable[[], list[Event]] | None = None,
    ) -> None:
        self._calls.append(Call(engine, self._lives[engine].number, doing, answers, set(answers), then, instead))

    def _heard(self, call: Call, ready: set[Any]) -> list[Event]:
        """What follows from the answers that have come; a failure is the engine's death, or what the call says."""
        if call not in self._calls:  # the engine has died of another one
            return []
        for answer in call.left & ready:
            why = self._failure(answer, call.doing)
            if why is not None and call.instead is not None:
                self._calls.remove(call)
                return call.instead()
            if why is not None:
                self._calls = [other for other in self._calls if other.engine != call.engine]
                return [Died(call.engine, call.life, why)]
        call.left -= ready
        if call.left:
            return []
        self._calls.remove(call)
        return call.then(self._ray.get(call.answers))

    def _failure(self, answer: Any, doing: str) -> str | None:
        """Why a call that has ended has no answer; None if it has one."""
        try:
            self._ray.get(answer)
        except self._ray.exceptions.RayActorError:
            return f"a process of it was gone while {doing}"
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, InputError):
                raise error.cause from None
            return f"it failed while {doing}: {error.cause}"
        except self._ray.exceptions.RayError as error:
            return f"it was lost while {doing}: {error}"
        return None
