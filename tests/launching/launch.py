"""Starting other processes from a test: never a shared port, never an orphan, the output always shown on failure."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

from mega_rl.observe.lines import write_whole_lines
from tests.launching import warm

REPO = Path(__file__).resolve().parents[2]
MARK = "MEGA_RL_TEST_LAUNCH"  # in the environment of everything a launch starts, however it detached itself
R = TypeVar("R")
PORT_NAMES: list[socket.socket] = []  # what keeps the ports of `free_port` from other processes
VISIBLE_CHARACTERS = 20_000
# What takes longer hangs; busy machines are waited for. A rank that waits for another one would wait for half an hour.
LIMIT_S = 600.0
# Processes that are copies of one that has imported torch: a start costs 20 ms and not 2 s.
COPIES = multiprocessing.get_context("forkserver")
COPIES.set_forkserver_preload(["mega_rl", "torch"])
# What the ranks of ``ranks`` find imported: the trainer, or the engine with it.
TRAINER = ("transformers", "tests.models.engine_support", "tests.models.tiny_models", "mega_rl.stages.sft")
ENGINE = (*TRAINER, "vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "tests.models.engine_models")
ENGINE += ("tests.distributed.rollout.rollout_checks",)
DEVICES = ("/dev/nvidiactl", "/dev/davinci_manager")  # of a machine with an accelerator


@dataclass(frozen=True)
class Launched:
    """What a command left behind, as ``subprocess.CompletedProcess`` has it."""

    args: tuple[str, ...]
    returncode: int
    stdout: str  # and stderr, in the order of writing
    seconds: float

    def check(self) -> Launched:
        """Itself after exit status 0, else an assertion that shows the output."""
        assert self.returncode == 0, f"{' '.join(self.args)} ended with {self.returncode}:\n{_tail(self.stdout)}"
        return self


@dataclass
class Running:
    """A command under way; its whole process tree is gone once the ``with`` block of ``started`` ends."""

    args: tuple[str, ...]
    process: subprocess.Popen[bytes]
    output_file: Path

    def output(self) -> str:
        return self.output_file.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout: float) -> int:
        """Exit status; an assertion with the output after ``timeout`` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            message = f"{' '.join(self.args)} did not end in {timeout:.0f} s:\n{_tail(self.output())}"
            raise AssertionError(message) from None

    def wait_for(self, text: str, timeout: float) -> None:
        """Return once ``text`` is in the output; an assertion if the command ends or ``timeout`` seconds pass first."""
        deadline = time.monotonic() + timeout
        while text not in self.output():
            ended = self.process.poll() is not None and text not in self.output()
            assert not ended, f"{' '.join(self.args)} ended without {text!r}:\n{_tail(self.output())}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout:.0f} s:\n{_tail(self.output())}"
            time.sleep(0.05)


def once(launch: Callable[..., R]) -> Callable[..., R]:
    """``functools.cache`` that remembers a failure too: what died for one test is not started again by the next."""
    results: dict[tuple[object, ...], R | Exception] = {}

    @wraps(launch)
    def remembered(*args: Any) -> R:
        if args not in results:
            try:
                results[args] = launch(*args)
            except Exception as error:  # noqa: BLE001 - raised below, in this test and in the next
                results[args] = error
        result = results[args]
        if isinstance(result, Exception):
            raise result.with_traceback(None)
        return result

    return remembered


