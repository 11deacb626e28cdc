"""What runs in a process of its own: one worker of a rollout engine, driven by the trainer's rank 0."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.mapping.vllm_slots import Slots
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.config.schema.sections import TrainerConfig
from mega_rl.observe.pulse import PulseWriter
from mega_rl.parallel.collectives import connect_on_use, connects_on_use
from mega_rl.parallel.joint_group import MeetingPoint, join_store, open_meeting
from mega_rl.parallel.store import LOOPBACK
from mega_rl.platform.contract.versions import installed
from mega_rl.rollout.collect.handed_trajectories import OwnerAddress, hand_over
from mega_rl.rollout.engine import Ended, ProbedSampler, Request
from mega_rl.rollout.episodes.episode_tokens import EpisodePlan
from mega_rl.rollout.episodes.episodes import EpisodeSampler
from mega_rl.rollout.partial import ResponsePiece
from mega_rl.rollout.receiver import Link
from mega_rl.rollout.remote.attached_store import AttachedStore
from mega_rl.rollout.remote.weight_store import Location, RewrittenError, Store, WantedVersion
from mega_rl.rollout.store_form import StoreForm
from mega_rl.rollout.vllm.receiving_engine import ReceivingEngine
from mega_rl.rollout.vllm.start.seeing import Pixels, Sight
from mega_rl.types import Response, Trajectory

KERNEL_COMPONENTS = ("torch", "cann", "vllm", "vllm-ascend", "triton-ascend")
KERNEL_PACKAGES = ("triton", "flashinfer-python")
KERNEL_WORDS = ("MOE", "FLASHINFER", "GEMM", "MARLIN", "QUANT", "CUTLASS", "AITER", "AMX", "SGL")
REST_S = 0.05  # of an engine that is told to sample on without whole weights


@dataclass(frozen=True)
class EngineSpec:
    """What every worker of every engine is started with."""

    model_path: str  # absolute
    rollout: RolloutConfig
    max_model_len: int  # prompt and response together, tokens
    dtype: str  # of the model; used if ``rollout.dtype`` is not set
    platform_name: str
    is_deterministic: bool
    num_threads: int  # of torch, on the CPU
    collective_timeout_s: float = TrainerConfig.collective_timeout_s
    slots: Slots | None = None  # for an adapter
    # Makes the plan of the run's episodes, in each of an engine's processes; None: responses are single turns.
    episodes: Callable[[], EpisodePlan] | None = None
    sight: Sight | None = None  # for prompts with pictures, which come with the requests; None: there are none
    connects_on_use: bool = field(default_factory=connects_on_use)  # gloo, in the trainer, which makes this


class WorkerPlace(NamedTuple):
    """Where a worker of an engine is."""

    node: str  # in Ray's words
    process: int
    pulse: int  # the number of a file of the process, for ``read_pulse``


class LoadResult(IntEnum):
    """What has become of a load; an engine's is the worst of its workers'."""

    TORN = 0  # weights were replaced while they were copied: the engine holds some of both, and makes no step
    MISSED = 1  # other weights are in their place: it holds what it held before
    WHOLE = 2


class EngineProcess:
    """One tensor-parallel worker: the workers of an engine are given the same calls in the same order."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self._engine: ReceivingEngine | None = None
        self._sampler: ReceivingEngine | EpisodeSampler | None = None  # of tickets: the engine, or episodes on it
        self._tensor_rank = 0
        self._num_steps = 0  # of the engine, in ``proceed``
        self._pulse: PulseWriter | None = None
        self._tickets: dict[
            int, tuple[int, int, int]
        ] = {}  # request's number -> step, attempt and sample of its ticket
        self._owners: tuple[OwnerAddress, ...] = ()
        self._told: dict[int, int] = {}  # request's number -> tokens that ``grown`` has returned
        self._weights = AttachedStore()
        self._workers: dist.ProcessGroup | None = None  # of this engine, on the host; None: it is the only one
        self._is_torn = False  # whether the last load left weights that no version has
        self._shown: dict[str, Pixels] = {}  # the pictures of the requests that are being taken

    def whereabouts(self) -> WorkerPlace:
        """Where this process is; from now on it shows there how far it is."""
        self._pulse = self._pulse or PulseWriter(lambda: self._num_steps)
        return WorkerPlace(_runtime().get_node_id(), os.getpid(), self._pulse.file)

    def process_id(self) -> int:
        return os.getpid()

    def device(self, platform_name: str) -> tuple[str | None, int]:
        """The mask of devices that this process was started with, and the index of its own device within it."""
        here = platform.PLATFORMS[platform_name]
        mask = None if here.visible_devices_variable is None else os.environ.get(here.visible_devices_variable)
        return mask, here.actor_device(_assigned(), os.environ)

    def kind(self, spec: EngineSpec) -> str:
        """Device, programs and variables that decide which kernels an engine here takes, before it is started."""
        here = _select(spec)
        _, index = self.device(spec.platform_name)
        return ", ".join([here.device_kind(index), *_versions(), *_kernel_variables()])

    def open(self, spec: EngineSpec) -> MeetingPoint:
        """The address at which the workers of this engine, all on one node, meet; only the first worker is asked."""
        backend = _select(spec).backend
        size = spec.rollout.tensor_parallel_size
        point, self._store = open_meeting(LOOPBACK, backend, size, spec.collective_timeout_s)
        return point

    def start(self, spec: EngineSpec, tensor_rank: int, point: MeetingPoint) -> int | None:
        """Build the engine; returns when it can sample: how many responses at a time.

        Raises:
            InputError: as ``VLLMEngine``.
        """
        here = _select(spec)
        if spec.connects_on_use:
            connect_on_use()
        _, index = self.device(spec.platform_name)
        # A local Ray passes on the environment of the trainer's rank 0.
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        size = str(spec.rollout.tensor_parallel_size)
        os.environ.update(RANK=str(tensor_rank), LOCAL_RANK=str(index), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR=point.host, MASTER_PORT=str(point.port))
        torch.set_num_threads(spec.num_threads)
        self._tensor_rank = tensor_rank
        device = here.set_device(index)
        if point.world_size > 1 or index > 0:  # an engine without a group takes the first device that it sees
            store = self._store or join_store(point)
            dist.init_process_group(
                point.backend,
                store=store,
                rank=tensor_rank,
                world_size=point.world_size,
                timeout=datetime.timedelta(seconds=point.timeout_s),
            )
        self._engine = self._sampler = ReceivingEngine(
            spec.model_path,
            spec.rollout,
            max_model_len=spec.max_model_len,
            device_type=device.type,
            dtype=spec.dtype,
            slots=spec.slots,
            sight=spec.sight and replace(spec.sight, pictures=self._shown),
        )
        if spec.episodes is not None:
            self._sampler = episodes_on(self._engine, spec.episodes(), tensor_rank, point.world_size)
        return self._engine.num_slots

    def accept(self) -> None:
        """The trainer's word that engines of this kind load the model as it does: from here on this one serves."""

    @property
    def engine(self) -> ReceivingEngine:
        assert self._engine is not None, "a call before start"
        return self._engine

    @property
    def sampler(self) -> ReceivingEngine | EpisodeSampler:
        assert self._sampler is not None, "a call before start"
        return self._sampler

    def inspect(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(live parameters, *arguments)``."""
        return function(self.engine.parameters(), *arguments)

    def connect(self, link: Link) -> None:
        self.engine.connect(link)

    def receive(self) -> None:
        self.engine.begin_update()
        self.engine.receive()

    def finish_update(self, version: int) -> None:
        self.engine.finish_update(version)

    def submit(self, requests: Sequence[Request], pictures: Mapping[str, Pixels] | None = None) -> None:
        """
        Args:
            pictures: that the requests' prompts name, by key; nothing of them is kept.

        Raises:
            InputError: a picture that cannot be decoded.
        """
        with self._showing(pictures):
            self.engine.submit(requests)

    @contextmanager
    def _showing(self, pictures: Mapping[str, Pixels] | None) -> Iterator[None]:
        self._shown.update(pictures or {})
        try:
            yield
        finally:
            self._shown.clear()

    def advance(self, max_steps: int) -> list[Trajectory]:
        """Sample on until a response ends, if any is under way, but at most so many steps of the engine."""
        for _ in range(max_steps):
            if not self.engine.num_unfinished:
                break
            if ended := self.engine.step():
                return ended
        return []

    def interrupt(self) -> list[Request]:
        """Take out all that is under way; its requests, with their tails, on the engine's first worker only."""
        _, requests = self.engine.interrupt()
        return [] if self._tensor_rank else requests

    def issue(
        self,
        step: int,
        attempt: int,
        samples: Sequence[int],
        requests: Sequence[Request],
        pictures: Mapping[str, Pixels] | None = None,
    ) -> None:
        """Begin with samples of a ticket; ``proceed`` returns them under the number of the attempt.

        ``step`` is that of the ticket, below 0 in a validation.
        ``pictures`` are as of ``submit``.
        """
        with self._showing(pictures):
            numbers = self.sampler.enter(requests)
        self._tickets |= zip(numbers, ((step, attempt, sample) for sample in samples), strict=True)

    def proceed(self, max_steps: int) -> list[tuple[int, int, Response]]:
        """``advance`` for what ``issue`` began: (attempt, sample, response), on the engine's first worker only.

        Does nothing while the engine has no whole weights. Responses of steps are handed to their owners, if there are
        any; the others are returned with their tokens.

        Raises:
            RuntimeError: an owner does not take one.
        """
        if self._is_torn:
            time.sleep(REST_S)
            return []
        ended: Sequence[tuple[int, Ended]] = []
        for _ in range(max_steps):
            if ended or not self.sampler.num_unfinished:
                break
            ended = self.sampler.numbered_step()
            self._num_steps += 1
        answers = [(self._tickets.pop(number), one) for number, one in ended]
        if self._tensor_rank:
            return []
        return [(*t[1:], hand_over(one, self._owners, *t)) for t, one in answers if isinstance(one, Trajectory)]

    def grown(self, least: int) -> list[tuple[int, int, ResponsePiece]]:
        """What responses that ``issue`` began have got since this was last asked: (attempt, sample, piece).

        On the engine's first worker only, of single turns, and of those that have at least so many new tokens.
        """
        if self._tensor_rank or self._sampler is not self._engine:
            return []
        found = self.engine.grown(self._told, least)
        self._told |= {number: piece.first + piece.num_tokens for number, piece in found.items()}
        self._told = {number: told for number, told in self._told.items() if number in self._tickets}
        return [(*self._tickets[number][1:], piece) for number, piece in found.items()]

    def attach(self, form: StoreForm, owners: Sequence[OwnerAddress] = ()) -> None:
        """Weights will come from stores of this form, and responses go to these owners, or to the caller if there are
        none; collective among the engine's workers.
        """
        self._owners = tuple(owners)
        self._weights.know(form, self._tensor_rank)
        if self._workers is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._workers = dist.new_group(backend="gloo")

    def load(self, location: Location, wanted: WantedVersion) -> LoadResult:
        """Take a version from the store of this node, and prove it; requests under way go on with it.

        Collective among the engine's workers, which have one answer.

        Raises:
            InputError: the engine cannot be written to in place.
            RuntimeError: the engine holds something else after it.
        """
        with self._weights.at(location) as store:
            is_there = store.stamp_of(self._tensor_rank, location.slot) == wanted.stamp
            if self._worst(LoadResult.WHOLE if is_there else LoadResult.MISSED) is LoadResult.MISSED:
                return LoadResult.MISSED
            self._is_torn = True
            try:
                self.engine.exchange(lambda live: self._take(store, location.slot, wanted, live), wanted.version)
            except RewrittenError:
                return LoadResult.TORN
        self._is_torn = False
        return LoadResult.WHOLE

    def _take(self, store: Store, slot: int, wanted: WantedVersion, live: Mapping[str, torch.Tensor]) -> None:
        """
        Raises:
            RewrittenError: on all workers, if the version was replaced before one of them had it.
        """
        result = LoadResult.TORN
        try:
            self._weights.take(store, self._tensor_rank, slot, wanted, live)
            result = LoadResult.WHOLE
        except RewrittenError:
            pass
        finally:  # after a failure too: the others wait here
            worst = self._worst(result)
        if worst is LoadResult.TORN:
            raise RewrittenError

    def _worst(self, result: LoadResult) -> LoadResult:
        if self._workers is None:
            return result
        found = torch.tensor(result.value)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._workers)
        return LoadResult(int(found))

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        return self.engine.first_logprobs(prompt_ids, temperature, with_adapter)


