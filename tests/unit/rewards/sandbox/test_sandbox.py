"""Programs from one warm interpreter: nothing of one is seen by the next, and nothing of any is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from mega_rl.rewards.sandbox import sandbox
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program
from tests.launching.enclosure import needs_enclosure, run_enclosed
from tests.launching.launch import alive, run_copy

HAS_NAMESPACES = sandbox.has_namespaces()
LIMITS = ProgramLimits(timeout_s=20.0, memory_bytes=1 << 29, namespaces=HAS_NAMESPACES)
pytestmark = pytest.mark.skipif(not HAS_NAMESPACES and os.geteuid() == 0, reason="no program is run here")


def printed(source: str) -> str:
    return run_program(source, "", LIMITS, with_errors=True).output.strip()


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_calls_share_one_warm_process() -> None:
    printed("1")
    before = sandbox.zygote_pids()
    assert [printed(f"print({number})") for number in range(3)] == ["0", "1", "2"]
    assert sandbox.zygote_pids() == before and len(before) >= 1


@pytest.mark.parametrize(
    ("change", "look"),
    [
        ("import math; math.pi = 3", "import math; print(math.pi != 3)"),
        ("import builtins; builtins.left = 1", "print(not hasattr(__builtins__, 'left'))"),
        ("import sys; sys.modules['left'] = sys", "import sys; print('left' not in sys.modules)"),
        ("import os; os.environ['LEFT'] = '1'", "import os; print('LEFT' not in os.environ)"),
        ("open('left', 'w').write('1')", "import os; print(os.listdir('.') == ['program.py'])"),
        ("import os; os.umask(0)", "import os; print(os.umask(0) == 0o22)"),
        ("import signal; signal.signal(15, signal.SIG_IGN)", "import signal; print(not signal.getsignal(15))"),
        ("x = 1", "print('x' not in globals(), __name__ == '__main__')"),
    ],
)
def test_nothing_of_one_program_is_seen_by_the_next(change: str, look: str) -> None:
    assert printed(change) == ""
    assert set(printed(look).split()) == {"True"}


def test_random_numbers_differ_from_call_to_call() -> None:
    assert len({printed("import random; print(random.random())") for _ in range(3)}) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="the memory of another process is read")
def test_texts_do_not_come_into_the_process_that_is_forked() -> None:
    secret = os.urandom(8).hex()
    given = os.urandom(8).hex()
    run = run_program(f"print('{secret}', input())", given, LIMITS)
    assert run.output == f"{secret} {given}\n"
    found = b""
    for pid in sandbox.zygote_pids():
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
            for line in maps:
                start, end = (int(text, 16) for text in line.split()[0].split("-"))
                if line.split()[1].startswith("rw"):
                    memory.seek(start)
                    found += memory.read(end - start)
    assert len(found) > 1 << 20 and b"program.py" in found
    assert secret.encode() not in found and given.encode() not in found


def test_the_program_is_the_main_module_of_an_interpreter() -> None:
    source = "import sys, threading\nprint(__name__, sys.argv, __file__.endswith('/program.py'), sys.flags.isolated)\n"
    source += "import atexit; atexit.register(print, 'at exit')\n"
    source += "threading.Timer(0.05, print, ['a thread']).start()\nopen('kept', 'w')"
    assert printed(source).split("\n") == ["__main__ ['program.py'] True 1", "a thread", "at exit"]


def test_an_error_is_told_as_the_interpreter_does() -> None:
    run = run_program("def f():\n    1 / 0\nf()", "", LIMITS, with_errors=True)
    assert run.exit_code == 1 and "zygote" not in run.output
    assert run.output.startswith("Traceback (most recent call last):\n") and "ZeroDivisionError" in run.output
    assert "SyntaxError" in printed("def f(:")
    assert run_program("raise SystemExit(7)", "", LIMITS).exit_code == 7


def test_a_program_ends_as_under_an_interpreter() -> None:
    source = "import atexit, sys\nclass A:\n    def __del__(self): print('taken apart')\na = A()\n"
    source += "atexit.register(print, 'at exit')\n"
    run = run_program(source + "sys.exit('why')", "", LIMITS, with_errors=True)
    assert run.exit_code == 1 and sorted(run.output.split("\n")) == ["", "at exit", "taken apart", "why"]
    for ending, code in (("sys.exit(300)", 44), ("sys.exit()", 0), ("sys.exit(None)", 0), ("sys.stdout.close()", 0)):
        assert run_program(f"import sys\n{ending}", "", LIMITS).exit_code == code
    assert run_program("print('x' * 99)\nimport os; os.close(1)", "", LIMITS).exit_code == 120


def test_one_that_starts_does_not_hold_up_those_of_other_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    printed("1")
    may_start = threading.Event()

    class Slow:
        def __init__(self, kind: object) -> None:
            assert may_start.wait(120)
            raise sandbox.NotIsolatedError("this was slow")

    monkeypatch.setattr(sandbox, "_Zygote", Slow)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(run_program, "1", "", LIMITS, preload=("sqlite3", "a kind of its own"))
        try:
            assert threads.submit(printed, "print(2)").result(timeout=60) == "2"
        finally:
            may_start.set()
        with pytest.raises(sandbox.NotIsolatedError, match="this was slow"):
            slow.result()


def test_preloaded_modules_are_there() -> None:
    source = "import sys; print('sqlite3' in sys.modules)"
    assert run_program(source, "", LIMITS).output == "False\n"
    assert run_program(source, "", LIMITS, preload=("sqlite3", "no_such_module")).output == "True\n"
    sandbox.close_zygotes()


def test_calls_of_several_threads_run_together() -> None:
    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(lambda number: printed(f"import os; print({number})"), range(24)))
    assert runs == [str(number) for number in range(24)]


def test_a_warm_process_that_was_killed_is_replaced() -> None:
    printed("1")
    for pid in sandbox.zygote_pids():
        os.kill(pid, 9)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert printed("print(2)") == "2"


OWNER = """
import sys, time
from mega_rl.rewards.sandbox import sandbox
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program
import threading
limits = ProgramLimits(60.0, 1 << 29, namespaces=NAMESPACES)
run_program("", "", limits)
print(*sandbox.zygote_pids(), flush=True)
run_program("import time; time.sleep(50)", "", limits)
""".replace("NAMESPACES", str(HAS_NAMESPACES))


def test_the_warm_process_and_its_programs_end_with_their_owner() -> None:
    with subprocess.Popen((sys.executable, "-c", OWNER), stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        warm = psutil.Process(int(owner.stdout.readline()))
        eventually(lambda: len(warm.children(recursive=True)) > 1)
        everything = [warm, *warm.children(recursive=True)]
        owner.kill()
    eventually(lambda: not any(alive(process.pid) for process in everything))


# In a process of its own: it asks for all children, and reaps them.
CHILDREN = """
import subprocess
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, has_namespaces, run_program, zygote_pids
from mega_rl.rewards.pool.worker import _has_children
run_program("print(1)", "", ProgramLimits(20.0, 1 << 29, namespaces=has_namespaces()))
print(len(zygote_pids()), _has_children())
with subprocess.Popen(("sleep", "600")) as child:
    print(_has_children())
    child.kill()
