"""Whatever a reward does to its process costs its own sample: every kind of harm, on real workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.errors import InputError
from mega_rl.rewards.pool import dispatch
from mega_rl.rewards.pool.pool import WorkerPool
from mega_rl.rewards.pool.process import WorkerProcess
from mega_rl.rewards.scorer import Scorer, build_scorer
from mega_rl.types import Prompt, Score, Trajectory
from tests.launching.launch import alive

pytestmark = pytest.mark.slow  # as a module

HOSTILE = """
import asyncio, ctypes, os, re, signal, subprocess, sys, threading, time

def ignore_signals():
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            pass

def act(solution_str):
    word = solution_str.split()[0]
    if word == "raise": raise RuntimeError("no " + solution_str)
    if word == "interrupt": raise KeyboardInterrupt
    if word == "exit": sys.exit(3)
    if word == "die": os._exit(3)
    if word == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if word == "crash": ctypes.string_at(0)
    if word == "hang":
        ignore_signals()
        while True: time.sleep(1)
    if word == "hang_in_c":  # holds the interpreter lock: no handler and no other thread runs
        ignore_signals()
        re.match("(a*)*b", "a" * 40)
    if word == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if word == "memory": return float(len(bytearray(1 << 32)))
    if word == "fork":
        if os.fork() == 0: time.sleep(600)
    if word == "fork_and_return":
        if os.fork() == 0: time.sleep(5)
    if word == "daemon": subprocess.Popen(["sleep", "600"], start_new_session=True)
    if word == "nan": return float("nan")
    if word == "text": return "1.0"
    if word == "nothing": return None
    if word == "liar":
        class Liar(float):
            def __repr__(self): raise SystemExit
        return Liar("inf")
    if word == "print":
        print("rubbish" * 10000)
        sys.stderr.write("rubbish")
        os.write(1, b"rubbish")
    if word == "channel":
        for fd in range(3, 1024):
            try:
                os.write(fd, b"rubbish\\n")
            except OSError:
                pass
        time.sleep(600)
    if word == "close": os.closerange(3, 1024); time.sleep(600)
    return float(word) if word.isdigit() else 1.0

def harm(data_source, solution_str, ground_truth, extra_info): return act(solution_str)

