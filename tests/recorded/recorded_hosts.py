"""Machines as data: what the checks of ``mega_rl.doctor`` read on an Ascend host, replayed without one.

The forms of npu-smi's tables are those that versions 24.1 to 26.0 print; the figures are made up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from mega_rl.doctor.host import Disk, Ran
from mega_rl.doctor.probes import MARK

GIB = 1 << 30
A2_HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
A2_DEVICE = """\
| {npu}     910B3               | {health:<13} | 93.6        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          {used:<5}/ 65536         |
+===========================+===============+====================================================+
"""
A2_PROCESSES = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
"""
A2_PROCESS = "| {npu}       0                 | {pid:<13} | {name:<24} | {used:<23} |\n"
A2_NO_PROCESS = (
    "| No running processes found in NPU {npu}                                                            |\n"
)

# Two chips to a card, wider columns, a fifth column of processes.
A3_26 = """\
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc2                            Version: 26.0.rc2                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -                    34                      0    / 0                |
| 1     1                   | 0000:9F:00.0  | 0                    0    / 0                31877/ 65536            |
+===========================+===============+======================================================================+
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
+===========================+===============+======================================================================+
| 0       1                 | 632268        | python3.1          | 28900                 | NA                      |
+===========================+===============+======================================================================+
"""
# No HBM column.
A310P = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                                 Version: 24.1.rc2                                     |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 1       310P3                 | OK              | NA           59                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1397 / 44280                            |
+-------------------------------+-----------------+------------------------------------------------------+
"""
REFUSED = "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi module initialize failed. ret is -8005\n"


def a2_table(
    healths: Mapping[int, str] | None = None, running: Mapping[int, tuple[int, str, int]] | None = None, number: int = 8
) -> str:
    """What npu-smi 25.2 prints of ``number`` devices.

    Args:
        healths: of the devices that are not OK.
        running: device -> (pid, name, MiB) of its only process.
    """
    healths, running = healths or {}, running or {}
    devices = "".join(
        A2_DEVICE.format(npu=i, health=healths.get(i, "OK"), used=3380 + running.get(i, (0, "", 0))[2])
        for i in range(number)
    )
    processes = "".join(
        A2_PROCESS.format(npu=i, pid=running[i][0], name=running[i][1], used=running[i][2])
        if i in running
        else A2_NO_PROCESS.format(npu=i)
        for i in range(number)
    )
    return A2_HEAD + devices + A2_PROCESSES + processes


def reported(**figures: Any) -> Ran:
    """A probe that got to its end."""
    return Ran(0, f"a library says hello\n{MARK}{json.dumps(figures)}\n")


@dataclass
class RecordedHost:
    """A ``Host`` that only knows what it is given."""

    environ: dict[str, str] = field(default_factory=dict)
    python: tuple[int, int] = (3, 11)
    machine: str = "aarch64"
    packages: dict[str, str] = field(default_factory=dict)
    cann_version: str | None = None
    files: dict[str, str] = field(default_factory=dict)  # path -> text; their folders exist too
    commands: dict[str, Ran] = field(default_factory=dict)  # command line -> what it leaves behind
    probes: dict[str, Ran] = field(default_factory=dict)
    disks: dict[str, Disk] = field(default_factory=dict)
    taken_ports: frozenset[int] = frozenset()

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def package_file(self, package: str, path: str) -> str | None:
        return self.files.get(f"site-packages/{path}") if package in self.packages else None

    def glob(self, pattern: str) -> list[str]:
        there = set(self.files)
        for path in self.files:
            parts = path.split("/")
            there |= {"/".join(parts[:i]) for i in range(1, len(parts))}
        return sorted(p for p in there if fnmatch(p, pattern) and p.count("/") == pattern.count("/"))

    def disk(self, path: str) -> Disk | None:
        return self.disks.get(path)

    def can_bind(self, port: int) -> bool:
        return port not in self.taken_ports

    def run(self, command: Sequence[str], timeout_s: float = 30.0) -> Ran | None:
        return self.commands.get(" ".join(command))

    def probe(self, name: str, platform_name: str, timeout_s: float) -> Ran:
        return self.probes[name]

    def but(self, **changes: Any) -> RecordedHost:
        return dataclasses.replace(self, **changes)

    def with_environ(self, **variables: str) -> RecordedHost:
        return self.but(environ={**self.environ, **variables})

    def without_files(self, *beginnings: str) -> RecordedHost:
        return self.but(files={path: text for path, text in self.files.items() if not path.startswith(beginnings)})


CANN = "/usr/local/Ascend/cann-9.1.0"
ATB = "/usr/local/Ascend/nnal/atb/9.1.0/atb/cxx_abi_1"
MACHINE_FILES = {
    "/proc/meminfo": "MemTotal:       1056423916 kB\nMemAvailable:    981234567 kB\n",
    "/proc/self/limits": (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max open files            1048576              1048576              files     \n"
        "Max locked memory         unlimited            unlimited            bytes     \n"
    ),
    "/proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-63,96-159\n",
    "/proc/self/cgroup": "0::/docker/abc\n",
    "/sys/fs/cgroup/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/memory.max": "max\n",
    "/proc/net/dev": (
        "Inter-|   Receive       |  Transmit\n face |bytes packets |bytes packets\n"
        "    lo: 1 1 1 1\n  eth0: 1 1 1 1\nenp189s0f0: 1 1 1 1\n"
    ),
    "/proc/net/if_inet6": "fe800000000000000000000000fc00ff 02 40 20 80     eth0\n",
    "/proc/net/fib_trie": (
        "Main:\n     |-- 10.0.0.0\n        /24 link UNICAST\n     |-- 10.0.0.7\n        /32 host LOCAL\n"
    ),
}
HEALTHY = RecordedHost(
    environ={
        "ASCEND_HOME_PATH": CANN,
        "ASCEND_TOOLKIT_HOME": CANN,
        "ATB_HOME_PATH": ATB,
        "ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "VLLM_ASCEND_ENABLE_NZ": "0",
        "HCCL_BUFFSIZE": "512",
    },
    packages={
        "torch": "2.10.0",
        "torch-npu": "2.10.0.post4",
        "vllm": "0.23.0+empty",
        "vllm-ascend": "0.23.0",
        "triton-ascend": "3.2.2",
        "megatron-core": "0.16.1",
        "mindspeed": "0.16.0",
        "transformers": "5.5.4",
        "ray": "2.60.0",
    },
    cann_version="9.1.0",
    files={
        **MACHINE_FILES,
        **{f"/dev/davinci{i}": "" for i in range(8)},
        **{path: "" for path in ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")},
        "/usr/local/Ascend/driver/version.info": "Version=25.2.0\nascendhal_version=7.35.23\npackage_version=25.2.0\n",
        "/usr/local/Ascend/driver/lib64/driver/libascend_hal.so": "",
        "/usr/local/Ascend/firmware/version.info": "Version=7.7.0.6.236\nfirmware_version=1.0\n",
        "/usr/local/Ascend/cann/set_env.sh": "",
        f"{CANN}/lib64/libascendcl.so": "",
        f"{CANN}/opp/built-in/op_impl": "",
        "/usr/local/Ascend/nnal/atb/set_env.sh": "",
        f"{ATB}/lib/libatb.so": "",
        "/etc/hccn.conf": "".join(f"address_{i}=29.1.112.{i + 10}\nnetmask_{i}=255.255.0.0\n" for i in range(8)),
        "site-packages/torch/version.py": "cuda: Optional[str] = None\nhip: Optional[str] = None\n",
        "site-packages/vllm_ascend/envs.py": (
            '    "VLLM_ASCEND_ENABLE_NZ": lambda: 1,\n    "VLLM_ASCEND_TRACE": lambda: 0,\n'
        ),
    },
    commands={"npu-smi info": Ran(0, a2_table())},
    probes={
        "kernels": reported(matmul={"float32": 3e-7, "bfloat16": 2e-3}, attention=8e-3),
        "collective": reported(host=True, num_devices=8, device=True),
        "megatron": reported(
            engine="e",
            version="0.16.1",
            mindspeed=True,
            prepared=[
                "MindSpeed 0.16.0 replaced 9 functions",
                "fused operators",
                "  attention by MindSpeed (use_flash_attn)",
            ],
        ),
        "sampler": reported(version="0.23.0", device_type="npu", implementation="vllm_ascend.platform.NPUPlatform"),
    },
    disks={
        "runs": Disk(2000 * GIB, 900 * GIB),
        "/tmp": Disk(100 * GIB, 60 * GIB),
        "/dev/shm": Disk(64 * GIB, 64 * GIB),
    },
)
