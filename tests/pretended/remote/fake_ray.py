"""A Ray without processes: its actors, workers of engines, answer one call each whenever somebody waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard.proof import LoadProof
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Box, indices, whole
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.fleet.events import Load
from mega_rl.fleet.executor import Requests
from mega_rl.models.shape import ModelShape
from mega_rl.observe.pulse import Pulse
from mega_rl.rollout.collect.handed_trajectories import OwnerAddress
from mega_rl.rollout.engine import Request
from mega_rl.rollout.engine_checks import CheckPlan, FleetChecks, Held
from mega_rl.rollout.remote.engine_process import EngineSpec, LoadResult, WorkerPlace
from mega_rl.rollout.remote.fleet import calls, places, pulses, ray_executor
from mega_rl.rollout.remote.fleet.nodes import Arrival
from mega_rl.rollout.remote.fleet.ray_executor import RayExecutor, Work
from mega_rl.rollout.remote.load_checks import LoadChecks
from mega_rl.rollout.remote.weight_store import Location, Store, StoredVersion, WantedVersion
from mega_rl.rollout.store_form import StoreForm
from mega_rl.types import Trajectory
from tests.distributed.bridge.test_bridge_execute import local_parameters
from tests.pretended.tokens import first_logprobs

NORM = Series("model.norm.weight", ((0, 5),), "model.norm.weight", ((0, 5),))
OWN = Location(1, (3,))  # of a store
PROOFS = ((b"fixed", b"of 0"), (b"fixed", b"of 1"))  # by worker
PULSE_FILE = 5  # of every worker
NUM_SLOTS = 1024  # responses that an engine says it takes at a time
NUM_STEPS = 40  # of an engine for a response


class ActorGone(Exception):
    """``ray.exceptions.RayActorError``."""


class TaskFailed(Exception):
    """``ray.exceptions.RayTaskError``."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class LaterError(Exception):
    """``ray.exceptions.RayError``, of none of the kinds above."""


@dataclass(eq=False)
class Answer:
    """Ray's reference to an answer, and who waits for it."""

    value: Any = None
    error: Exception | None = None
    is_there: bool = False
    futures: list[Future[Any]] = field(default_factory=list)

    def future(self) -> Future[Any]:
        self.futures.append(Future())
        if self.is_there:
            self.come()
        return self.futures[-1]

    def come(self) -> None:
        """Tell it to who waits."""
        self.is_there = True
        for future in self.futures:
            if not future.done() and self.error is not None:
                future.set_exception(self.error)
            elif not future.done():
                future.set_result(self.value)


