"""What engines hand to the ranks that own it, over connections of this machine."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rewards.pool.node import introduce
from mega_rl.rewards.pool.nodes import connection_of
from mega_rl.rollout.collect import handed_trajectories
from mega_rl.rollout.collect.handed_trajectories import OwnerAddress, hand_over
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.types import HandedTrajectory, Outcome, Prompt, Trajectory
from tests.pretended.owners import Owners

LAYERS, CHOSEN = 48, 8


def trajectory(sample: int = 0, length: int = 30) -> Trajectory:
    prompt = Prompt(7, (3, 14, 4), "3+4=", "7", "arithmetic")
    ids, logprobs = list(range(length)), [-0.5] * length
    found = Trajectory.single_turn(prompt, sample, ids, logprobs, f"text {sample}", "stop", 5)
    routed = np.random.default_rng(sample).integers(0, 128, (length + 2, LAYERS, CHOSEN), np.uint8)
    return replace(found, routed_experts=routed, episode=Outcome("turns", 1, 0.5, None, {}))


@pytest.fixture
def owners() -> Iterator[Owners]:
    with Owners(2) as found:
        yield found


def test_an_owner_has_what_an_engine_handed_over_and_rank_0_what_it_decides_by(owners: Owners) -> None:
    for sample in (0, 1):
        told = hand_over(trajectory(sample), owners.addresses, 3, 4, sample)
        assert isinstance(told, HandedTrajectory) and told.summary == trajectory(sample).summary(*told.summary.key)
        assert (told.summary.owner, told.num_sampled) == (sample, 30)
        assert (told.episode, told.oldest_version) == (trajectory().episode, 5)
        assert len(pickle.dumps(told)) < 500 < LAYERS * CHOSEN * 30, "bytes that rank 0 is sent"
        assert owners.whole(told) == trajectory(sample)
        store = TrajectoryStore(ParallelLayout.create(1), 0)
        store.owners = owners.addresses
        assert store.whole(told) == trajectory(sample) == store.whole(trajectory(sample))
        assert store.add(replace(told, engine=6)) == told.summary._replace(engine=6) and not store._own


def test_validations_and_trainers_of_one_node_are_told_everything(owners: Owners) -> None:
    assert hand_over(trajectory(), owners.addresses, -2, 0, 0) == trajectory()
    assert hand_over(trajectory(), (), 3, 0, 0) == trajectory()
    assert not any(owners.taken)


def test_many_engines_at_once_get_a_number_each(owners: Owners) -> None:
    with ThreadPoolExecutor(32) as threads:
        told = list(threads.map(lambda i: hand_over(trajectory(i), owners.addresses, 0, 0, i), range(200)))
    keys = {one.summary.key for one in told if isinstance(one, HandedTrajectory)}
    assert len(keys) == 200 and [len(taken) for taken in owners.taken] == [100, 100]
    assert all(owners.whole(one).sample_index == i for i, one in enumerate(told))  # type: ignore[arg-type]


def test_what_was_sampled_for_earlier_steps_is_forgotten_though_nobody_was_told_of_it(owners: Owners) -> None:
    told = [hand_over(trajectory(step), owners.addresses, step, 0, 0) for step in range(4)]
    assert sorted(owners.handed[0].forget_before(2)) == [0, 1]
    assert owners.handed[0].get(1) is None and owners.handed[0].get(2) == trajectory(2)
    assert handed_trajectories.given_back(told[3], owners.addresses) == trajectory(3)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="rank 0 has forgotten response 0 too early"):
        handed_trajectories.given_back(told[0], owners.addresses)  # type: ignore[arg-type]


def test_who_does_not_know_the_key_hands_nothing_over_and_takes_nothing(owners: Owners) -> None:
    first = owners.addresses[0]
    wrong = replace(first, key=bytes(32))
    with pytest.raises(RuntimeError, match="cannot hand a response to rank 0 at port"):
        hand_over(trajectory(), [wrong], 0, 0, 0)
    assert not any(owners.taken)
    with connection_of(socket.create_connection((first.host, first.port))) as connection:
        introduce(connection, first.key)
        connection.send_bytes(bytes(handed_trajectories.MAX_WORDS + 1))  # then it is cut off
        with pytest.raises((EOFError, OSError)):
            connection.recv_bytes()
    assert isinstance(hand_over(trajectory(), owners.addresses, 0, 0, 0), HandedTrajectory), "others are served"


def test_an_engine_says_whom_it_cannot_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = OwnerAddress(3, "127.0.0.1", port, bytes(32))
    with pytest.raises(RuntimeError, match=rf"rank 3 at port {port} of 127.0.0.1 \(.*refused.*each other's ports"):
        hand_over(trajectory(), [gone], 0, 0, 0)


def test_a_closed_owner_takes_nothing(owners: Owners) -> None:
    owners.handed[0].close()
    with pytest.raises(RuntimeError, match="cannot hand"):
        hand_over(trajectory(), owners.addresses, 0, 0, 0)
