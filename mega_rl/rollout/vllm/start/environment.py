"""The environment that vLLM is started in: the variables must be set before vLLM is imported."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mega_rl.config.checks.modes import not_invariant
from mega_rl.errors import InputError

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
# The engine runs inside our process; with a process of its own neither live parameters nor collectives could reach it.
_REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
_DEVICE_DEFAULTS = {
    # Without TORCHDYNAMO_DISABLE the first log-probabilities wait 3 to 18 s for a compiler; with nobind vLLM does not
    # move the trainer's threads.
    "cpu": {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}


def set_environment(device_type: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set vLLM's variables for a device type ("cpu", "npu", ...); a value that the user has set stays.

    Must run before vLLM is imported. Only ``VLLM_ENABLE_V1_MULTIPROCESSING`` is overwritten: the engine works in
    process only.
    """
    environ.update(_REQUIRED)
    if device_type == "cpu":  # there is no Triton for a CPU, and nothing here needs it
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    for name, value in {**_DEFAULTS, **_DEVICE_DEFAULTS.get(device_type, {})}.items():
        environ.setdefault(name, value)
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is not None and environ.get("TORCHDYNAMO_DISABLE") == "1":
        dynamo.disable = True  # type: ignore[attr-defined]  # it read the variable when it was imported, before us


def set_batch_invariance(device_type: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have vLLM use its batch-invariant kernels (``rollout.batch_invariant``). Must run before vLLM is imported.

    Raises:
        InputError: it has none for this device.
    """
    if (problem := not_invariant(device_type)) is not None:
        raise InputError(problem)
    environ[BATCH_INVARIANT] = "1"


@contextmanager
def preserved_process(device_type: str) -> Iterator[None]:
    """Undo what constructing an engine does to the process that it shares with the trainer.

    vLLM seeds python's, numpy's and torch's generators; on a CPU it also replaces ``torch.set_num_threads`` by a
    function that does nothing, sets ``LOCAL_WORLD_SIZE`` to its tensor-parallel size and ``LD_PRELOAD`` for children.
    Variables named ``VLLM_*`` are its own and stay, and so do the no-ops that it puts on a CPU for
    ``torch.accelerator.synchronize`` and ``empty_cache``: it calls them later.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    matmul_precision = torch.get_float32_matmul_precision()
    try:
        with preserved_generators(device_type), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(matmul_precision)
        for name in [name for name in os.environ if not name.startswith("VLLM_") and name not in environ]:
            del os.environ[name]
        os.environ.update(environ)


@contextmanager
def preserved_generators(device_type: str) -> Iterator[None]:
    """Put the global random generators back afterwards: python's, numpy's, torch's on the host and on the device."""
    before = _generators(device_type)
    try:
        yield
    finally:
        _set_generators(device_type, before)


class EngineGenerators:
    """The global random generators of a process that the engine shares with the trainer, which finds them unchanged.

    Where every request brings its seed, vLLM draws from torch's generators all the same, and throws away what it draws:
    these are read once when the first response begins and put back when none is under way any more. It draws from
    python's and numpy's for requests without a seed only, of which there are none, so environments that answer
    meanwhile keep what they draw from those.

    Args:
        is_seeded: ``seed`` is heard (``rollout.seeds=engine``), and every use of the engine goes on with generators of
            its own, all of them.
    """

    def __init__(self, device_type: str, is_seeded: bool) -> None:
        self._device_type, self._is_seeded = device_type, is_seeded
        self._state: _State | None = None
        self._lent: _TorchState | None = None  # what torch's generators were when the engine began; None: it is idle

    def seed(self, seed: int) -> None:
        """From here on draw what follows from ``seed``, in [0, 2**63)."""
        if self._is_seeded:
            with preserved_generators(self._device_type):
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.manual_seed(seed)  # of the devices too
                self._state = _generators(self._device_type)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The engine draws; once nothing is under way, ``give_back`` has to follow."""
        if not self._is_seeded:
            if self._lent is None:
                self._lent = _torch_generators(self._device_type)
            yield
            return
        with preserved_generators(self._device_type):
            if self._state is not None:
                _set_generators(self._device_type, self._state)
            yield
            if self._state is not None:
                self._state = _generators(self._device_type)

    def give_back(self) -> None:
        """Put back what was lent; nothing if nothing was."""
        if self._lent is not None:
            _set_torch_generators(self._device_type, self._lent)
        self._lent = None


_TorchState = tuple[torch.Tensor, torch.Tensor | None]  # on the host, on the device
_State = tuple[Any, Any, _TorchState]


def _generators(device_type: str) -> _State:
    return random.getstate(), np.random.get_state(), _torch_generators(device_type)


def _set_generators(device_type: str, state: _State) -> None:
    python_state, numpy_state, torch_state = state
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    _set_torch_generators(device_type, torch_state)


def _torch_generators(device_type: str) -> _TorchState:
    device = None if device_type == "cpu" else torch.get_device_module(device_type).get_rng_state()
    return torch.get_rng_state(), device


def _set_torch_generators(device_type: str, state: _TorchState) -> None:
    host_state, device_state = state
    torch.set_rng_state(host_state)
    if device_state is not None:
        torch.get_device_module(device_type).set_rng_state(device_state)


def is_external() -> bool:
    """Whether the engine must live in processes that a launcher started: in several, or not on the first device.

    Only an external launcher's engine asks for ``LOCAL_RANK``; any other one takes the first device that it sees.
    """
    return dist.is_initialized() and (dist.get_world_size() > 1 or os.environ.get("LOCAL_RANK", "0") != "0")