def torchrun_command(script: str | Path, *args: object, nproc: int = 2) -> tuple[str, ...]:
    """The command line of ``torchrun`` for ``nproc`` processes of this machine on a port of their own."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc))
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    return (*launcher, *address, str(script), *map(str, args))


def torchrun(
    script: str | Path,
    *args: object,
    nproc: int = 2,
    timeout: float = LIMIT_S,
    env: Mapping[str, str] | None = None,
) -> Launched:
    """Run ``script`` (a path, relative to the repository) on ``nproc`` ranks and wait for it.

    Args:
        timeout: seconds; past them every process of the launch is killed and an AssertionError shows the output.
        env: variables on top of the test's own environment.

    Returns:
        Exit status and output. A failed run's output is also printed, so pytest shows it with whatever assertion fails.
    """
    return run(torchrun_command(script, *args, nproc=nproc), timeout=timeout, env=env)


def ranks(
    script: str | Path,
    *args: object,
    nproc: int = 2,
    timeout: float = LIMIT_S,
    modules: tuple[str, ...] = TRAINER,
    env: Mapping[str, str] | None = None,
) -> Launched:
    """``torchrun`` for a script of the tests, but that its ranks are copies of one process that has imported
    ``modules``: the first launch of a session waits for the imports, the others do not. ``nproc`` 0: one plain process.

    Variables in ``env`` are there before the imports. Not for the first run of its kind, which is started as a user
    starts it, nor for scripts that start Ray. With an accelerator it is ``torchrun``.
    """
    argv = (str(REPO / script), *map(str, args))
    if any(Path(device).exists() for device in DEVICES):
        command = torchrun_command(*argv, nproc=nproc) if nproc else (sys.executable, *argv)
        return run(command, timeout=timeout, env=env)
    token, begin = uuid.uuid4().hex, time.monotonic()
    server = Warm.of(modules, tuple(sorted((env or {}).items())))
    with server.lock, tempfile.TemporaryDirectory() as scratch:
        output_file = Path(scratch) / "output.txt"
        output_file.touch()
        request = warm.Request(argv, nproc, free_port(), _variables(env, token), str(output_file))
        is_over, returncode = server.launch(request, timeout, token)
        output = output_file.read_text(encoding="utf-8", errors="replace")
    assert is_over, f"{' '.join(argv)} did not end in {timeout:.0f} s:\n{_tail(output)}"
    launched = Launched(argv, returncode, output, time.monotonic() - begin)
    if returncode != 0:
        print(f"{' '.join(argv)} ended with {returncode}:\n{_tail(output)}")
    return launched


class Warm:
    """A process with certain imports and variables, which ends with its connection; it has one launch at a time."""

    _started: ClassVar[dict[tuple[object, ...], Warm]] = {}
    _starting: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, modules: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> Warm:
        with cls._starting:
            if (modules, env) not in cls._started:
                cls._started[modules, env] = cls(modules, env)
            return cls._started[modules, env]

    def __init__(self, modules: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> None:
        self.lock, self._key = threading.Lock(), (modules, env)
        self._connection, there = multiprocessing.Pipe()
        command = (sys.executable, "-m", "tests.launching.warm", str(there.fileno()), *modules)
        variables = _variables(dict(env), uuid.uuid4().hex)
        passed = (there.fileno(),)
        self._process = subprocess.Popen(
            command, cwd=REPO, env=variables, stdin=subprocess.DEVNULL, pass_fds=passed, start_new_session=True
        )
        there.close()
        atexit.register(self.end)

    def launch(self, request: warm.Request, timeout: float, token: str) -> tuple[bool, int]:
        """Whether the launch ended by itself in ``timeout`` seconds, and its exit status."""
        pid = None
        try:
            self._connection.send(request)
            pid = self._connection.recv()
            is_over = self._connection.poll(timeout)
            _kill_tree(pid, is_running=True, token=token)  # the launch, or whatever of its group is left
            return is_over, self._connection.recv()
        except BaseException:
            # pytest's limit, or Ctrl-C: what is still answered would be taken for the answer to the next launch.
            self._started.pop(self._key, None)
            if pid is not None:
                _kill_tree(pid, is_running=True, token=token)
            self.end()
            raise

    def end(self) -> None:
        self._connection.close()
        self._process.wait(timeout=60)


def run(
    command: tuple[str, ...] | list[str], timeout: float = LIMIT_S, env: Mapping[str, str] | None = None
) -> Launched:
    """``torchrun``'s promises for any command."""
    begin = time.monotonic()
    with started(command, env=env) as running:
        returncode = running.wait(timeout)
        launched = Launched(running.args, returncode, running.output(), time.monotonic() - begin)
    if returncode != 0:
        print(f"{' '.join(launched.args)} ended with {returncode}:\n{_tail(launched.stdout)}")
    return launched


