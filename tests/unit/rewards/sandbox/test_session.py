"""Programs of one episode in one place, and what ends with it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import psutil
import pytest

from mega_rl.rewards.sandbox import sandbox
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, ProgramRun, SandboxSession, SessionEndedError
from tests.launching.enclosure import needs_enclosure, run_enclosed

HAS_NAMESPACES = sandbox.has_namespaces()
pytestmark = pytest.mark.skipif(not HAS_NAMESPACES and os.geteuid() == 0, reason="no program is run here")
LIMITS = ProgramLimits(timeout_s=60.0, memory_bytes=1 << 29, namespaces=HAS_NAMESPACES)
SHORT = ProgramLimits(timeout_s=1.0, memory_bytes=1 << 29, namespaces=HAS_NAMESPACES)


def running(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.name() == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_files_stay_and_names_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    session, other = SandboxSession(LIMITS), SandboxSession(LIMITS)
    assert session.run("x = 1; open('kept', 'w').write(input())", "given") == ProgramRun(0, "")
    look = "import os\nprint(sorted(os.listdir('.')), 'x' in globals())"
    assert session.run(look) == ProgramRun(0, "['kept', 'program.py'] False\n")
    assert other.run(look) == ProgramRun(0, "['program.py'] False\n")
    assert session.run("1 / 0", with_errors=True).output.endswith("division by zero\n")
    assert session.run("raise SystemExit(3)").exit_code == 3
    session.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_state_stays_until_a_program_ends_the_interpreter() -> None:
    session = SandboxSession(LIMITS, keep="state")
    assert session.run("x = 41\nprint('a', input())", "b") == ProgramRun(0, "a b\n")
    assert session.run("x += 1\nprint(x)\n1 / 0") == ProgramRun(1, "42\n")
    assert session.run("print(x)\nraise SystemExit(3)") == ProgramRun(3, "42\n")
    assert session.run("import os; os._exit(5)").exit_code == 5
    assert session.run("print('x' in globals())") == ProgramRun(0, "False\n")
    session.close()


@pytest.mark.parametrize("keep", ["files", "state"])
def test_a_program_that_runs_out_of_time_does_not_end_the_session(keep: str) -> None:
    session = SandboxSession(SHORT, keep=keep)  # type: ignore[arg-type]
    assert session.run("open('kept', 'w').close()\nwhile True: pass").exit_code is None
    slow = SandboxSession(LIMITS, keep=keep)  # type: ignore[arg-type]
    assert slow.run("print(1)") == ProgramRun(0, "1\n")
    slow.close()
    session.close()


@pytest.mark.parametrize("keep", ["files", "state"])
def test_nothing_is_left_running(keep: str) -> None:
    name = f"left{secrets.token_hex(5)}"
    fork = f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"
    fork += "for _ in range(3):\n  if os.fork() == 0: os.setsid(); time.sleep(600)\nprint('started')"
    session = SandboxSession(LIMITS, keep=keep)  # type: ignore[arg-type]
    assert session.run(fork).output == "started\n"
    if keep == "files":  # they ended with their program
        assert running(name) == []
    session.close()
    assert running(name) == []


def test_a_session_has_an_end() -> None:
    session = SandboxSession(LIMITS, lifetime_s=0.2)
    with pytest.raises(SessionEndedError, match="the session has ended"):
        for _ in range(10_000):
            session.run("")
    session.close()


# The process that stays keeps its rights: a program must not get them from it.
HOSTILE = """
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, SandboxSession, SessionEndedError
session = SandboxSession(ProgramLimits(20.0, 1 << 29, namespaces=NAMESPACES), keep="files")
program = '''
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
keeper = os.getppid()
def attempt(name, function):
    try: print(name, function())
    except OSError as error: print(name, "refused")
attempt("attach", lambda: libc.ptrace(16, keeper, 0, 0))
attempt("memory", lambda: open(f"/proc/{keeper}/mem", "rb").read(1))
attempt("environ", lambda: open(f"/proc/{keeper}/environ", "rb").read(1))
attempt("descriptors", lambda: [os.open(f"/proc/{keeper}/fd/{number}", 0) for number in range(3, 9)])
attempt("mount", lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))
print("own", sorted(os.listdir("/proc/self/fd"))[:3], keeper)
os.kill(keeper, 9)
print("on")
'''
print(session.run(program).output, end="")
print(session.run("print('next')").output, end="")
"""


@needs_enclosure()
@pytest.mark.parametrize("is_root", [True, False])
def test_the_process_that_stays_is_out_of_reach(is_root: bool) -> None:
    ended = run_enclosed(HOSTILE.replace("NAMESPACES", "True"), is_root=is_root)
    lines = ended.stdout.splitlines()
    refused = ["attach -1", "memory refused", "environ refused", "descriptors refused", "mount -1"]
    assert lines[:6] == [*refused, "own ['0', '1', '2'] 1"], (ended.stdout, ended.stderr)
    assert lines[-1] == "next"  # the signal is refused, or not delivered
