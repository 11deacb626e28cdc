"""A Python interpreter as an environment, as ReTool has it: the model writes a program and reads what it prints."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from mega_rl.environments.protocol import End, Reply, ToolResult, Turn
from mega_rl.errors import InputError
from mega_rl.rewards.functions.code import check_isolation
from mega_rl.rewards.sandbox.remote import SandboxClient
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, ProgramRun, SandboxSession, SessionEndedError, run_program
from mega_rl.types import Prompt

FENCED = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
TAGGED = re.compile(r"<code>(.*?)</code>", re.DOTALL)


class PythonSandbox:
    """Runs the last program of a turn in the sandbox and replies with its output; a turn without one ends the episode.

    Every program starts anew, unless `keep` says otherwise: what one defines, the next does not know.
    """

    def __init__(
        self,
        prompt: Prompt,
        sample_index: int,
        *,
        form: Literal["fenced", "code"] = "fenced",
        role: Literal["tool", "user"] = "tool",
        timeout_s: float = 5.0,
        memory_bytes: int = 1 << 30,
        isolation: Literal["namespaces", "limits"] = "namespaces",
        preload: Sequence[str] = (),
        service: str = "",
        keep: Literal["nothing", "files", "state"] = "nothing",
    ) -> None:
        """Make ready to run programs.

        Args:
            form: fenced: the program stands in a block that is marked as Python; code: between ``<code>`` and
                ``</code>``, in such a block or not.
            role: of the reply. A user's message has the output between ``<interpreter>`` and ``</interpreter>``.
            timeout_s: of one program.
            memory_bytes: address space of each process of a program.
            isolation: as of the reward ``code_tests``.
            preload: modules that programs often import, such as numpy and sympy: loaded once.
            service: the address of a sandbox service that runs the programs instead, with its isolation and modules.
            keep: from one program of an episode to the next: its files, or in one live interpreter all that it defines.

        Raises:
            InputError: an unknown form or role, an impossible limit, a service that is no address or should keep.
        """
        if form not in ("fenced", "code") or role not in ("tool", "user") or isolation not in ("namespaces", "limits"):
            raise InputError(
                f"python_sandbox: form {form!r}, role {role!r} or isolation {isolation!r} is unknown; choose fenced or "
                "code, tool or user, namespaces or limits"
            )
        if keep not in ("nothing", "files", "state") or (service and keep != "nothing"):
            raise InputError(f"python_sandbox: keep {keep!r}: choose nothing, files or state; a service keeps nothing")
        if timeout_s <= 0 or memory_bytes < 1 << 26:
            raise InputError(
                f"python_sandbox: timeout_s {timeout_s} must be above 0, memory_bytes {memory_bytes} at least {1 << 26}"
            )
        self._form = form
        self.roles = (role,)
        self._limits = ProgramLimits(timeout_s, memory_bytes, namespaces=isolation == "namespaces")
        self._preload = tuple(preload)
        self._keep = keep
        self._ways = isolation, service
        self._session: SandboxSession | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # of the session and of whether it is over
        try:
            self._service = SandboxClient(service) if service else None
        except ValueError as error:
            raise InputError(f"python_sandbox: {error}") from error

    def check_at_start(self) -> None:
        """Raises InputError if this system, or the service, runs no programs in this way."""
        try:
            check_isolation(*self._ways)
        except ValueError as error:
            raise InputError(f"the Python interpreter: {error}") from error

    def step(self, turn: Turn) -> Reply | End:
        program = program_of(turn.text, self._form)
        if program is None:
            return End()
        began = time.monotonic()
        run, text = self.answer(program)
        if self.roles == ("user",):
            text = f"<interpreter>\n{text}\n</interpreter>"
        metrics = {"tool_calls": 1, "tool_errors": float(run.exit_code != 0), "tool_s": time.monotonic() - began}
        return Reply([{"role": self.roles[0], "content": text}], metrics)

    def answer(self, program: str) -> tuple[ProgramRun, str]:
        """Run a program; also what the model is told of it."""
        try:
            run = self._run(program)
        except SessionEndedError as error:
            self._end_session()  # the next program begins a new one
            return ProgramRun(None, ""), f"error: {error}; what earlier programs left is lost"
        return run, output_of(run, self._limits.timeout_s)

    def _run(self, program: str) -> ProgramRun:
        if self._service is not None:
            return self._service.run(program, "", self._limits, with_errors=True)
        if self._keep == "nothing":
            return run_program(program, "", self._limits, with_errors=True, preload=self._preload)
        session = self._session
        if session is None:
            session = SandboxSession(self._limits, self._preload, self._keep)
            with self._lock:
                is_late = self._is_closed  # the episode ended meanwhile, by a limit of time for example
                if not is_late:
                    self._session = session
            if is_late:
                session.close()
                raise SessionEndedError("the episode is over")
        return session.run(program, with_errors=True)

    def close(self) -> None:
        """End the session of the episode, if there is one; there will be no other."""
        with self._lock:
            self._is_closed = True
        self._end_session()

    def _end_session(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()


def code_interpreter(**options: Any) -> Callable[[str], ToolResult]:
    """A tool ``code_interpreter`` for the environment ``tools``: calls of it are what ReTool's data holds.

    Each program runs in the sandbox and starts anew.

    Args:
        options: those of `PythonSandbox` that are not of its form: ``timeout_s``, ``memory_bytes``, ``isolation``,
            ``preload``, ``service``.

    Raises:
        InputError: as `PythonSandbox`, and for another option.
    """
    if others := options.keys() - {"timeout_s", "memory_bytes", "isolation", "preload", "service"}:
        raise InputError(
            f"code_interpreter: there is no option {', '.join(sorted(others))}; choose of timeout_s, memory_bytes, "
            "isolation, preload and service"
        )
    sandbox = PythonSandbox(Prompt(0, (0,), "", "", ""), 0, **options)

    def interpreter(code: str) -> ToolResult:
        """Runs Python code and answers with what it prints.

        Args:
            code: The program to run.
        """
        run, text = sandbox.answer(code)
        return ToolResult(text, has_failed=run.exit_code != 0)

    interpreter.__name__ = "code_interpreter"
    interpreter.check_at_start = sandbox.check_at_start  # type: ignore[attr-defined]
    del interpreter.__annotations__["return"]  # the tool of ReTool's data says nothing of what it returns
    return interpreter


def program_of(text: str, form: str) -> str | None:
    """The last whole program that a turn asks to be run."""
    found = (TAGGED if form == "code" else FENCED).findall(text)
    if not found:
        return None
    inside = FENCED.findall(found[-1]) if form == "code" else []
    return str(inside[-1] if inside else found[-1])


def output_of(run: ProgramRun, timeout_s: float) -> str:
    """What the model is told of a program."""
    output = run.output.strip()
    if run.exit_code is None:
        return f"{output}\nerror: the program did not end within {timeout_s:g} s".lstrip()
    if run.exit_code < 0:
        return f"{output}\nerror: the program was ended by signal {-run.exit_code}".lstrip()
    return output or ("(no output)" if run.exit_code == 0 else f"error: exit status {run.exit_code}")
