"""Engine processes as Ray actors, in the hands of one process: the trainer's rank 0."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mega_rl import platform
from mega_rl.errors import InputError, shortened
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.store import LOOPBACK, is_one_node
from mega_rl.rollout.remote import local_ray
from mega_rl.rollout.remote.engine_process import EngineProcess, EngineSpec
from mega_rl.rollout.remote.ray_room import bundle, check_room
from mega_rl.rollout.vllm.start.options import engine_settings

PLACEMENT_TIMEOUT_S = 60
DEATH_NOTICE_S = 10.0  # time for Ray to notice which process is gone after a transfer has failed


class EngineGroup:
    """``num_engines`` engines of ``tensor_parallel_size`` workers each; workers are numbered engine by engine.

    The workers end with the process that made them.
    """

    def __init__(self, spec: EngineSpec, num_engines: int) -> None:
        """Starts every engine, and returns when all of them can sample.

        Raises:
            InputError: there is no Ray or no room in its cluster, or an engine refuses its configuration.
        """
        self.num_engines = num_engines
        self.engine_size = spec.rollout.tensor_parallel_size
        self._ray, self._logs = connected_ray(self.num_workers)
        atexit.register(self._end)  # runs before Ray's own handler, which does not end the workers
        self._process_ids: list[int] = []
        self._workers: list[Any] = []
        options = platform.current().actor_options
        check_room(nodes(self._ray), bundle(options), num_engines, self.engine_size)
        for _ in range(num_engines):
            self._workers += place(self._ray, self.engine_size, options)
        self._process_ids = self.call("process_id", [()] * self.num_workers, "starting")
        is_here = is_one_node() and len(nodes(self._ray)) == 1  # trainer and engines
        self.host = LOOPBACK if is_here else self._ray.util.get_node_ip_address()  # of this process
        firsts, size = range(0, self.num_workers, self.engine_size), self.engine_size
        opened = [(first, self._workers[first].open.remote(spec)) for first in firsts]
        points = [self.results([call], "starting", first_worker=first)[0] for first, call in opened]
        specs = [replace(spec, rollout=engine_settings(spec.rollout, engine)) for engine in range(num_engines)]
        starts = [(specs[i // size], i % size, points[i // size]) for i in range(self.num_workers)]
        self.call("start", starts, "starting")

    @property
    def num_workers(self) -> int:
        return self.num_engines * self.engine_size

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], doing: str) -> list[Any]:
        """Call a method of every worker, and wait; ``arguments[i]`` are the i-th worker's."""
        return self.results(self.submit(method, arguments), doing)

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same without waiting; one call per worker, for ``results``."""
        pairs = zip(self._workers, arguments, strict=True)
        return [getattr(worker, method).remote(*of_worker) for worker, of_worker in pairs]

    def submit_to(self, engine: int, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers of one engine, without waiting."""
        first = engine * self.engine_size
        return [
            getattr(worker, method).remote(*arguments) for worker in self._workers[first : first + self.engine_size]
        ]

    def shared(self, value: Any) -> Any:
        """Ray's reference to a value, to be an argument of calls: it comes to every node once."""
        return self._ray.put(value)

    def first_done(self, calls: Mapping[int, Sequence[Any]], wait_s: float | None = None) -> int | None:
        """Waits for the first worker of any of these engines; returns the engine.

        Args:
            wait_s: so long at most, seconds, and None is returned if none is done; None: until one is.
        """
        engines = {of_workers[0]: engine for engine, of_workers in calls.items()}
        names = [self._name(engine * self.engine_size) for engine in calls]
        with HEART.waiting(" ".join([*names, "sampling"]), is_for_ranks=False):
            done, _ = self._ray.wait(list(engines), timeout=wait_s)
        return engines[done[0]] if done else None

    def results(
        self, calls: Sequence[Any], doing: str, timeout_s: float | None = None, first_worker: int = 0
    ) -> list[Any]:
        """What every worker answered; the first failure is raised at once, whatever the other workers are doing.

        Args:
            doing: what the workers are asked for, in words.
            first_worker: the worker that the first call belongs to.
            timeout_s: stop waiting after this time, and return the answers that are there; None: wait for all of them.

        Raises:
            InputError: a worker raised one.
            RuntimeError: a worker failed otherwise, or its process is gone.
        """
        pending, finished = list(calls), []
        while pending:
            name = self._name(first_worker + calls.index(pending[0]))
            with HEART.waiting(f"{name} {doing}", is_for_ranks=False):
                done, pending = self._ray.wait(pending, timeout=timeout_s)
            if not done:
                break
            finished += done
            self._raise_failure(done[0], first_worker + calls.index(done[0]), doing)
        return self._ray.get([call for call in calls if call in finished])

    def raise_death(self, doing: str) -> None:
        """Raise RuntimeError if a worker's process is gone; a busy worker counts as alive."""
        self.results(self.submit("process_id", [()] * self.num_workers), doing, DEATH_NOTICE_S)

    def _end(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
        self._ray.shutdown()
        if self._logs is not None:  # those of a run that failed are left to be read
            shutil.rmtree(self._logs, ignore_errors=True)

    def _raise_failure(self, call: Any, worker: int, doing: str) -> None:
        try:
            self._ray.get(call)
        except self._ray.exceptions.RayActorError:
            raise RuntimeError(
                f"{self._name(worker)} died while {doing}; start the run again, and it goes on from its newest "
                "checkpoint (if memory ran out, lower rollout.kv_cache_bytes or rollout.vllm.gpu_memory_utilization)"
            ) from None
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, InputError):
                raise error.cause from None
            raise RuntimeError(f"{self._name(worker)} failed while {doing}: {error.cause}") from error

    def _name(self, worker: int) -> str:
        engine, part = divmod(worker, self.engine_size)
        process = f"process {self._process_ids[worker]}" if self._process_ids else "not yet started"
        return f"rollout engine {engine}, worker {part} ({process}),"


