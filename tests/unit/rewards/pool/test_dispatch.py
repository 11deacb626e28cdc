"""Which worker gets what and when, on pretended workers: nothing here waits for a limit."""

from __future__ import annotations

import pytest

from mega_rl.rewards.pool.dispatch import MAX_FRUITLESS, PoolError
from mega_rl.rewards.pool.process import WorkerFailure
from mega_rl.rewards.pool.worker import EXITED
from tests.pretended.reward_workers import PretendedWorker, pretended_pool, right


def test_a_sample_that_hangs_holds_up_none_that_was_submitted_later() -> None:
    class Worker(PretendedWorker):
        released = type(PretendedWorker.released)()

    with pretended_pool(Worker, 2) as pool:
        slow = pool.submit([right(0.5), b"hang", right(2.0)])
        later = [pool.submit([right(float(i))]) for i in range(50)]
        assert [future.result(timeout=60) for future in later] == [[[float(i)]] for i in range(50)]
        assert not slow.done()
        Worker.released.set()
        assert slow.result(timeout=60) == [[0.5, 1.0, 2.0]]


def test_what_is_submitted_first_is_begun_first() -> None:
    begun: list[bytes] = []

    class Worker(PretendedWorker):
        def _answer(self, data: bytes, number: int) -> None:
            begun.append(data)
            super()._answer(data, number)

    texts = [right(float(i)).replace(b"NUMBER", b"%d" % (i + 1)) for i in range(20)]
    with pretended_pool(Worker, 1) as pool:
        futures = [pool.submit([first, second]) for first, second in zip(texts[::2], texts[1::2], strict=True)]
        assert [future.result(timeout=60) for future in futures] == [[[float(i), i + 1.0]] for i in range(0, 20, 2)]
    assert begun == texts


class Dying(PretendedWorker):
    """Loads the rewards and ends."""

    num_started = 0

    def has_ended(self) -> bool:
        return True


def test_workers_that_end_whenever_they_are_idle_are_not_replaced_for_ever() -> None:
    with pretended_pool(Dying, 1) as pool:
        for _ in range(2):  # nor later
            message = (
                "a worker process ended the worker with exit status 3 soon after it had loaded mine.py:reward 3 times "
                "in a row; fix what the import"
            )
            with pytest.raises(PoolError, match=message):
                pool.submit([right(1.0), right(2.0)]).result(timeout=60)
    assert Dying.num_started == MAX_FRUITLESS


def test_workers_that_no_longer_load_are_not_replaced_for_ever() -> None:
    class Once(PretendedWorker):
        num_started = 0

        def receive(self) -> dict[str, object] | None:
            if Once.num_started > 1 and self.progress.read()[1] == 0.0:
                raise WorkerFailure(EXITED, "ended the worker by signal 9")
            return super().receive()

    message = "ended the worker by signal 9 while it loaded .* 3 times in a row"
    with pretended_pool(Once, 1) as pool, pytest.raises(PoolError, match=message):
        pool.submit([b"dies", right(2.0)]).result(timeout=60)
    assert Once.num_started == 1 + MAX_FRUITLESS


def test_each_death_costs_one_worker() -> None:
    class Worker(PretendedWorker):
        num_started = 0

    with pretended_pool(Worker, 1) as pool:
        answers = pool.submit([b"dies"] * 20 + [right(1.0)]).result(timeout=60)
    died = (EXITED, "ended the worker with exit status 3")
    assert answers == [[died] * 20 + [1.0]]
    assert Worker.num_started == 21


def test_a_closed_pool_says_so() -> None:
    with pretended_pool(PretendedWorker, 1) as pool:
        assert pool.submit([]).result(timeout=60) == [[]]
    with pytest.raises(PoolError, match="the workers were closed"):
        pool.submit([right(1.0)]).result(timeout=60)