@dataclass(eq=False)
class Worker:
    """An actor: one worker of an engine, which answers a call at a time; its pulse waits for nobody."""

    process: int
    rank: int
    state: str = "runs"  # or "stopped", or "gone"
    node: str = "own"
    failures: dict[str, Exception] = field(default_factory=dict)  # method -> what it raises
    version: int = -1
    num_steps: int = 0
    beats: int = 0
    calls: list[tuple[str, tuple[Any, ...], Answer]] = field(default_factory=list)
    todo: dict[tuple[int, int], tuple[Request, int]] = field(default_factory=dict)  # ticket -> request, steps left
    shown: list[Any] = field(default_factory=list)  # prompts of requests, and what came beside them
    card: str = "card A"
    layout: Sequence[Series] = ()
    model: dict[str, torch.Tensor] = field(default_factory=dict)  # the files in model.path
    live: dict[str, torch.Tensor] = field(default_factory=dict)
    spec: EngineSpec | None = None
    is_accepted: bool = False
    rearrange: Callable[[dict[str, torch.Tensor]], None] = lambda live: None  # once weights are loaded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def remote(*arguments: Any) -> Answer:
            answer = Answer()
            self.calls.append((name, arguments, answer))
            return answer

        return SimpleNamespace(remote=remote)

    def beat(self) -> None:
        self.beats += self.state == "runs"

    def go_on(self) -> None:
        if self.state == "gone":
            for _, _, answer in self.calls:
                answer.error = ActorGone()
                answer.come()
            self.calls.clear()
        for name, arguments, answer in self.calls[:1] if self.state == "runs" else ():
            del self.calls[0]
            if name in self.failures:
                answer.error = TaskFailed(self.failures[name])
            else:
                answer.value = getattr(self, f"do_{name}")(*arguments)
            answer.come()

    def do_whereabouts(self) -> WorkerPlace:
        return WorkerPlace(self.node, self.process, PULSE_FILE)

    def do_kind(self, spec: EngineSpec) -> str:
        return self.card

    def do_open(self, spec: EngineSpec) -> str:
        return "a meeting point"

    @property
    def has_read(self) -> bool:
        """Whether it has loaded weights by itself."""
        return self.spec is not None and "load_format" not in self.spec.rollout.vllm

    def do_start(self, spec: EngineSpec, rank: int, point: Answer) -> int:
        assert rank == self.rank
        self.spec = spec
        self.live = local_parameters(slices_of(self.layout), self.model if self.has_read else None, torch.float32)
        self.rearrange(self.live)
        return NUM_SLOTS

    def do_inspect(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.live, *arguments)

    def do_accept(self) -> None:
        self.is_accepted = True

    def do_attach(self, form: StoreForm, owners: Sequence[OwnerAddress]) -> None: ...

    def do_load(self, location: Any, wanted: WantedVersion) -> LoadResult:
        assert location == OWN and not self.todo, "weights that are not there, or under a pinned ticket"
        assert self.is_accepted, "weights for an engine of whose kind it is not known how they lie"
        assert wanted.proofs == PROOFS[self.rank], "those of another worker"
        self.version = wanted.version
        return LoadResult.WHOLE

    def do_issue(
        self, step: int, attempt: int, samples: Sequence[int], requests: Sequence[Request], *pictures: Any
    ) -> None:
        self.shown.append(([request.prompt.index for request in requests], pictures))
        self.todo |= {(attempt, sample): (r, NUM_STEPS) for sample, r in zip(samples, requests, strict=True)}

    def do_proceed(self, max_steps: int) -> list[tuple[int, int, Trajectory]]:
        self.num_steps += max_steps
        self.todo = {ticket: (request, left - max_steps) for ticket, (request, left) in self.todo.items()}
        ended = {ticket: request for ticket, (request, left) in self.todo.items() if left <= 0}
        self.todo = {ticket: entry for ticket, entry in self.todo.items() if ticket not in ended}
        return [] if self.rank else [(*ticket, self.answer(request)) for ticket, request in ended.items()]

    def do_first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        return [first_logprobs(self.version if with_adapter else None, prompt_ids, temperature)]

    def do_rest(self) -> int:
        self.todo.clear()
        return NUM_SLOTS

    def answer(self, request: Request) -> Trajectory:
        tokens = [self.version + 1, request.prompt.index, request.seed]
        return Trajectory.single_turn(
            request.prompt, request.sample_index, tokens, [-1.0] * 3, "", "stop", self.version
        )


class FakeRay:
    """Time passes when somebody waits.

    Args:
        worker: makes the worker of an engine from its number and its rank.
        shape: of the engines' model; None: it has one weight.
    """

    exceptions = SimpleNamespace(RayActorError=ActorGone, RayTaskError=TaskFailed, RayError=LaterError)

    def __init__(self, worker: Callable[[int, int], Worker] = Worker, shape: ModelShape | None = None) -> None:
        self._worker, self._shape = worker, shape
        sizes = {NORM.hf_name: (5,)} if shape is None else hf_tensors(shape)
        generator = torch.Generator().manual_seed(0)
        self.model = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
        self.said: list[str] = []  # of kinds of engines
        self.workers: list[Worker] = []
        self.now = 0.0
        self.arriving: list[tuple[float, Arrival]] = []  # when what is said of weights on their way
        self.groups: dict[str, str] = {}  # placement group -> its state
        self.util = SimpleNamespace(
            placement_group=self.placement_group,
            placement_group_table=lambda group: {"state": self.groups[group]},
            remove_placement_group=lambda group: self.groups.pop(group, None),
        )

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> str:
        assert strategy == "STRICT_PACK", "all workers of an engine are on one node"
        self.groups[name := f"{len(bundles)} x {bundles[0]}, {len(self.groups)}"] = "PENDING"
        return name

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0, "memory": 5.0}

    def nodes(self) -> list[dict[str, str]]:
        return [{"NodeID": "own", "NodeManagerAddress": "10.0.0.7"}]

    def spawn(self, ray: Any, group: str, size: int, options: Any) -> list[Worker]:
        found = [self._worker(len(self.workers) + rank, rank) for rank in range(size)]
        for worker, layout in zip(found, self.layout(size), strict=True):
            worker.layout, worker.model = layout, self.model
        self.workers += found
        return found

    def layout(self, size: int) -> list[list[Series]]:
        """What the workers of an engine hold."""
        return [[NORM] if self._shape is None else vllm_series(self._shape, size, rank) for rank in range(size)]

    def checks(self, spec: EngineSpec) -> LoadChecks:
        """Of a trainer that has loaded the model."""

        def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
            return self.model[hf_name][indices(hf_box)]

        sizes = {name: tuple(tensor.shape) for name, tensor in self.model.items()}
        held = [whole(name, name, size) for name, size in sizes.items()]
        proof = LoadProof(sizes, held, self.layout(spec.rollout.tensor_parallel_size), 1, read)
        return LoadChecks(spec, proof, self.said.append)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers:
            worker.beat()
            worker.go_on()

    def queue(self) -> PassingQueue:
        return PassingQueue(self)

    def put(self, value: Any) -> Any:
        return ("put", value)

    def kill(self, worker: Worker) -> None:
        worker.state = "gone"

    def shutdown(self) -> None:
        assert all(worker.state == "gone" for worker in self.workers)