def place(ray: Any, size: int, actor_options: Mapping[str, Any]) -> list[Any]:
    """The actors of one engine of ``size`` workers, on one node."""
    return spawn(ray, reserve(ray, size, actor_options), size, actor_options)


def reserve(ray: Any, size: int, actor_options: Mapping[str, Any]) -> Any:
    """A placement group for the workers of one engine, on one node.

    Raises:
        InputError: nobody has freed so much within ``PLACEMENT_TIMEOUT_S``.
    """
    worker = bundle(actor_options)
    return wait_for_room(ray, ray.util.placement_group([worker] * size, strategy="STRICT_PACK"), size, worker)


def wait_for_room(ray: Any, group: Any, size: int, worker: Mapping[str, float]) -> Any:
    """The same group, once it is there; raises as ``reserve``."""
    if not group.wait(PLACEMENT_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        free = ray.available_resources()
        raise InputError(
            f"rollout.placement=separate found no room for an engine of {size} processes with {worker} each on one "
            f"node of the Ray cluster, where { ({name: free.get(name, 0) for name in worker}) } is free: wait for its "
            "other users, lower rollout.num_engines or rollout.tensor_parallel_size, or add nodes."
        )
    return group


def spawn(ray: Any, group: Any, size: int, actor_options: Mapping[str, Any]) -> list[Any]:
    """An actor in every place of a placement group."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    remote_class = ray.remote(EngineProcess)
    return [
        remote_class.options(**actor_options, scheduling_strategy=strategy(group, part)).remote()
        for part in range(size)
    ]


def nodes(ray: Any) -> list[Mapping[str, float]]:
    """The resources of every node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def connected_ray(num_workers: int) -> tuple[Any, Path | None]:
    """The ray module, connected to the cluster of ``RAY_ADDRESS``, or on a CPU to one that is started here.

    The second value is the directory of the logs of a Ray that was started here.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError(
            "rollout.placement=separate needs Ray, which is not installed: install mega_rl[separate], or set "
            "rollout.placement=colocated."
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    has_cluster, devices = bool(os.environ.get("RAY_ADDRESS")), platform.current().visible_devices_variable
    if not has_cluster:
        if devices is not None:  # a Ray started here would hand out the trainer's own
            raise InputError(
                "rollout.placement=separate needs a Ray cluster that knows the engines' devices and not the trainer's: "
                f"run `ray start --head` with {devices} naming the engines' devices, and set RAY_ADDRESS=auto."
            )
        local_ray.close_to_others()
    import ray
    import ray.util.scheduling_strategies

    if not has_cluster:
        return ray, local_ray.start(ray, num_workers)
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise InputError(
            f"host {socket.gethostname()}, which has the trainer's rank 0, is not in the Ray cluster of "
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']} ({shortened(str(error))}): start Ray on every node of the "
            "trainer, since torchrun may give rank 0 to any of them, with `ray start --address HEAD:PORT --num-cpus 0` "
            "on those without engines"
        ) from None
    return ray, None
