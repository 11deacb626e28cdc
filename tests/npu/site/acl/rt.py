"""Stands for the runtime part of pyACL; the memory of pretended devices is the host's."""

import ctypes
import os

SUCCESS = 0


def memcpy(destination: int, room: int, source: int, size: int, kind: int) -> int:
    """Stands for aclrtMemcpy: ``size`` bytes from one address to another, whichever side each is on."""
    assert 0 <= size <= room and kind in range(4), (size, room, kind)
    ctypes.memmove(destination, source, size)
    return SUCCESS


def get_device_count() -> tuple[int, int]:
    """Stands for the number of devices of the mask, and the status."""
    return len(os.environ["ASCEND_RT_VISIBLE_DEVICES"].split(",")), SUCCESS
