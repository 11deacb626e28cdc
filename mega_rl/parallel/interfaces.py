"""The network interface at which gloo listens: where those are that must reach this process, and nobody else."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import psutil

from mega_rl.errors import InputError
from mega_rl.parallel.store import is_one_node

NAME = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE = "lo"
AFAR = ("192.0.2.1", "2001:db8::1")  # addresses of documentation, which only a default route leads to
ANY_PORT = 9


def choose_interface() -> None:
    """Choose it for this rank, unless ``GLOO_SOCKET_IFNAME`` names one; before the first group is made.

    Loopback for a run on one node without a Ray cluster of the user's, whose engines may be on other nodes. Else gloo
    takes the address that this host's name stands for, which on Debian and Ubuntu is one of loopback: then it is the
    interface that leads to the other nodes.

    Raises:
        InputError: there are other nodes, and no interface leads to them.
    """
    if is_one_node() and not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault(NAME, LOOPBACK_INTERFACE)
        return
    if listen_towards(os.environ.get("MASTER_ADDR", LOOPBACK_INTERFACE)) or is_one_node():
        return
    raise InputError(
        f"this host's name {socket.gethostname()} stands for a loopback address, at which the ranks on other nodes "
        "cannot reach this one, and several interfaces may lead to them "
        f"({', '.join(sorted(_interfaces())) or 'none is there'}): export {NAME} with the right one on every node"
    )


def listen_towards(host: str) -> bool:
    """Have gloo listen where ``host`` reaches this process, if it would listen at loopback.

    Returns:
        Whether others can reach it, as far as this host knows.
    """
    if NAME in os.environ or not _name_is_loopback():
        return True
    ways = [way for each in (host, *AFAR) if (way := _interface_to(each)) is not None]
    all_there = list(_interfaces())
    if not ways and len(all_there) != 1:
        return False
    os.environ[NAME] = [*ways, *all_there][0]
    return True


def addresses_towards(host: str) -> tuple[str, str]:
    """The address of this machine that connections to a host leave by, and the host's that they go to.

    Raises:
        InputError: there is no way to it.
    """
    for own, other in _ways_to(host):
        return own, other
    raise InputError(
        f"no network interface of {socket.gethostname()} leads to {host}, which has the trainer's rank 0: start every "
        "node with an address of the first one that all of them reach"
    )


def _name_is_loopback() -> bool:
    """Whether gloo listens at loopback by itself, at the first address of the host's name where it can listen."""
    with suppress(OSError):  # the name stands for nothing: gloo takes loopback
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as listener:
                listener.bind(address)
                return _is_loopback(str(address[0]))
    return True


def _interface_to(host: str) -> str | None:
    """The interface that connections from here to a host leave by; None for this machine, and without a way there."""
    for own, _ in _ways_to(host):
        return next((name for name, addresses in _interfaces().items() if own in addresses), None)
    return None


def _ways_to(host: str) -> Iterator[tuple[str, str]]:
    """The own address and the host's, of each way there is to it; nothing is sent."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                yield str(probe.getsockname()[0]), str(probe.getpeername()[0])


def _interfaces() -> dict[str, set[str]]:
    """Addresses by interface, of those that are up and not loopback."""
    states = psutil.net_if_stats()
    found = {
        name: {str(each.address) for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)}
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    return {name: own for name, own in found.items() if own and not any(map(_is_loopback, own))}


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
