"""Who can reach the stores of a run, and how the ranks of one start find each other in torchrun's."""

from __future__ import annotations

import datetime
import json
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch.distributed as dist

from mega_rl.errors import InputError
from mega_rl.parallel import start
from mega_rl.parallel.joint_group import join_store, open_meeting
from mega_rl.parallel.store import LOOPBACK, is_one_node, shared_store


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


def test_every_start_of_the_ranks_has_a_name_of_its_own() -> None:
    """Also after one in which a rank has left its word and died, and one whose first rank died before the others."""
    left, timeout = dist.HashStore(), datetime.timedelta(seconds=60)

    def begin(ranks: int = 3) -> set[str]:
        with ThreadPoolExecutor(ranks) as threads:
            found = [threads.submit(start._agree_on_start, left, rank, ranks, timeout) for rank in range(ranks)]
            return {each.result() for each in found}

    left.set("word/2", "of a rank that died")
    left.set("name", json.dumps(["of one that died", {"1": "gone", "2": "of a rank that died"}]))
    names = [begin() for _ in range(3)]
    assert all(len(each) == 1 for each in names) and len(set.union(*names)) == 3


def test_ranks_that_do_not_come_are_not_waited_for_for_ever() -> None:
    for rank in (0, 1):
        with pytest.raises(InputError, match=f"rank {rank} did not meet all 2 ranks"):
            start._agree_on_start(dist.HashStore(), rank, 2, datetime.timedelta(seconds=0.1))
