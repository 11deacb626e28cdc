"""Where gloo listens, on one node and on several, whatever the host's name stands for."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest

from mega_rl.errors import InputError
from mega_rl.parallel import interfaces
from mega_rl.parallel.interfaces import NAME, addresses_towards, choose_interface, listen_towards

TWO_NODES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.7.0.1"}
ONE_NODE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RAY_ADDRESS", "MASTER_ADDR", NAME):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)


def host(monkeypatch: pytest.MonkeyPatch, own: str | None, ways: dict[str, str], **names: list[str]) -> None:
    """A host whose name stands for the address ``own``, and whose connections to an address leave from another.

    Args:
        own: None: the name stands for nothing.
        names: addresses by interface.
    """

    class Socket:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: object) -> None: ...

        def bind(self, address: tuple[str, int]) -> None: ...

        def connect(self, address: tuple[str, int]) -> None:
            if address[0] not in ways:
                raise OSError("Network is unreachable")
            self.own = ways[address[0]]

            self.other = address[0]

        def getsockname(self) -> tuple[str, int]:
            return self.own, 1

        def getpeername(self) -> tuple[str, int]:
            return self.other, 9

    def looked_up(name: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if name == "node7" and own is None:
            raise socket.gaierror
        return [(socket.AF_INET, 0, 0, "", (own if name == "node7" and own else name, 9))]

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(socket, "socket", Socket)
    there = {"lo": ["127.0.0.1"], **names}
    states = {name: SimpleNamespace(isup=name != "down0") for name in there}
    addresses = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address) for address in of_one]
        for name, of_one in there.items()
    }
    monkeypatch.setattr(interfaces.psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr(interfaces.psutil, "net_if_addrs", lambda: addresses)


@pytest.mark.parametrize(
    ("variables", "own", "expected"),
    [
        (ONE_NODE, "10.7.0.2", "lo"),
        (ONE_NODE | {NAME: "eth5"}, "10.7.0.2", "eth5"),
        (ONE_NODE | {"RAY_ADDRESS": "auto"}, "10.7.0.2", None),  # gloo takes the address of the name
        (ONE_NODE | {"RAY_ADDRESS": "auto"}, "127.0.1.1", "eth0"),  # engines may be elsewhere
        (TWO_NODES, "10.7.0.2", None),
        (TWO_NODES, "127.0.1.1", "eth1"),
        (TWO_NODES, None, "eth1"),
        (TWO_NODES | {NAME: "eth5"}, "127.0.1.1", "eth5"),
        (TWO_NODES | {"MASTER_ADDR": "127.0.1.1"}, "127.0.1.1", "eth0"),  # on that node itself: the default route
    ],
)
def test_gloo_listens_where_the_others_are(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], own: str | None, expected: str | None
) -> None:
    ways = {"10.7.0.1": "10.7.0.2", "192.0.2.1": "10.1.0.2", "127.0.1.1": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    host(monkeypatch, own, ways, eth0=["10.1.0.2"], eth1=["10.7.0.2"], docker0=["172.17.0.1"], down0=["10.9.0.2"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    choose_interface()
    assert os.environ.get(NAME) == expected


def test_without_a_route_the_only_interface_is_taken_and_of_two_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    host(monkeypatch, "127.0.1.1", {}, eth0=["10.1.0.2"], eth1=["10.7.0.2"])
    with pytest.raises(InputError, match=r"name node7 stands for a loopback address.*eth0, eth1.*export GLOO_SOCKET"):
        choose_interface()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    choose_interface()  # the engines of an asynchronous run are in no group with the trainer
    assert NAME not in os.environ
    host(monkeypatch, "127.0.1.1", {}, eth0=["10.1.0.2"], down0=["10.7.0.2"])
    assert listen_towards("10.7.0.1") and os.environ[NAME] == "eth0"


def test_this_host() -> None:
    """With its own tables: whatever the name stands for, an interface that is taken is there."""
    if listen_towards("192.0.2.1"):
        assert os.environ.get(NAME) in {None, *interfaces._interfaces()}


def test_both_ends_of_the_way_to_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, "127.0.1.1", {"10.7.0.1": "10.7.0.2"}, eth0=["10.7.0.2"])
    assert addresses_towards("10.7.0.1") == ("10.7.0.2", "10.7.0.1")
    with pytest.raises(
        InputError, match="no network interface of node7 leads to 10.8.0.1, .*: start every node with an address"
    ):
        addresses_towards("10.8.0.1")
