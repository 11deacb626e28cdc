"""What any run needs of the machine: ports, disk, shared memory, limits, memory, processors and the network."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from mega_rl.doctor.finding import CPU, CUDA, NPU, Check, CheckAnswer, Wanted, fail, ok, skip, warn
from mega_rl.doctor.host import Host

GIB = 1 << 30
MIN_DISK_BYTES = 1 * GIB
ROOMY_DISK_BYTES = 50 * GIB  # a few checkpoints with optimizer state of a small model
MIN_SHARED_BYTES = 128 << 20  # Docker's default is 64 MiB, which collectives of two ranks overflow
ROOMY_SHARED_BYTES = 1 * GIB
MIN_FILES = 4096
MIN_MEMORY_BYTES = 4 * GIB
MASTER_PORT = 29500  # torchrun's
HCCL_BASE_PORT = 60000
HCCL_NUM_PORTS = 16
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes a number when it means no limit


def parse_ports(text: str) -> tuple[int, ...]:
    """ "29500,60000-60015" -> every port; ValueError for anything else."""
    ports: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        span = range(int(first), int(last if dash else first) + 1)
        if not span or span[0] < 1 or span[-1] > 65535:
            raise ValueError(text)
        ports += span
    return tuple(ports)


def _joined(ports: Sequence[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    runs = [[p for _, p in run] for _, run in groupby(enumerate(ports), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _hccl_ports(host: Host) -> tuple[tuple[int, ...], str]:
    """The ports of the host that HCCL takes, and the variable that moves them."""
    text = host.environ.get("HCCL_HOST_SOCKET_PORT_RANGE", "")
    if text == "auto":
        return (), "HCCL_HOST_SOCKET_PORT_RANGE"
    if text:
        return parse_ports(text), "HCCL_HOST_SOCKET_PORT_RANGE"
    base = int(host.environ.get("HCCL_IF_BASE_PORT", HCCL_BASE_PORT))
    return tuple(range(base, base + HCCL_NUM_PORTS)), "HCCL_IF_BASE_PORT"


def ports(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    if wanted.ports is not None:
        taken = [port for port in wanted.ports if not host.can_bind(port)]
        if taken:
            yield fail(f"in use: {_joined(taken)}", "name other --ports, or end what listens there (`ss -ltnp`)")
        else:
            yield ok(f"free: {_joined(wanted.ports)}")
        return
    text = host.environ.get("MASTER_PORT", "")
    master = int(text) if text.isdigit() and int(text) else MASTER_PORT
    if host.can_bind(master):
        yield ok(f"the launcher's port {master} is free")
    else:
        yield warn(f"the launcher's port {master} is in use", "torchrun --master-port N with a free one")
    if wanted.platform != NPU:
        return
    try:
        wanted_ports, variable = _hccl_ports(host)
    except ValueError:
        name = "HCCL_HOST_SOCKET_PORT_RANGE or HCCL_IF_BASE_PORT"
        yield fail(f"{name} is no list of ports", "write it as 60000-60050, or 60000,60010-60020")
        return
    taken = [port for port in wanted_ports if not host.can_bind(port)]
    if taken:
        yield warn(f"HCCL's ports {_joined(taken)} are in use", f"export {variable} with free ones")
    elif wanted_ports:
        yield ok(f"HCCL's ports {_joined(wanted_ports)} are free")


def disk(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    temporary = host.environ.get("TMPDIR", "/tmp")
    places = {"trainer.output_dir": (str(wanted.output_dir), ROOMY_DISK_BYTES), "TMPDIR": (temporary, MIN_DISK_BYTES)}
    for key, (path, roomy) in places.items():
        found = host.disk(path)
        if found is None:
            yield fail(f"{path} cannot be looked at", f"set {key} to a directory that you may write to")
            continue
        if not found.is_writable:
            yield fail(f"{path} cannot be written to", f"set {key} to a directory that you may write to")
            continue
        sentence = f"{path}: {found.free_bytes / GIB:.1f} of {found.total_bytes / GIB:.0f} GiB free"
        if found.free_bytes < MIN_DISK_BYTES:
            yield fail(sentence, f"free some space, or set {key} to a larger disk")
        elif found.free_bytes < roomy:
            yield warn(sentence, f"set {key} to a larger disk, or lower checkpoint.keep_checkpoints")
        else:
            yield ok(sentence)


def shared_memory(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    found = host.disk("/dev/shm")
    fix = "docker run --shm-size=16g (or --ipc=host); on a host: mount -o remount,size=16G /dev/shm"
    if found is None:
        yield fail("there is no /dev/shm", fix)
        return
    sentence = f"/dev/shm: {found.free_bytes / GIB:.2f} of {found.total_bytes / GIB:.2f} GiB free"
    if found.free_bytes < MIN_SHARED_BYTES:
        yield fail(sentence, fix)
    else:
        yield warn(sentence, fix) if found.free_bytes < ROOMY_SHARED_BYTES else ok(sentence)


def limits(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    text = host.read("/proc/self/limits") or ""
    soft = dict(re.findall(r"^Max (open files|locked memory)\s+(\S+)", text, re.MULTILINE))
    if len(soft) < 2:
        yield skip("/proc/self/limits does not say")
        return
    files, locked = soft["open files"], soft["locked memory"]
    if files.isdigit() and int(files) < MIN_FILES:
        yield warn(f"{files} open files for a process", "ulimit -n 65536 (docker run --ulimit nofile=65536)")
    else:
        yield ok(f"{files} open files for a process")
    if wanted.platform == CPU or wanted.num_nodes == 1:
        yield skip(f"locked memory ({locked}) matters to network cards between nodes only")
    elif locked != "unlimited":
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1)"
        yield warn(f"{locked} bytes of locked memory: RDMA between nodes registers more", fix)
    else:
        yield ok("locked memory is unlimited")


def _cgroup(host: Host, controller: str, v2_file: str, v1_file: str) -> str | None:
    """The setting of this process's control group, version 2 or 1, in a container or outside."""
    own = re.search(
        rf"^\d+:(?:[^:]*\b{controller}\b[^:]*)?:(/\S*)$", host.read("/proc/self/cgroup") or "", re.MULTILINE
    )
    path = own.group(1).rstrip("/") if own else ""
    for place in (f"{path}/{v2_file}", f"/{v2_file}", f"/{controller}{path}/{v1_file}", f"/{controller}/{v1_file}"):
        text = host.read(f"/sys/fs/cgroup{place}")
        if text is not None:
            return text.strip()
    return None