class PassingQueue:
    """A queue in which time passes when somebody waits."""

    def __init__(self, ray: FakeRay) -> None:
        self._ray, self._entries = ray, deque[Any]()

    def put(self, entry: Any) -> None:
        self._entries.append(entry)

    def qsize(self) -> int:
        return len(self._entries)

    def get_nowait(self) -> Any:
        return self._entries.popleft()

    def get(self, timeout: float) -> Any:
        if not self._entries:
            self._ray.pass_time(timeout)
        if not self._entries:
            raise Empty
        return self._entries.popleft()


class FakeNodes:
    def __init__(self, ray: FakeRay, store: Store) -> None:
        self.form, self._ray = store.form, ray

    met: Answer | None = None

    def meet(self, node: str) -> Answer | None:
        assert node == "own"
        found, self.met = self.met, None
        return found

    def location(self, load: Load, node: str, stored: StoredVersion) -> Location | None:
        return OWN

    def heard(self) -> list[Arrival]:
        found = [arrival for at, arrival in self._ray.arriving if self._ray.now >= at]
        self._ray.arriving = [(at, arrival) for at, arrival in self._ray.arriving if self._ray.now < at]
        return found

    def done(self, engine: int) -> None: ...

    def check_own(self) -> None: ...

    def pulses(self, node: str, found: Sequence[tuple[int, int]]) -> Future[list[Pulse | None]]:
        assert {file for _, file in found} == {PULSE_FILE}
        workers = [self._ray.workers[process] for process, _ in found]
        answer: Future[list[Pulse | None]] = Future()
        answer.set_result([Pulse(w.beats, w.num_steps) if w.state != "gone" else None for w in workers])
        return answer

    def forget(self, node: str, version: int) -> None: ...

    def kill(self, node: str, processes: Sequence[int]) -> None:
        for process in processes:
            self._ray.workers[process].state = "gone"


class KnowsAll(FleetChecks):
    """Every version is known, and none has adapters."""

    def __init__(self) -> None:
        super().__init__(CheckPlan(50, 0.7, "float32", print))

    def held(self, version: int) -> Held:
        return Held(version)


def executor_on(
    patch: pytest.MonkeyPatch,
    ray: FakeRay,
    rollout: RolloutConfig,
    requests: Requests,
    stored: Mapping[int, StoredVersion],
    picture_set: Any = None,
    checks: FleetChecks | None = None,
    owners: tuple[OwnerAddress, ...] = (),
) -> RayExecutor:
    """A ``RayExecutor`` on this Ray, with its time, in a cluster of one host."""
    num_engines, size = rollout.num_engines, rollout.tensor_parallel_size
    patch.setattr(ray_executor, "connected_ray", lambda num_workers: (ray, None))
    patch.setattr(ray_executor, "nodes", lambda ray: [{"CPU": float(num_engines * size)}])
    patch.setattr(places, "reserve", lambda ray, size, options: "a place")
    patch.setattr(places, "spawn", ray.spawn)
    patch.setattr(ray_executor, "Nodes", FakeNodes)
    patch.setattr(calls, "SimpleQueue", ray.queue)
    for module in (ray_executor, calls, pulses):  # of these alone: threads of others have the time too
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: ray.now))
    spec = EngineSpec("", rollout, 64, "float32", "cpu", is_deterministic=False, num_threads=1)
    store = Store(StoreForm(tuple(map(tuple, ray.layout(size))), torch.float32, num_slots=2, salt=1))
    work = Work(requests, checks or KnowsAll(), picture_set, owners)
    return RayExecutor(ray.checks(spec), num_engines, work, store, stored)