def episodes_on(engine: ProbedSampler, plan: EpisodePlan, tensor_rank: int, engine_size: int) -> EpisodeSampler:
    """Episodes that run beside their engine: every turn goes to the engine that sampled the turn before.

    Collective among the engine's workers, the first of which runs the environments.
    """
    ranks = dist.new_group(backend="gloo") if engine_size > 1 else None
    return EpisodeSampler(engine, plan, tensor_rank == 0, ranks, is_numbered=True)


def _select(spec: EngineSpec) -> platform.Platform:
    return platform.select(spec.platform_name, platform.engine_role(spec.rollout, spec.is_deterministic))


def _versions() -> list[str]:
    """Of the installed programs that choose and bring kernels."""
    known = installed()
    found = {name: known[name] for name in KERNEL_COMPONENTS}
    for name in KERNEL_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return [f"{name} {version}" for name, version in found.items() if version is not None]


def _kernel_variables() -> list[str]:
    """The variables by which vLLM is told of kernels."""
    return [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("VLLM_") and any(word in name for word in KERNEL_WORDS)
    ]


def _assigned() -> dict[str, list[str]]:
    """The devices that Ray gave to this actor, by resource name."""
    return _runtime().get_accelerator_ids()


def _runtime() -> Any:
    """Ray's word for this actor and its surroundings."""
    import ray

    return ray.get_runtime_context()