def host_memory(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", host.read("/proc/meminfo") or "", re.MULTILINE))
    if len(found) < 2:
        yield skip("/proc/meminfo does not say")
        return
    total, available = (int(found[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = _cgroup(host, "memory", "memory.max", "memory.limit_in_bytes") or ""
    bound = min(available, int(limit)) if limit.isdigit() and int(limit) < _NO_LIMIT_BYTES else available
    sentence = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if bound < available:
        sentence += f", this container's limit is {bound / GIB:.1f} GiB"
    fix = "end other processes, or give the container more (docker run --memory)"
    yield warn(sentence, fix) if bound < MIN_MEMORY_BYTES else ok(sentence)


def processors(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    allowed = re.search(r"^Cpus_allowed_list:\s+(\S+)", host.read("/proc/self/status") or "", re.MULTILINE)
    if allowed is None:
        yield skip("/proc/self/status does not say")
        return
    spans = [part.partition("-") for part in allowed.group(1).split(",")]
    count = sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    quota = (_cgroup(host, "cpu", "cpu.max", "cpu.cfs_quota_us") or "").split()
    period = quota[1] if len(quota) > 1 else _cgroup(host, "cpu", "cpu.max", "cpu.cfs_period_us") or ""
    sentence, cores = f"{count} cores", float(count)
    if quota and quota[0].isdigit() and period.isdigit() and int(period):
        cores = min(cores, int(quota[0]) / int(period))
        sentence += f", this container may use {cores:g}"
    threads = host.environ.get("OMP_NUM_THREADS", "")
    chips = len([path for path in host.glob("/dev/davinci*") if path.removeprefix("/dev/davinci").isdigit()])
    if threads.isdigit() and int(threads) > cores:
        yield warn(f"{sentence}; OMP_NUM_THREADS={threads} is more", f"export OMP_NUM_THREADS={max(1, int(cores))}")
    elif cores < 2 * chips:
        yield warn(f"{sentence} for {chips} devices: at least two each", "give the container more (docker run --cpus)")
    else:
        yield ok(sentence)


def _interfaces(host: Host) -> list[str]:
    return re.findall(r"^\s*([^\s:]+):", host.read("/proc/net/dev") or "", re.MULTILINE)


def _addresses(host: Host) -> set[str]:
    """The host's own addresses; the IPv4 routing table lists each before "/32 host LOCAL"."""
    found = set(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", host.read("/proc/net/fib_trie") or ""))
    version_6 = re.findall(r"^([0-9a-f]{32})\b", host.read("/proc/net/if_inet6") or "", re.MULTILINE)
    return found | {str(ipaddress.IPv6Address(int(digits, 16))) for digits in version_6}


SOCKET_NAMES = {
    NPU: ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    CUDA: ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    CPU: ("GLOO_SOCKET_IFNAME",),
}


def _matches(pattern: str, names: Sequence[str], exact: bool) -> list[str]:
    """Interfaces that a variable chooses: "eth0,eth1"; HCCL and NCCL take prefixes, "=" exact names, "^" all others."""
    excludes = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = exact or pattern.startswith("=")
    parts = [part.strip() for part in pattern.removeprefix("=").split(",") if part.strip()]
    found = [n for n in names if any(n == part if exact else n.startswith(part) for part in parts)]
    return [n for n in names if n not in found] if excludes else found


def interfaces(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    names = _interfaces(host)
    others = ", ".join(name for name in names if name != "lo") or "none"
    variables = SOCKET_NAMES[wanted.platform]
    said = False
    for variable in variables:
        value = host.environ.get(variable, "")
        if not value:
            continue
        said = True
        chosen = _matches(value, names, exact=variable.startswith("GLOO"))
        if chosen:
            yield ok(f"{variable}={value} chooses {', '.join(chosen)}")
        else:
            yield fail(
                f"{variable}={value} names no interface of this host ({others})", f"export {variable} with one of them"
            )
    address = host.environ.get("HCCL_IF_IP", "") if wanted.platform == NPU else ""
    if address:
        said = True
        here = _addresses(host)
        if address in here:
            yield ok(f"HCCL_IF_IP={address} is this host's")
        else:
            fix = "set it on every node to that node's own address, or unset it and set HCCL_SOCKET_IFNAME"
            yield fail(f"HCCL_IF_IP={address} is no address of this host ({', '.join(sorted(here)) or 'none'})", fix)
    if said:
        return
    if wanted.num_nodes > 1:
        yield warn(
            f"{variables[0]} is not set (interfaces: {others})",
            f"export {' and '.join(variables)} with the card between nodes",
        )
    else:
        yield skip("one node: no network card is chosen")


def device_network(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """The NPUs' own network cards; inside a supernode (A3) and on one node they are not needed."""
    addresses = re.findall(r"^address_(\d+)=(\S+)", host.read("/etc/hccn.conf") or "", re.MULTILINE)
    if addresses:
        yield ok(f"/etc/hccn.conf gives {len(addresses)} devices an address")
        if wanted.num_nodes > 1:
            yield from _links(host, [index for index, _ in addresses])
    elif wanted.num_nodes == 1:
        yield skip("one node: the devices' own network cards are not needed")
    else:
        yield warn(
            "/etc/hccn.conf gives no device an address, so devices of two nodes cannot reach each other over RoCE",
            "hccn_tool -i ID -ip -s address A netmask M on the host, and mount /etc/hccn.conf into the container",
        )


def _links(host: Host, indices: Sequence[str]) -> Iterator[CheckAnswer]:
    """Whether the devices' network cards have a link, as far as hccn_tool is there to say so."""
    said = {index: host.run(("hccn_tool", "-i", index, "-link", "-g")) for index in indices}
    down = [index for index, ran in said.items() if ran is not None and "DOWN" in ran.output.upper()]
    if down:
        fix = "have their cables and switch ports looked at, or leave them out of ASCEND_RT_VISIBLE_DEVICES"
        yield fail(f"no link on the network cards of devices {', '.join(down)}", fix)


CHECKS = (
    Check("ports", "machine", ports),
    Check("disk", "machine", disk),
    Check("shared memory", "machine", shared_memory),
    Check("limits", "machine", limits),
    Check("host memory", "machine", host_memory),
    Check("processors", "machine", processors),
    Check("network interfaces", "machine", interfaces),
    Check("device network", "machine", device_network, (NPU,)),
)
