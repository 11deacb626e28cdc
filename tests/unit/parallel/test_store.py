"""Who can reach the stores and the groups of a run."""

from __future__ import annotations

import os

import psutil
import pytest
import torch.distributed as dist

from mega_rl.parallel.joint_group import join_store, open_meeting
from mega_rl.parallel.store import LOOPBACK, is_one_node, keep_to_loopback, shared_store


def addresses(port: int) -> set[str]:
    connections = psutil.Process().net_connections("inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def test_a_meeting_on_one_machine_listens_on_loopback_only() -> None:
    point, store = open_meeting(LOOPBACK, "gloo", 2, 60.0)
    assert addresses(point.port) == {LOOPBACK}
    join_store(point).set("key", "value")
    assert store.get("key") == b"value"


def test_a_meeting_of_several_machines_listens_for_them() -> None:
    point, _ = open_meeting("localhost", "gloo", 2, 60.0)
    assert addresses(point.port) - {LOOPBACK, "::1"}


@pytest.mark.parametrize(("local", "is_loopback"), [("2", True), ("1", False)])
def test_the_ranks_store_is_open_as_far_as_they_are_apart(
    monkeypatch: pytest.MonkeyPatch, local: str, is_loopback: bool
) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    store = shared_store(60.0)
    assert (addresses(store.port) == {LOOPBACK}) == is_loopback


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, True), ({"WORLD_SIZE": "1"}, True), ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, True),
     ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False), ({"WORLD_SIZE": "4"}, False)],
)  # fmt: skip
def test_one_node(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_one_node() is expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "lo"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}, "eth0"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RAY_ADDRESS": "auto"}, None),  # engines may be elsewhere
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, None),
    ],
)
def test_gloo_listens_at_loopback_where_all_are_here(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str | None
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RAY_ADDRESS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    keep_to_loopback()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
