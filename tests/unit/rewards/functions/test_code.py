"""Programs run against tests, and what the sandbox keeps them from."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mega_rl.rewards.functions import code
from mega_rl.rewards.functions.code import code_tests
from mega_rl.rewards.sandbox import launcher, sandbox, zygote
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program

HAS_NAMESPACES = sandbox.has_namespaces()
LIMITS = ProgramLimits(timeout_s=20.0, memory_bytes=1 << 29, namespaces=HAS_NAMESPACES)
ISOLATION = "namespaces" if HAS_NAMESPACES else "limits"
NO_NAMESPACES = "this system allows no unprivileged namespaces"
needs_namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason=NO_NAMESPACES)
runs_programs = pytest.mark.skipif(
    not HAS_NAMESPACES and os.geteuid() == 0, reason=f"{NO_NAMESPACES}, and this is root"
)
PAIRS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
ASSERTS = json.dumps({"asserts": ["assert f(1) == 2", "assert f(2) == 3"]})


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


@runs_programs
@pytest.mark.parametrize(
    ("program", "truth", "everything", "fraction"),
    [
        ("a, b = map(int, input().split())\nprint(a + b, '')", PAIRS, 1.0, 1.0),
        ("a, b = map(int, input().split())\nprint(3)", PAIRS, 0.0, 0.5),
        ("print(3); raise SystemExit(1)", PAIRS, 0.0, 0.0),
        ("print('3", PAIRS, 0.0, 0.0),
        ("def f(x):\n    return x + 1", ASSERTS, 1.0, 1.0),
        ("def f(x):\n    return 2", ASSERTS, 0.0, 0.5),
        ("raise SystemExit(0)", ASSERTS, 0.0, 0.0),  # ends before the tests
        ("import os\nos._exit(0)", ASSERTS, 0.0, 0.0),
    ],
)
def test_share_of_tests_passed(program: str, truth: str, everything: float, fraction: float) -> None:
    text = fenced("print('an earlier draft')") + fenced(program)
    for score, expected in (("all", everything), ("fraction", fraction)):
        assert code_tests("s", text, truth, {}, score, timeout_s=20.0, isolation=ISOLATION) == expected


def test_without_a_code_block_nothing_runs() -> None:
    assert code_tests("s", "print(3)", PAIRS, {}, isolation=ISOLATION) == 0.0


@pytest.mark.parametrize("truth", ["", "[]", "{}", '{"inputs": ["1"], "outputs": []}', '{"asserts": [1]}', "1"])
def test_a_ground_truth_without_tests(truth: str) -> None:
    with pytest.raises(ValueError, match="the ground truth .* (is not JSON|holds no tests)"):
        code_tests("s", fenced("1"), truth, {}, isolation=ISOLATION)


@runs_programs
def test_out_of_time() -> None:
    run = run_program("while True: pass", "", ProgramLimits(0.5, 1 << 29, namespaces=HAS_NAMESPACES))
    assert run.exit_code is None


@runs_programs
@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("try: bytearray(1 << 30)\nexcept MemoryError: print('denied')", "denied"),
        ("try: open('big', 'wb').write(bytes(1 << 25))\nexcept OSError: print('denied')", "denied"),
        ("try: [open(f'{i}', 'w') for i in range(100)]\nexcept OSError: print('denied')", "denied"),
        ("import os; print(sorted(os.environ))", "['HOME', 'LANG', 'PATH', 'TMPDIR']"),
        ("import os; print(os.path.samefile('.', os.environ['HOME']), sorted(os.listdir('.'))[0])", "True program.py"),
        ("import sys; print(sys.stdin.read(), sys.stdin.isatty())", "given False"),
    ],
)  # fmt: skip
def test_limits(program: str, printed: str) -> None:
    assert run_program(program, "given", LIMITS).output.rstrip() == printed


@runs_programs
def test_no_descriptor_and_no_directory_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        copy = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, 200)  # no other descriptor's number
        os.set_inheritable(copy, True)
        program = f"import os\ntry: os.fstat({copy})\nexcept OSError: print('closed')"
        try:
            assert run_program(program, "", LIMITS).output == "closed\n"
        finally:
            os.close(copy)
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@runs_programs
def test_output_is_cut_at_the_limit_of_a_file() -> None:
    run = run_program("while True: print('x' * 1000)", "", LIMITS)
    assert run.exit_code != 0 and len(run.output) <= LIMITS.file_bytes


@needs_namespaces
def test_no_network_not_even_to_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)\nprint('connected')"
        assert run_program(program, "", LIMITS).output == ""
        unshielded = subprocess.run((sys.executable, "-c", program), stdout=subprocess.PIPE, text=True)
        assert unshielded.stdout == "connected\n"


@needs_namespaces
@pytest.mark.parametrize("ending", ["", "time.sleep(600)"])
def test_no_process_is_left_in_whatever_session(ending: str) -> None:
    name = f"left{secrets.token_hex(5)}"  # of the processes, as the system lists them
    fork = "for _ in range(3):\n  if os.fork() == 0: os.setsid(); time.sleep(600)"
    naming = f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)"
    started = f"{naming}\n{fork}\nprint('started', flush=True)\n{ending}"
    assert run_program(started, "", ProgramLimits(10.0, 1 << 29)).output == "started\n"
    deadline = time.monotonic() + 30
    while any(_name(process) == name for process in psutil.process_iter()):
        assert time.monotonic() < deadline, "a process of the program is left"
        time.sleep(0.02)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def test_a_system_without_namespaces_is_told_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Path(tmp_path, "mega_rl", "rewards", "sandbox")
    refused.mkdir(parents=True)
    for name in zygote.PARTS:
        shutil.copy(Path(sandbox.ROOT, "mega_rl", "rewards", "sandbox", f"{name}.py"), refused)
    text = Path(launcher.__file__).read_text()
    assert "libc.unshare(namespaces)" in text
    # No such flags: unshare fails.
    Path(refused, "launcher.py").write_text(text.replace("libc.unshare(namespaces)", "libc.unshare(-1)"))
    sandbox.close_zygotes()
    monkeypatch.setattr(sandbox, "ROOT", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert (sandbox.obstacle() or "").startswith("unshare: ")
    with pytest.raises(ValueError, match="allows no unprivileged namespaces.* set isolation to limits"):
        code._check_code_tests()
    code._check_code_tests(isolation="limits")
