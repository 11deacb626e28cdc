"""What ``npu-smi info`` and ``nvidia-smi`` print, as records.

npu-smi's table has two lines per chip. Known forms: 24.1 and 25.x on Atlas A2 (the second line holds only the chip),
on Atlas A3 (chip and physical id), 26.0 (wider, the process table with a fifth column), 310P (no HBM column), 950 (the
process table without a chip).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 1 << 20
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")


@dataclass(frozen=True)
class Process:
    device: int  # index into the devices
    pid: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class ListedDevice:
    index: int  # what the device mask speaks of: the position in the table
    name: str
    health: str
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Smi:
    """Every device of the machine, or of the container, and what runs on them."""

    version: str  # the driver's
    devices: tuple[ListedDevice, ...]
    processes: tuple[Process, ...]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def parse_npu_smi(text: str) -> Smi:
    """``npu-smi info``; a form that is not known gives no devices."""
    version = _VERSION.search(text)
    rows = [_cells(line) for line in text.splitlines() if line.lstrip().startswith("|")]
    devices: list[ListedDevice] = []
    index_of: dict[tuple[str, ...], int] = {}  # (NPU, chip) -> index
    processes: list[Process] = []
    first: list[str] | None = None  # the first of the two lines of a chip
    in_processes = False
    for row in rows:
        in_processes = in_processes or row[0].startswith("NPU") and any("Process id" in cell for cell in row)
        if in_processes:
            processes += _process(row, index_of)
        elif len(row) == 3 and row[0][:1].isdigit():
            if first is None:
                first = row
                continue
            pairs = _PAIR.findall(row[2])
            used, total = next((pair for pair in reversed(pairs) if int(pair[1])), ("0", "0"))
            npu, _, name = first[0].partition(" ")
            index_of[(npu, row[0].split()[0])] = len(devices)
            devices.append(ListedDevice(len(devices), name.strip(), first[1], int(used) * MIB, int(total) * MIB))
            first = None
    return Smi(version.group(1) if version else "", tuple(devices), tuple(processes))


def _process(row: list[str], index_of: dict[tuple[str, ...], int]) -> list[Process]:
    """[NPU chip, pid, name, MiB, ...]; the header and "No running processes" have no pid in the second cell."""
    if len(row) < 4 or not row[1].isdigit():
        return []
    place = tuple(row[0].split())
    device = index_of.get(place if len(place) > 1 else (place[0], "0"))
    memory = re.match(r"\d+", row[3])
    return [] if device is None else [Process(device, int(row[1]), row[2], int(memory.group()) * MIB if memory else 0)]


NVIDIA_DEVICES = "index,name,driver_version,memory.used,memory.total,uuid,ecc.errors.uncorrected.volatile.total"
NVIDIA_PROCESSES = "gpu_uuid,pid,process_name,used_memory"


def parse_nvidia_smi(devices_csv: str, processes_csv: str) -> Smi:
    """``nvidia-smi --query-gpu=NVIDIA_DEVICES`` and ``--query-compute-apps=NVIDIA_PROCESSES``, csv,noheader,nounits."""
    devices, index_of, version = [], {}, ""
    for row in _csv(devices_csv, 7):
        index, name, version, used, total, uuid, errors = row
        health = f"{errors} uncorrected memory errors" if errors.isdigit() and errors != "0" else "OK"
        index_of[uuid] = int(index)
        devices.append(ListedDevice(int(index), name, health, _mib(used), _mib(total)))
    processes = [
        Process(index_of[uuid], int(pid), name, _mib(memory))
        for uuid, pid, name, memory in _csv(processes_csv, 4)
        if uuid in index_of
    ]
    return Smi(version, tuple(devices), tuple(processes))


def _csv(text: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _mib(text: str) -> int:
    return int(text) * MIB if text.isdigit() else 0  # "[N/A]" on shared and unified memory
