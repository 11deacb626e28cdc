"""The devices: can the container reach them, are they healthy and free, and does the mask name them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mega_rl.doctor.finding import CUDA, NPU, Check, CheckAnswer, Wanted, fail, ok, skip, warn
from mega_rl.doctor.host import Host
from mega_rl.doctor.smi import NVIDIA_DEVICES, NVIDIA_PROCESSES, ListedDevice, Smi, parse_npu_smi, parse_nvidia_smi
from mega_rl.errors import InputError
from mega_rl.platform import PLATFORMS
from mega_rl.platform.ascend import devices as ascend_devices

GIB = 1 << 30
MAX_USED_SHARE = 0.15  # share of a device's memory that may be taken; an idle 910B holds 5 % itself
NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
SMI = {NPU: "npu-smi info", CUDA: "nvidia-smi"}
# What npu-smi says instead of a table -> what it means.
REFUSALS = {
    "-8005": "the driver does not answer, or the devices belong to another container",
    "-8020": "the devices are in use by another container",
}


def device_nodes(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """Docker hands devices over one by one."""
    chips = [path for path in host.glob("/dev/davinci*") if path.removeprefix("/dev/davinci").isdigit()]
    missing = [path for path in NODES if not host.glob(path)]
    if not chips:
        missing.insert(0, "/dev/davinci0")
    if missing:
        flags = " ".join(f"--device {path}" for path in missing)
        yield fail(
            f"not there: {', '.join(missing)}", f"on the host, install the driver; for a container: docker run {flags}"
        )
    else:
        yield ok(f"{len(chips)} /dev/davinci*, and {', '.join(NODES)}")


def smi(host: Host, platform_name: str) -> Smi | CheckAnswer:
    """What the vendor's tool lists, or why it does not."""
    if platform_name == NPU:
        ran = host.run(("npu-smi", "info"))
        if ran is None:
            return fail(
                "npu-smi is not there",
                "install the driver; in a container: -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi -v "
                "/usr/local/dcmi:/usr/local/dcmi",
            )
        found = parse_npu_smi(ran.output)
        said = f"{ran.output}{ran.errors}"
        meaning = next((text for code, text in REFUSALS.items() if f"ret is {code}" in said), "")
        if meaning:
            return fail(
                f"npu-smi: {ran.last_words}: {meaning}", "end the other container, or start this one with other devices"
            )
    else:
        form = "--format=csv,noheader,nounits"
        ran = host.run(("nvidia-smi", f"--query-gpu={NVIDIA_DEVICES}", form))
        if ran is None:
            return fail("nvidia-smi is not there", "install the driver; for a container: docker run --gpus all")
        apps = host.run(("nvidia-smi", f"--query-compute-apps={NVIDIA_PROCESSES}", form))
        found = parse_nvidia_smi(ran.output, apps.output if apps else "")
    if ran.is_late:
        return fail(
            f"`{SMI[platform_name]}` did not answer in time", "look for a hung device in `dmesg`, and restart the host"
        )
    if not found.devices:
        return fail(
            f"`{SMI[platform_name]}` lists no device: {ran.last_words}",
            f"run `{SMI[platform_name]}` and fix what it says",
        )
    return found


def health(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    listed = smi(host, wanted.platform)
    if isinstance(listed, CheckAnswer):
        yield listed
        return
    mine = _masked(host, wanted, listed)
    ill = [device for device in mine if device.health != "OK"]
    for device in ill:
        name = f"device {device.index} ({device.name})"
        mask = PLATFORMS[wanted.platform].visible_devices_variable
        yield fail(f"{name} says {device.health}", f"leave it out of {mask} and have it looked at: `{_detail(wanted)}`")
    if not ill:
        names = sorted({device.name for device in mine})
        others = [f"{d.index} ({d.health})" for d in listed.devices if d not in mine and d.health != "OK"]
        left_out = f"; the mask leaves out {', '.join(others)}" if others else ""
        yield ok(f"{len(mine)} x {', '.join(names)}, all healthy{left_out}")


def _detail(wanted: Wanted) -> str:
    return "npu-smi info -t health -i ID" if wanted.platform == NPU else "nvidia-smi -q -d ECC"


def memory(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """Free memory of the devices that the mask leaves; other people's processes are named."""
    listed = smi(host, wanted.platform)
    if isinstance(listed, CheckAnswer):
        yield skip("no device is listed: see `device health`")
        return
    mine = _masked(host, wanted, listed)
    busy = False
    for device in mine:
        running = [process for process in listed.processes if process.device == device.index]
        if device.used_bytes <= MAX_USED_SHARE * device.total_bytes and not running:
            continue
        busy = True
        who = ", ".join(f"pid {p.pid} {p.name}" for p in running) or "no process that is listed here"
        used, total = device.used_bytes / GIB, device.total_bytes / GIB
        yield warn(
            f"device {device.index}: {used:.1f} of {total:.1f} GiB in use by {who}",
            "end that process if it is yours, or leave the device out of the mask",
        )
    if mine and not busy:
        free = min(device.total_bytes - device.used_bytes for device in mine)
        yield ok(f"at least {free / GIB:.1f} GiB free on each of {len(mine)}")
    if not mine:
        yield skip("the mask leaves no device: see `device mask`")


def _masked(host: Host, wanted: Wanted, listed: Smi) -> list[ListedDevice]:
    """The devices that a run would use: all if there is no mask of plain numbers."""
    text = host.environ.get(PLATFORMS[wanted.platform].visible_devices_variable or "", "")
    mask = [int(part) for part in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else None
    return [device for device in listed.devices if mask is None or device.index in mask]


def device_mask(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    listed = smi(host, NPU)
    num_on_host = None if isinstance(listed, CheckAnswer) else len(listed.devices)
    misnamed = ascend_devices.misnamed_masks(host.environ)
    for sentence in misnamed:
        found, _, fix = sentence.rpartition(": ")
        yield warn(found, fix)
    try:
        mask = ascend_devices.read_mask(host.environ)
        if num_on_host is not None:
            ascend_devices.check_visible(mask, num_on_host, num_on_host)
    except InputError as error:
        found, _, fix = str(error).rpartition(": ")
        yield fail(found, fix)
        return
    if mask is not None:
        yield ok(f"{ascend_devices.MASK}={','.join(map(str, mask))}")
    elif not misnamed:
        yield ok(f"{ascend_devices.MASK} is not set: every device is used")


CHECKS = (
    Check("device files", "devices", device_nodes, (NPU,)),
    Check("device health", "devices", health, (CUDA, NPU)),
    Check("device memory", "devices", memory, (CUDA, NPU)),
    Check("device mask", "devices", device_mask, (NPU,)),
)