def run_copy(
    code: str | Path, *args: object, timeout: float = LIMIT_S, env: Mapping[str, str] | None = None
) -> Launched:
    """``run`` for ``python -c CODE`` or ``python SCRIPT ARGUMENTS`` in a process of its own, a copy of one that has
    imported torch and nothing else of ours; not for code that must begin before torch, and not for many ranks.
    """
    assert "PYTHONPATH" not in (env or {}), "a copy has read it already"
    token, begin = uuid.uuid4().hex, time.monotonic()
    argv = ("-c" if isinstance(code, str) else str(REPO / code), *map(str, args))
    with tempfile.TemporaryDirectory() as scratch:
        output_file = Path(scratch) / "output.txt"
        output_file.touch()
        process = COPIES.Process(target=_copy, args=(code, argv, output_file, _variables(env, token)))
        process.start()
        try:
            process.join(timeout)
            output = output_file.read_text(encoding="utf-8", errors="replace")
            assert process.exitcode is not None, f"{' '.join(argv)} did not end in {timeout:.0f} s:\n{_tail(output)}"
        finally:
            _kill_tree(process.pid, is_running=process.is_alive(), token=token)
            process.join(timeout=60)
    launched = Launched((sys.executable, *argv), process.exitcode, output, time.monotonic() - begin)
    if launched.returncode != 0:
        print(f"{' '.join(argv)} ended with {launched.returncode}:\n{_tail(output)}")
    return launched


def _copy(code: str | Path, argv: tuple[str, ...], output_file: Path, variables: dict[str, str]) -> None:
    """What the copy does: the interpreter's part for ``-c CODE`` or a script."""
    os.setsid()
    with output_file.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    write_whole_lines()
    os.chdir(REPO)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = argv
    if isinstance(code, Path):
        sys.path.insert(0, str((REPO / code).parent))
        runpy.run_path(argv[0], run_name="__main__")
    else:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def _variables(env: Mapping[str, str] | None, token: str) -> dict[str, str]:
    """The test's own, but PYTHONUNBUFFERED: with it ``print`` writes a line in parts, and ranks cut each other's."""
    path = os.pathsep.join(p for p in (str(REPO), os.environ.get("PYTHONPATH", "")) if p)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {}), MARK: token}


@contextmanager
def started(command: tuple[str, ...] | list[str], env: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Start ``command`` in the repository root, in a session of its own, and clear up its whole tree at the end."""
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as scratch:
        output_file = Path(scratch) / "output.txt"
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=REPO,
                env=_variables(env, token),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Running(tuple(map(str, command)), process, output_file)
        finally:
            _kill_tree(process.pid, is_running=process.poll() is None, token=token)
            process.wait(timeout=60)


def _kill_tree(pid: int, *, is_running: bool, token: str) -> None:
    """Kill the process group and everything that carries the token: torchrun's ranks have sessions of their own."""
    assert pid > 1, f"{pid} is no process of a launch"
    victims = marked(token)
    if is_running:
        with suppress(psutil.NoSuchProcess):
            victims += psutil.Process(pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    deadline = time.monotonic() + 60
    while any(alive(victim.pid) for victim in victims) and time.monotonic() < deadline:
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process still runs; one that ended unreaped (a container without an init) does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(token: str) -> list[psutil.Process]:
    """Every process of the launch with this token."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get(MARK) == token:
                found.append(process)
    return found


def free_port() -> int:
    """A port below those that the kernel gives to connections, so that none of them takes it before its user does.

    No other process of tests is given it: a name of the kernel stands for it as long as this process lives.
    """
    while True:
        port, name = random.SystemRandom().randrange(20_000, 32_000), socket.socket(socket.AF_UNIX)
        with socket.socket() as listener, suppress(OSError):
            name.bind(f"\0mega_rl_tests_port_{port}")
            listener.bind(("127.0.0.1", port))
            PORT_NAMES.append(name)
            return port
        name.close()


def _tail(output: str) -> str:
    return output if len(output) <= VISIBLE_CHARACTERS else f"[...]{output[-VISIBLE_CHARACTERS:]}"
