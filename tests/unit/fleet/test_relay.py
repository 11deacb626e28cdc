"""Who copies weights from whom: what the trainer decides, and what comes of it in a network that is only pretended."""

from __future__ import annotations

import random

import pytest

from benchmarks.weights import relay as pretended
from benchmarks.weights.relay import PretendedNetwork, measured
from mega_rl.fleet.relay import FAN_OUT, NODE_SLOTS, NUM_AHEAD, ChunkWindow, Order, Relay

ROOT = "root"


def relay() -> Relay:
    return Relay(ROOT, slot_of=lambda version: version % 4)


def want(plan: Relay, nodes: str, version: int = 0, stamp: int | None = None) -> list[Order]:
    for node in nodes:
        plan.want(node, version, stamp or 2 * version + 2, ord(node))
    return plan.orders()


def sources(orders: list[Order]) -> dict[str, str]:
    return {order.node: order.source for order in orders}


def test_nodes_that_want_a_version_at_once_form_a_chain() -> None:
    plan = relay()
    orders = want(plan, "abcd", version=5)
    assert sources(orders) == {"a": ROOT, "b": "a", "c": "b", "d": "c"}
    assert [order.source_slot for order in orders] == [1, 0, 0, 0] and {order.slot for order in orders} == {0}
    assert want(plan, "abcd", version=5) == [], "each is told once"


def test_a_node_that_wants_it_later_gets_it_from_whoever_gives_to_the_fewest_and_not_from_the_root() -> None:
    plan = relay()
    for order in want(plan, "ab"):
        plan.came(order, 9, is_whole=True)
    assert sources(want(plan, "c")) == {"c": "a"} or sources(want(plan, "c")) == {"c": "b"}
    assert plan.num_streams(ROOT) == 0


def test_whoever_is_behind_a_lost_node_goes_on_from_the_one_before_it() -> None:
    plan = relay()
    orders = {order.node: order for order in want(plan, "abcd")}
    plan.failed(orders["c"], is_silent=True)  # c says that b is silent
    (again,) = plan.orders()
    assert (again.node, again.source, again.number) == ("c", "a", orders["c"].number), "the same copy goes on"
    assert plan.num_streams("a") == plan.num_streams(ROOT) == 1, "b is given nothing until it says something"
    plan.lost("b")
    assert plan.orders() == []
    plan.lost("a")
    assert sources(plan.orders()) == {"c": ROOT}, "d gets it from c"


def test_nobody_gives_to_more_than_two() -> None:
    """Whoever fails, as often as it may: a source is given up only for another one with room."""
    plan, dice = relay(), random.Random(1)
    asked = want(plan, "abcdefgh")
    for _ in range(300):
        order = dice.choice(asked)
        if dice.random() < 0.7:
            plan.failed(order, is_silent=dice.random() < 0.5)
        else:
            plan.came(order, 1, is_whole=False)
        asked += plan.orders()
        assert max(plan.num_streams(node) for node in [ROOT, *"abcdefgh"]) <= FAN_OUT
    assert len(asked) > 50


def test_a_node_that_was_silent_gives_again_once_it_says_something() -> None:
    plan = relay()
    orders = want(plan, "ab")
    plan.failed(orders[1], is_silent=True)
    assert sources(plan.orders()) == {"b": ROOT}
    assert sources(want(plan, "c")) == {"c": "b"}, "a is silent"
    plan.came(orders[0], 3, is_whole=False)
    assert sources(want(plan, "d")) == {"a": "c", "d": "a"}


def test_a_place_is_taken_from_what_no_engine_needs_and_never_from_what_one_reads() -> None:
    plan = relay()
    (first,) = want(plan, "a", version=0)
    (second,) = want(plan, "a", version=1)
    assert {first.slot, second.slot} == set(range(NODE_SLOTS))
    for order in (first, second):
        plan.came(order, 9, is_whole=True)
    assert want(plan, "a", version=2) == [], "both are read"
    plan.done("a", ord("a"))
    plan.want("a", 1, 4, ord("a"))
    plan.want("a", 2, 6, ord("a"))
    (third,) = plan.orders()
    assert third.slot == first.slot and not plan.is_whole("a", 0, 2) and plan.is_whole("a", 1, 4)


def test_a_version_that_has_no_place_yet_is_forgotten_with_who_wanted_it() -> None:
    plan = relay()
    want(plan, "a", version=0)
    plan.want("a", 1, 4, 7)
    plan.orders()
    plan.want("a", 2, 6, 9)
    assert plan.orders() == []
    plan.done("a", 9)
    plan.done("a", 7)
    plan.want("a", 3, 8, 9)
    (order,) = plan.orders()
    assert order.content == 3, "2 is wanted by nobody"


def test_a_place_that_is_taken_sends_those_that_copied_from_it_elsewhere() -> None:
    plan = relay()
    first, second = want(plan, "ab", version=0)
    plan.came(first, 9, is_whole=True)
    plan.done("a", ord("a"))
    plan.want("a", 1, 4, 1)
    (other,) = plan.orders()
    assert other.slot != first.slot and plan.is_current(second)
    plan.came(other, 9, is_whole=True)
    plan.want("a", 2, 6, 2)
    assert sources(plan.orders()) == {"a": ROOT, "b": ROOT} and not plan.is_current(second)


def test_a_chunk_window_asks_for_one_chunk_more_than_the_source_has() -> None:
    window = ChunkWindow(6)
    assert [window.next(), window.next()] == [0, None]
    window.answered(0, at_source=3, has_come=True)
    assert [window.next(), window.next(), window.next(), window.next()] == [1, 2, 3, None]
    window.answered(2, 3, has_come=True)
    window.written(2)
    assert window.have == 0, "chunks without a gap"
    window.written(0)
    window.answered(1, 3, has_come=True)
    window.written(1)
    assert window.have == 3
    window.answered(3, 3, has_come=False)
    assert window.next() == 3, "it is asked for again"
    window.ask_another()
    assert [window.next(), window.next()] == [3, None], "nothing is known of another source"
    window.answered(3, 6, has_come=True)
    assert [window.next(), window.next(), window.next()] == [4, 5, None] and NUM_AHEAD > 2


@pytest.mark.parametrize("dead", [None, 0, 15, 31])
def test_70b_to_32_nodes_takes_little_longer_than_to_one_though_a_node_is_lost(dead: int | None) -> None:
    """145 GB over links of 1 GB/s: counts, and seconds of a pretended clock."""
    found = measured(num_nodes=32, num_bytes=145e9, rate=1e9, dead=dead, chunk_bytes=1 << 26)
    assert found["of_ideal"] <= (1.1 if dead is None else 1.3), found
    assert found["root_streams"] <= 2 and found["most_streams"] <= FAN_OUT, found
    assert found["root_sent"] <= (1.0 if dead is None else 1.6), found


def test_a_network_without_another_source_for_those_behind_a_lost_node_never_ends() -> None:
    """What the test above would see of a relay that tells nobody of another source."""
    network = PretendedNetwork(num_nodes=3, num_chunks=50, chunk_s=0.1)
    network.at(1.0, lambda: network.dead.add("node 0"))
    network.relay.failed = lambda order, is_silent: None  # type: ignore[method-assign]

    def give_up() -> None:
        raise TimeoutError("nothing more came")

    network.at(1000 * pretended.SILENCE_S, give_up)
    with pytest.raises(TimeoutError):
        network.run()
