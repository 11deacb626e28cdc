"""Runs a command with the real torch_npu wheel on a host without an NPU.

    python -m tests.npu.emulation COMMAND ARGUMENTS...

The wheel stands in a folder of its own (``make test-npu`` installs it), so that nothing else imports it. The command
gets it on its path, the libraries of ``stubs.py`` in the place of CANN's, and pretended devices. Every Python process
that comes of it installs the kernels when it imports torch_npu (``imports.py``), and knows nothing of it otherwise.

What this shows: every call into torch, torch_npu and Megatron-core that our code makes on device npu. What it cannot:
the numbers and limits of real kernels, HCCL, memory formats, graph mode, speed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tests.npu import rollout_stubs, stubs

HOME_VARIABLE = "MEGA_RL_NPU_EMULATION"
COUNTS_VARIABLE = "MEGA_RL_NPU_COUNTS"  # a folder where every process keeps how often operators ran
NUM_DEVICES = 2
REPO = Path(__file__).resolve().parent.parent.parent
SITE = Path(__file__).with_name("site")


def home() -> Path:
    """Where ``wheel/`` is installed and ``stubs/`` is built."""
    return Path(os.environ.get(HOME_VARIABLE, Path(sys.prefix) / "npu_emulation"))


def is_active() -> bool:
    """Whether this process was started by ``main``."""
    return "NPU_STUB_DEVICES" in os.environ


def rollout() -> Path:
    """Where ``make test-npu`` installs vLLM and vllm-ascend with what they need, if the index has them."""
    return home() / "rollout"


def has_rollout() -> bool:
    return (rollout() / "vllm_ascend").is_dir()


def missing_rollout() -> str:
    """Why there is none, for a test that is skipped."""
    names = home() / "rollout_missing.txt"
    if names.is_file():
        return f"the package index has no {', '.join(names.read_text().split())}"
    return f"there is no vllm-ascend in {rollout()}: run `make test-npu`, which installs it there"


def built_stubs() -> list[Path]:
    """The folders of the libraries, built again where the wheels or their sources have changed."""
    wheel, out, of_rollout = home() / "wheel", home() / "stubs", home() / "rollout_stubs"
    if not (wheel / "torch_npu").is_dir():
        sys.exit(f"there is no torch_npu in {wheel}: run `make test-npu`, which installs it there")
    versions = sorted(path.name for path in home().glob("*/*-*.dist-info"))
    code = [Path(module.__file__).read_bytes() for module in (stubs, rollout_stubs)]
    want = hashlib.sha256(b"".join([*code, stubs.RUNTIME.read_bytes(), repr(versions).encode()])).hexdigest()
    marker = out / "built_from"
    out.mkdir(exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.is_file() or marker.read_text() != want:
            stubs.build(wheel, out)
            if has_rollout():
                rollout_stubs.build(rollout() / "vllm_ascend", wheel, out, of_rollout)
            marker.write_text(want)
    return [out, of_rollout]


def environment() -> dict[str, str]:
    """What a process needs from its start."""
    libraries = map(str, built_stubs())
    paths = map(str, (REPO, SITE, home() / "wheel", rollout()))
    return {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # else torch imports torch_npu in every process
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (*libraries, os.environ.get("LD_LIBRARY_PATH")))),
        "PYTHONPATH": os.pathsep.join(filter(None, (*paths, os.environ.get("PYTHONPATH")))),
        "NPU_STUB_DEVICES": str(NUM_DEVICES),
        "TASK_QUEUE_ENABLE": "0",  # kernels run where they are called
        "CPU_AFFINITY_CONF": "0",  # there is no device whose processors to bind to
        "ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, range(NUM_DEVICES))),
    }


def after_torch_npu(module: ModuleType) -> None:
    """Install the kernels; called when torch_npu is imported (``imports.py``)."""
    names = ("kernels", "stand_ins", "rollout", "rollout_operators")  # they import torch, which comes first
    kernels, stand_ins, of_rollout, operators = (importlib.import_module(f"tests.npu.{name}") for name in names)
    kernels.install(stand_ins.STAND_INS)
    kernels.replace("npu", operators.ROLLOUT)
    kernels.send_one_by_one()
    of_rollout.prepare_torch()
    module.npu.is_jit_compile_false = lambda: True  # CANN's answer on an Atlas A2: convolutions keep their format
    if folder := os.environ.get(COUNTS_VARIABLE):
        kernels.keep_counts(Path(folder))


def start() -> Mapping[str, int]:
    """Import torch_npu, and return the counts of the operators that run from now on."""
    assert is_active(), "start this process by python -m tests.npu.emulation"
    importlib.import_module("torch_npu")
    counts: Mapping[str, int] = importlib.import_module("tests.npu.kernels").counts
    return counts


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment()})


if __name__ == "__main__":
    main()
