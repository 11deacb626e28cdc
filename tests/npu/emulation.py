"""Runs a command with the real torch_npu wheel on a host without an NPU.

    python -m tests.npu.emulation COMMAND ARGUMENTS...

The wheel stands in a folder of its own (``make test-npu`` installs it), so that nothing else imports it. The command
gets it on its path, the libraries of ``stubs.py`` in the place of CANN's, and pretended devices; in that process
``start`` then imports torch_npu and installs the kernels. A Python script that knows nothing of the emulation is run by
``tests/npu/run_emulated.py``.

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

from tests.npu import stubs

HOME_VARIABLE = "MEGA_RL_NPU_EMULATION"
NUM_DEVICES = 2
REPO = Path(__file__).resolve().parent.parent.parent


def home() -> Path:
    """Where ``wheel/`` is installed and ``stubs/`` is built."""
    return Path(os.environ.get(HOME_VARIABLE, Path(sys.prefix) / "npu_emulation"))


def is_active() -> bool:
    """Whether this process was started by ``main``."""
    return "NPU_STUB_DEVICES" in os.environ


def built_stubs() -> Path:
    """The folder of the libraries, built again where the wheel or their sources have changed."""
    wheel, out = home() / "wheel", home() / "stubs"
    if not (wheel / "torch_npu").is_dir():
        sys.exit(f"there is no torch_npu in {wheel}: run `make test-npu`, which installs it there")
    versions = sorted(path.name for path in wheel.glob("torch_npu-*.dist-info"))
    sources = [Path(stubs.__file__).read_bytes(), stubs.RUNTIME.read_bytes(), repr(versions).encode()]
    want, marker = hashlib.sha256(b"".join(sources)).hexdigest(), out / "built_from"
    out.mkdir(exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.is_file() or marker.read_text() != want:
            stubs.build(wheel, out)
            marker.write_text(want)
    return out


def environment() -> dict[str, str]:
    """What a process needs from its start."""
    libraries, paths = str(built_stubs()), [str(REPO), str(home() / "wheel")]
    return {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # else torch imports torch_npu in every process
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (libraries, os.environ.get("LD_LIBRARY_PATH")))),
        "PYTHONPATH": os.pathsep.join(filter(None, (*paths, os.environ.get("PYTHONPATH")))),
        "NPU_STUB_DEVICES": str(NUM_DEVICES),
        "TASK_QUEUE_ENABLE": "0",  # kernels run where they are called
        "CPU_AFFINITY_CONF": "0",  # there is no device whose processors to bind to
        "ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, range(NUM_DEVICES))),
    }


def start() -> Mapping[str, int]:
    """Import torch_npu, install the kernels, and return the counts of the operators that run from now on."""
    assert is_active(), "start this process by python -m tests.npu.emulation"
    importlib.import_module("torch_npu")
    kernels, stand_ins = (importlib.import_module(f"tests.npu.{name}") for name in ("kernels", "stand_ins"))
    kernels.install(stand_ins.STAND_INS)
    return kernels.counts


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment()})


if __name__ == "__main__":
    main()
