"""Who can reach the stores of a run, and how the ranks of one start find each other in torchrun's."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
    left.set("told/of a rank that died", "of one that died")
    names = [begin() for _ in range(3)]
    assert all(len(each) == 1 for each in names) and len(set.union(*names)) == 3


class CountingStore:
    """A store that writes down what one rank asks of it, and how long the answers are."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.asked, self.num_bytes = store, list[str](), 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self.asked.append(name)
            answer = getattr(self._store, name)(*arguments)
            self.num_bytes += len(answer) if isinstance(answer, bytes) else 0
            return answer

        return ask


@pytest.mark.parametrize("ranks", [2, 24])
def test_a_rank_that_waits_for_the_others_asks_the_store_four_times(ranks: int) -> None:
    """However many ranks there are and however late the first one is: its store serves a thousand of them."""
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=60)
    stores = [CountingStore(store) for _ in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        late = [threads.submit(start._agree_on_start, stores[rank], rank, ranks, timeout) for rank in range(1, ranks)]
        store.wait([f"word/{ranks - 1}"], timeout)
        found = {threads.submit(start._agree_on_start, stores[0], 0, ranks, timeout).result()}
        found |= {each.result() for each in late}
    assert len(found) == 1
    assert all(one.asked == ["set", "wait", "get", "set"] and one.num_bytes == 32 for one in stores[1:])


def test_ranks_that_do_not_come_are_not_waited_for_for_ever() -> None:
    for rank in (0, 1):
        with pytest.raises(InputError, match=f"rank {rank} did not meet all 2 ranks"):
            start._agree_on_start(dist.HashStore(), rank, 2, datetime.timedelta(seconds=0.1))
