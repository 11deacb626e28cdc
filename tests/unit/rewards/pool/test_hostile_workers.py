"""What rewards tried on the pool that nothing else shows: forged answers, calls without an end, memory, leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.errors import InputError
from mega_rl.rewards.pool.answers import read_answers, read_kinds
from mega_rl.rewards.pool.process import WorkerFailure
from mega_rl.rewards.sandbox import scratch
from mega_rl.rewards.scorer import build_scorer
from mega_rl.types import Score
from tests.launching.launch import alive
from tests.unit.rewards.pool.test_pool import calls_of_many, causes, score  # noqa: F401

pytestmark = pytest.mark.slow  # as a module

HOSTILE = """
import json, mmap, os, sys, threading, time

LAST_S = 60.0  # then it gives a value, so that a test of a pool that waits for ever fails and ends
armed, waiting, written = threading.Event(), threading.Event(), threading.Event()

def worker_has(name):
    frame = sys._getframe()
    while name not in frame.f_locals or frame.f_code.co_name != "main":
        frame = frame.f_back
    return frame.f_locals[name]

def write_late(channel):
    waiting.wait()
    channel.sendall(b"rubbish\\n")
    written.set()

def refresh(progress):
    while True:
        progress.begin(0)
        time.sleep(0.05)

def trickle(channel):
    while True:
        channel.sendall(b"[")
        time.sleep(0.05)

def hostile(data_source, solution_str, ground_truth, extra_info):
    word, _, rest = solution_str.partition(" ")
    if word == "forge":
        line = rest.replace("NUMBER", str(worker_has("call").number))
        worker_has("channel").sendall(line.encode("latin-1") + b"\\n")
        time.sleep(LAST_S)
    if word == "forge_and_return":
        line = rest.replace("NUMBER", str(worker_has("call").number))
        worker_has("channel").sendall(line.encode("latin-1") + b"\\n")
    if word == "arm":
        armed.set()
        threading.Thread(target=write_late, args=(worker_has("channel"),), daemon=True).start()
    if word == "wait" and armed.is_set():  # in the worker that was armed
        waiting.set()
        written.wait()
        time.sleep(1.0)
    if word == "refresh":
        threading.Thread(target=refresh, args=(worker_has("progress"),), daemon=True).start()
        time.sleep(LAST_S)
    if word == "trickle":
        threading.Thread(target=trickle, args=(worker_has("channel"),), daemon=True).start()
        time.sleep(LAST_S)
    if word == "shared":
        memory = mmap.mmap(-1, 192 << 20)
        for place in range(0, len(memory), 4096): memory[place] = 1
        time.sleep(LAST_S)
    if word == "in_memory_file":
        file = os.memfd_create("x")
        for _ in range(192): os.write(file, bytes(1 << 20))
        time.sleep(LAST_S)
    if word == "child_shares":
        memory = mmap.mmap(-1, 192 << 20)
        if os.fork() == 0:
            for place in range(0, len(memory), 4096): memory[place] = 1
        time.sleep(LAST_S)
    if word == "daemon":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(rest + ".new", "w") as file: file.write(str(os.getpid()))
                os.rename(rest + ".new", rest)
                time.sleep(600)
            os._exit(0)
        while not os.path.exists(rest): time.sleep(0.01)
        os._exit(3)
    if word == "value": return float(rest)
    if word == "surrogate": raise ValueError("\\udc80")
    return float(word) if word.isdigit() else 1.0