async def harm_async(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "sleep":
        await asyncio.sleep(600)
    await asyncio.sleep(0.01)
    return act(solution_str)

def harm_batch(data_sources, solution_strs, ground_truths, extra_infos):
    if "short" in solution_strs: return [1.0]
    return [act(solution) for solution in solution_strs]

def num_tokens(data_source, solution_str, ground_truth, extra_info, num_response_tokens): return num_response_tokens

def hash_order(data_source, solution_str, ground_truth, extra_info):
    return float(len(next(iter({"a", "bb", "ccc", "dddd"}))))
"""
CAUSES = {
    "raise": ("raised", "raised RuntimeError: no raise"),
    "interrupt": ("raised", "raised KeyboardInterrupt: "),
    "exit": ("raised", "raised SystemExit: 3"),
    "die": ("exited", "ended the worker with exit status 3"),
    "kill": ("exited", "ended the worker by signal 9"),
    "crash": ("exited", "ended the worker by signal 11"),
    "hang": ("timed_out", "gave no value within 5 s"),
    "hang_in_c": ("timed_out", "gave no value within 5 s"),
    "stop": ("timed_out", "gave no value within 5 s"),
    "memory": ("out_of_memory", "ran out of memory"),
    "fork": ("left_processes", "left child processes running"),
    "fork_and_return": ("left_processes", "left child processes running"),
    "daemon": ("left_processes", "left child processes running"),
    "nan": ("not_a_number", "returned nan"),
    "text": ("not_a_number", "returned '1.0'"),
    "nothing": ("not_a_number", "returned None"),
    "liar": ("raised", "raised SystemExit: "),
    "channel": ("garbled", "wrote to the channel between worker and trainer"),
    "close": ("exited", "closed the channel between worker and trainer"),
}
WORKERS = RewardWorkersConfig(num_workers=2, timeout_s=5.0, memory_bytes=1 << 30)


@pytest.fixture(autouse=True)
def calls_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many samples in a call as their number allows, however long they take."""
    monkeypatch.setattr(dispatch, "CALL_S", 1e9)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "hostile.py"
    path.write_text(HOSTILE)
    return str(path)


def children() -> set[int]:
    """Process ids of everything below this process that runs."""
    return {child.pid for child in psutil.Process().children(recursive=True) if alive(child.pid)}


@pytest.fixture(scope="module")
def earlier() -> set[int]:
    """What other tests of the session keep running."""
    return children()


@pytest.fixture(scope="module")
def scorers(hostile: str, earlier: set[int]) -> Iterator[dict[str, Scorer]]:
    """One that runs out of time soon, and one that does not, however busy the machine is."""
    patient = replace(WORKERS, timeout_s=60.0)
    rewards = [RewardConfig(f"{hostile}:harm")]
    built = {"hasty": build_scorer(rewards, WORKERS), "patient": build_scorer(rewards, patient)}
    yield built
    for scorer in built.values():
        scorer.close()


def pool_of(scorer: Scorer) -> WorkerPool:
    assert isinstance(scorer.pool, WorkerPool)
    return scorer.pool


def workers_of(scorer: Scorer) -> list[WorkerProcess]:
    return [slot.worker for slot in pool_of(scorer)._dispatcher.slots]


def trajectory(text: str, index: int = 0, num_tokens: int = 1, truth: str = "t") -> Trajectory:
    prompt, ids, logprobs = Prompt(index, (1,), "?", truth, "src"), (1,) * num_tokens, (0.0,) * num_tokens
    return Trajectory.single_turn(prompt, 2, ids, logprobs, text, "stop", 0)


def score(scorer: Scorer, *texts: str) -> list[Score]:
    return scorer.score([trajectory(text, index) for index, text in enumerate(texts)])


def causes(scores: list[Score]) -> list[str | None]:
    return [next((u.cause for u in s.unknown.values()), None) for s in scores]


@pytest.mark.parametrize("word", CAUSES)
def test_harm_costs_its_own_sample_only(scorers: dict[str, Scorer], earlier: set[int], word: str) -> None:
    texts = [str(i) for i in range(40)]
    texts[7] = word
    scores = score(scorers["hasty" if CAUSES[word][0] == "timed_out" else "patient"], *texts)
    assert [s.value for i, s in enumerate(scores) if i != 7] == [float(i) for i in range(40) if i != 7]
    assert not scores[7].is_known and scores[7].parts == {}
    (unknown,) = scores[7].unknown.values()
    assert (unknown.cause, unknown.detail) == CAUSES[word]
    # Nothing that a reward started outlives its sample, in whatever session it runs; it is killed by then, and dies.
    workers = {worker.pid for scorer in scorers.values() for worker in workers_of(scorer)}
    deadline = time.monotonic() + 60
    while (left := children() - earlier) != workers and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == workers


def test_printing_does_no_harm(scorers: dict[str, Scorer], capfd: pytest.CaptureFixture[str]) -> None:
    assert [s.value for s in score(scorers["patient"], "print", "3")] == [1.0, 3.0]
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_was_killed_while_idle_costs_nothing(hostile: str) -> None:
    scorer = build_scorer([RewardConfig(f"{hostile}:harm")], replace(WORKERS, timeout_s=60.0))
    for worker in workers_of(scorer):
        process = psutil.Process(worker.pid)
        process.kill()
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    assert [s.value for s in score(scorer, "1", "2", "3")] == [1.0, 2.0, 3.0]
    scorer.close()


def test_workers_keep_out_of_the_process_group_and_leave_no_files(hostile: str) -> None:
    scorer = build_scorer([RewardConfig(f"{hostile}:harm")], WORKERS)
    pids, folders = zip(*((worker.pid, worker.scratch) for worker in workers_of(scorer)), strict=True)
    assert all(os.getsid(pid) == pid != os.getsid(0) for pid in pids)
    assert all(Path(folder).is_dir() for folder in folders)
    scorer.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any(Path(folder).exists() for folder in folders)


def test_values_do_not_depend_on_the_number_of_workers(hostile: str) -> None:
    names = ("harm", "harm_batch", "harm_async", "num_tokens", "hash_order")
    texts = ["5", "raise", "nan", "die", *map(str, range(30))]
    trajectories = [trajectory(text, index, num_tokens=index + 1) for index, text in enumerate(texts)]
    found = []
    for num_workers in (1, 3):
        workers = RewardWorkersConfig(num_workers=num_workers, timeout_s=60.0)
        scorer = build_scorer([RewardConfig(f"{hostile}:{name}") for name in names], workers)
        found.append([(s.parts, s.unknown) for s in scorer.score(trajectories)])
        scorer.close()
    assert found[0] == found[1]
    assert [parts["num_tokens"] for parts, _ in found[0]] == [float(i + 1) for i in range(len(texts))]
    assert [unknown.get("harm") for _, unknown in found[0]].count(None) == len(texts) - 3


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("harm_async", "sleep", "timed_out"),
        ("harm_async", "hang", "timed_out"),  # blocks the loop for the others
        ("harm_async", "raise", "raised"),
        ("harm_batch", "die", "exited"),
        ("harm_batch", "nothing", "not_a_number"),
    ],
)
def test_harm_within_a_call_of_many_samples(hostile: str, name: str, text: str, cause: str) -> None:
    workers = RewardWorkersConfig(num_workers=1, timeout_s=5.0 if cause == "timed_out" else 60.0)
    scorer = build_scorer([RewardConfig(f"{hostile}:{name}")], workers)
    scores = score(scorer, "1", text, "3")
    scorer.close()
    assert causes(scores) == [None, cause, None]
    assert [scores[0].value, scores[2].value] == [1.0, 3.0]