"""


def test_the_warm_process_is_not_what_a_reward_left_behind() -> None:
    assert run_copy(CHILDREN).check().stdout.split() == ["1", "False", "True"]


# A program without namespaces ends the process that waits for it, or the warm one: the others' calls do not suffer.
VANDAL = """
import os, psutil, time
from mega_rl.rewards.sandbox import sandbox
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program
limits = ProgramLimits(20.0, 1 << 29, namespaces=False)
print(run_program("import os; os.kill(os.getppid(), 9); print('on')", "", limits).exit_code)
run_program("import os\\nfor pid in PIDS: os.kill(pid, 9)".replace("PIDS", str(sandbox.zygote_pids())), "", limits)
print(run_program("print('next')", "", limits))
forks = "import os, time\\nfor _ in range(3):\\n  if os.fork() == 0: os.setsid(); os.environ.clear(); time.sleep(600)"
before = set(psutil.pids())
print(run_program(forks, "", limits))
deadline = time.monotonic() + 60  # the process that answered is about to end
while (left := set(psutil.pids()) - before) and time.monotonic() < deadline:
    time.sleep(0.05)
print(sorted(left), os.listdir("/tmp"))
"""


@needs_enclosure()
def test_a_program_without_namespaces_costs_its_own_call_only() -> None:
    ended = run_enclosed(VANDAL, is_root=False)
    lines = ended.stdout.splitlines()
    folder = [name for name in Path(sandbox.ROOT).parts[2:3] if Path(sandbox.ROOT).is_relative_to("/tmp")]
    assert lines[:3] == ["-9", "ProgramRun(exit_code=0, output='next\\n')", "ProgramRun(exit_code=0, output='')"], (
        ended.stderr
    )
    assert lines[3] == f"[] {folder}"
