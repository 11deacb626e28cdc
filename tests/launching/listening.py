"""What a launch listens on, by the system's tables of sockets."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress

import psutil


def open_to_others(processes: Iterable[psutil.Process]) -> list[str]:
    """``address:port (command)`` for every socket of these processes that another machine could connect to."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for socket in process.net_connections(kind="inet"):
                if socket.status == psutil.CONN_LISTEN and not is_loopback(socket.laddr.ip):
                    found.append(f"{socket.laddr.ip}:{socket.laddr.port} ({' '.join(process.cmdline())[:80]})")
    return found


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return (mapped or parsed).is_loopback