"""


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(HOSTILE)
    return f"{path}:hostile"


def scored(name: str, *texts: str, timeout_s: float = 20.0, memory_bytes: int = 1 << 30) -> list[Score]:
    """By one worker, so that each next call meets what the last one left."""
    workers = RewardWorkersConfig(num_workers=1, timeout_s=timeout_s, memory_bytes=memory_bytes)
    scorer = build_scorer([RewardConfig(name)], workers)
    try:
        scores = score(scorer, *texts)
        assert [s.value for s in score(scorer, "7", "8")] == [7.0, 8.0]  # the pool goes on
        return scores
    finally:
        scorer.close()


FORGED: dict[str, Any] = {
    "no answers": {"number": 3},
    "no number": {"answers": [1.0, 1.0]},
    "too few": {"number": 3, "answers": [1.0]},
    "too many": {"number": 3, "answers": [1.0, 1.0, 1.0]},
    "not a list": {"number": 3, "answers": 1.0},
    "a text": {"number": 3, "answers": "ab"},
    "an integer": {"number": 3, "answers": [1, 1]},
    "true": {"number": 3, "answers": [True, True]},
    "null": {"number": 3, "answers": [None, None]},
    "texts": {"number": 3, "answers": ["raised", "x"]},
    "no detail": {"number": 3, "answers": [["raised"], 1.0]},
    "three of a failure": {"number": 3, "answers": [["raised", "x", "y"], 1.0]},
    "unknown cause": {"number": 3, "answers": [["bored", "x"], 1.0]},
    "a list as cause": {"number": 3, "answers": [[["raised"], "x"], 1.0]},
    "a number as detail": {"number": 3, "answers": [["raised", 1], 1.0]},
    "a long detail": {"number": 3, "answers": [["raised", "x" * 301], 1.0]},
    "not a number": {"number": 3, "answers": [float("nan"), 1.0]},
    "infinity": {"number": 3, "answers": [float("-inf"), 1.0]},
    "huge": {"number": 3, "answers": [1e31, 1.0]},
    "another call": {"number": 2, "answers": [1.0, 1.0]},
    "a float as number": {"number": 3.0, "answers": [1.0, 1.0]},
    "unfit, a number": {"number": 3, "unfit": 1},
    "unfit, one of two": {"number": 3, "unfit": ["exited"]},
    "unfit, unknown cause": {"number": 3, "unfit": ["bored", "x"]},
    "both": {"number": 3, "answers": [1.0, 1.0], "unfit": ["exited", "x"]},
    "one more": {"number": 3, "answers": [1.0, 1.0], "ready": ["sample"]},
    "nothing": {},
}


@pytest.mark.parametrize("what", FORGED)
def test_what_is_no_answer_is_garbled(what: str) -> None:
    with pytest.raises(WorkerFailure) as caught:
        read_answers(FORGED[what], 3, 2)
    assert caught.value.args == ("garbled", "wrote to the channel between worker and trainer")


def test_true_is_not_the_first_call() -> None:
    with pytest.raises(WorkerFailure):
        read_answers({"number": True, "answers": [1.0]}, 1, 1)


def test_answers_are_read() -> None:
    answers = [-1e30, ["raised", "half a character: \udc80"]]
    assert read_answers({"number": 3, "answers": answers}, 3, 2) == [-1e30, ("raised", "half a character: ?")]
    with pytest.raises(WorkerFailure) as caught:
        read_answers({"number": 3, "unfit": ["out_of_memory", "x"]}, 3, 2)
    assert caught.value.args == ("out_of_memory", "x")


@pytest.mark.parametrize(
    "message", [{}, {"ready": 1}, {"ready": []}, {"ready": ["no"]}, {"ready": [[]]}, {"ready": ["batch"], "number": 1}]
)
def test_kinds_are_checked(message: dict[str, Any]) -> None:
    assert read_kinds({"ready": ["batch"]}, 1) == ["batch"]
    with pytest.raises(WorkerFailure):
        read_kinds(message, 1)


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"number": "NUMBER"}).replace('"NUMBER"', "NUMBER"),
        '{"number": NUMBER, "answers": [1, 1]}',
        '{"number": NUMBER, "answers": [NaN, NaN]}',
        '{"number": NUMBER, "answers": [["raised"], ["raised"]]}',
        '{"number": NUMBER, "unfit": 3}',
        "[" * 100_000,
        "\xff\xfe",
    ],
    ids=["no answers", "integers", "not numbers", "no details", "unfit", "deep", "no text"],
)
def test_a_forged_answer_costs_its_own_sample_only(name: str, line: str) -> None:
    texts = [str(i) for i in range(16)]  # four in the first call
    texts[3] = f"forge {line}"
    scores = scored(name, *texts)
    assert causes(scores) == [None] * 3 + ["garbled"] + [None] * 12
    assert [s.value for i, s in enumerate(scores) if i != 3] == [float(i) for i in range(16) if i != 3]


def test_a_forged_not_a_number_is_never_a_value(name: str) -> None:
    scores = scored(name, "0", 'forge_and_return {"number": NUMBER, "answers": [NaN]}', "2", "3")  # one in each call
    assert causes(scores) == [None, "garbled", None, None]


def test_a_late_write_costs_no_innocent_sample(name: str) -> None:
    scores = scored(name, "arm", "wait", "3")
    assert causes(scores) == [None, None, None]
    assert [s.value for s in scores] == [1.0, 1.0, 3.0]


@pytest.mark.parametrize("word", ["refresh", "trickle"])
def test_a_call_ends_whatever_the_worker_makes_of_its_progress(name: str, word: str) -> None:
    scores = scored(name, "0", word, *map(str, range(2, 10)), timeout_s=5.0)  # two in the first call
    assert causes(scores) == [None, "timed_out"] + [None] * 8


@pytest.mark.parametrize("word", ["shared", "in_memory_file", "child_shares"])
def test_shared_memory_is_memory(name: str, word: str) -> None:
    scores = scored(name, "1", word, "3", timeout_s=120.0, memory_bytes=160 << 20)
    assert causes(scores) == [None, "out_of_memory", None]


def test_a_daemon_does_not_outlive_a_worker_that_ends_itself(name: str, tmp_path: Path) -> None:
    scores = scored(name, "1", f"daemon {tmp_path}/pid")
    assert causes(scores) == [None, "exited"]
    daemon = int(Path(tmp_path, "pid").read_text())
    deadline = time.monotonic() + 60  # it is killed by then, and sleeps for ten minutes if it is not
    while alive(daemon) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(daemon)


def test_a_value_that_no_deviation_survives_is_no_number(name: str) -> None:
    values = ("1e30", "-1e30", "1.1e30", "-1e308")
    scores = scored(name, *(f"value {value}" for value in values))
    assert causes(scores) == [None, None, "not_a_number", "not_a_number"]
    with pytest.raises(InputError, match=r"the weight of .* is 1e\+31; give a finite number, up to 1e\+30"):
        build_scorer([RewardConfig(name, weight=1e31)])


def test_a_detail_can_be_written_to_a_file(name: str) -> None:
    (unknown,) = scored(name, "surrogate")[0].unknown.values()
    assert unknown.detail.encode() == b"raised ValueError: ?"


def test_directories_of_dead_trainers_are_removed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = f"""
import os, signal
from mega_rl.config.schema.sections import RewardConfig, RewardWorkersConfig
from mega_rl.rewards.scorer import build_scorer
scorer = build_scorer([RewardConfig({name!r})], RewardWorkersConfig(num_workers=2))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run((sys.executable, "-c", program), env=os.environ | {"TMPDIR": str(tmp_path)})
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    alive = scratch.Scratch()
    others = tmp_path / "mega_rl_reward_of_another_kind"
    others.mkdir()
    link = tmp_path / f"{scratch.PREFIX}link"
    link.symlink_to(others)
    scored(name, "1")
    assert sorted(tmp_path.iterdir()) == sorted([Path(alive.path), others, link])
    alive.remove()
    assert not Path(alive.path).exists()


def test_a_directory_too_deep_for_python_is_removed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = scratch.Scratch()
    program = "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')"
    subprocess.run((sys.executable, "-c", program), cwd=made.path, check=True)
    made.remove()
    assert list(tmp_path.iterdir()) == []