def test_a_batch_that_raises_or_has_the_wrong_length_is_tried_one_by_one(hostile: str) -> None:
    scorer = build_scorer([RewardConfig(f"{hostile}:harm_batch")], RewardWorkersConfig(num_workers=1, timeout_s=60.0))
    assert causes(score(scorer, "1", "raise", "3")) == [None, "raised", None]
    assert causes(score(scorer, "1", "short", "3")) == [None, None, None]  # alone, its one value is of the right length
    scorer.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os; os._exit(3)", "a worker process ended the worker with exit status 3 while it loaded"),
        ("raise SystemExit('bye')", "cannot be imported .SystemExit: bye"),
        ("x = bytearray(1 << 32)", "cannot be imported .MemoryError"),
    ],
)
def test_an_import_that_does_harm_is_refused(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(InputError, match=message):
        build_scorer([RewardConfig(f"{path}:f")], WORKERS)


def test_workers_die_with_the_trainer(hostile: str) -> None:
    program = f"""
import os, signal, threading
from mega_rl.config.schema.sections import RewardConfig, RewardWorkersConfig
from mega_rl.rewards.scorer import build_scorer
from tests.unit.rewards.pool.test_pool import trajectory, workers_of
scorer = build_scorer([RewardConfig({(hostile + ":harm")!r})], RewardWorkersConfig(num_workers=2, timeout_s=600.0))
print(*(worker.pid for worker in workers_of(scorer)), flush=True)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
scorer.score([trajectory("hang_in_c")])
"""
    ended = subprocess.run((sys.executable, "-c", program), stdout=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == -9
    workers = [int(pid) for pid in ended.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlives the trainer"
        time.sleep(0.02)


def test_workers_load_no_torch() -> None:
    program = "import sys, mega_rl.rewards.pool.worker, mega_rl.rewards.functions.code; print('torch' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", program), stdout=subprocess.PIPE, text=True).stdout == "False\n"
