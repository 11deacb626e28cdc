"""Which Ascend devices a process sees: the device mask, and physical against logical device ids. Pure functions.

A *physical* id is a number that stands in the mask, and what Ray hands out; without a mask it counts the devices of the
host or container. A *logical* id counts the devices that the mask leaves, from 0: the only kind that ``set_device``
takes. CANN reads the mask up to the first character that is neither a digit nor a comma and takes it in ascending order
only, both without a word; here anything but a mask that means what it says is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mega_rl.errors import InputError

MASK = "ASCEND_RT_VISIBLE_DEVICES"
RAY_KEEPS_MASK = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
# Variables that look like masks and are none. ASCEND_VISIBLE_DEVICES is not among them: the container runtime reads it
# when a container starts, and it stands in every container that was started so.
NOT_MASKS = {
    "NPU_VISIBLE_DEVICES": "is read by nothing",
    "ASCEND_VISIBLE_DEVICE": "is read by nothing",
    "ASCEND_RT_VISIBLE_DEVICE": "is read by nothing",
}


def read_mask(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """The physical ids that this process may use, ascending; None if there is no mask.

    Raises:
        InputError: a mask that CANN would read otherwise than it looks.
    """
    text = environ.get(MASK)
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise InputError(f"{MASK} is {text!r}: write device ids joined by commas without blanks, such as 0,1,2,3")
    ids = tuple(int(part) for part in text.split(","))
    if len(set(ids)) < len(ids):
        raise InputError(f"{MASK} is {text!r}, which names a device twice: name every device once")
    if ids != tuple(sorted(ids)):
        right = ",".join(map(str, sorted(ids)))
        raise InputError(f"{MASK} is {text!r}, but CANN takes ids in ascending order only: set it to {right}")
    return ids


def check_visible(mask: tuple[int, ...] | None, num_visible: int, num_on_host: int | None = None) -> None:
    """InputError if the mask names devices that are not there.

    Args:
        num_visible: devices that the runtime offers under this mask, of which it drops the absent ones.
        num_on_host: devices of the host or container; None if it is not known.
    """
    if mask is None:
        return
    absent = [i for i in mask if num_on_host is not None and i >= num_on_host]
    if not absent and num_visible < len(mask):
        absent = list(mask[num_visible:])
    if absent:
        there = num_on_host if num_on_host is not None else num_visible
        raise InputError(
            f"{MASK} is {_joined(mask)!r}, but of these {_joined(absent)} {'is' if len(absent) == 1 else 'are'} not "
            f"there ({there} usable): name only devices that `npu-smi info` lists, counted from 0"
        )


def check_local_rank(local_rank: int, num_visible: int, mask: tuple[int, ...] | None) -> None:
    """InputError if torchrun started more processes on this host than they have devices."""
    if local_rank < num_visible:
        return
    devices = f"the {num_visible} of {MASK}={_joined(mask)}" if mask is not None else f"{num_visible} on this host"
    raise InputError(
        f"process {local_rank} of this host (LOCAL_RANK) has no device: there {'is' if num_visible == 1 else 'are'} "
        f"{devices}; start at most {num_visible} with --nproc-per-node, or name more devices in {MASK}"
    )


def logical_id(physical_id: int, mask: tuple[int, ...] | None) -> int:
    """What ``set_device`` takes for a physical id: its index in the mask.

    Raises:
        InputError: a device that the mask leaves out.
    """
    if mask is None:
        return physical_id
    if physical_id not in mask:
        raise InputError(
            f"device {physical_id} was assigned to this process, but {MASK}={_joined(mask)} leaves it out: start "
            "`ray start` and the run with the same mask"
        )
    return mask.index(physical_id)


def physical_id(logical_id: int, mask: tuple[int, ...] | None) -> int:
    """The inverse of ``logical_id``."""
    assert mask is None or 0 <= logical_id < len(mask), (logical_id, mask)
    return logical_id if mask is None else mask[logical_id]


def ray_device(assigned: Sequence[str | int], environ: Mapping[str, str]) -> int:
    """The logical id of an actor's only device.

    Args:
        assigned: what ``ray.get_runtime_context().get_accelerator_ids()["NPU"]`` says: physical ids.
        environ: of the actor. Ray sets its mask to the assigned devices, so that the only one is 0, unless
            ``RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES`` is 1: then the node's own mask stays.

    Raises:
        InputError: as ``read_mask`` and ``logical_id``.
    """
    assert len(assigned) == 1, assigned
    return logical_id(int(assigned[0]), read_mask(environ))


def misnamed_masks(environ: Mapping[str, str]) -> list[str]:
    """A sentence for every variable that was set to choose devices and does not."""
    return [
        f"{name} is {environ[name]!r}, but it {why}: set {MASK} to choose devices"
        for name, why in NOT_MASKS.items()
        if name in environ
    ]


def _joined(ids: Sequence[int] | None) -> str:
    return ",".join(map(str, ids or ()))
