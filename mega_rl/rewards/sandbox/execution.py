"""Running a program as an interpreter does, in a process that has given up what the program must not have.

A library of `mega_rl.rewards.sandbox.zygote`: it imports the standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import sys
import threading
import time
import types
from typing import Any, NoReturn

wait_for_threads = vars(threading)["_shutdown"]  # what an interpreter calls at its end
UNWRITTEN = 120  # exit status of an interpreter whose output could not be written


def new_streams() -> None:
    """Standard input and output as an interpreter makes them for what their descriptors are now."""
    for descriptor, stream, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        before = getattr(sys, stream)  # it has looked at what its descriptor was
        buffering = 1 if stream == "stderr" else -1
        after = open(descriptor, mode, buffering, before.encoding, before.errors, closefd=False)  # noqa: SIM115
        setattr(sys, stream, after)
        setattr(sys, f"__{stream}__", after)


def new_main(path: str) -> dict[str, Any]:
    """The names of an empty main module, as of an interpreter that was started with a file."""
    if "numpy.random" in sys.modules:  # the standard library's generator starts anew by itself
        sys.modules["numpy.random"].seed()
    random.seed()
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    sys.argv[:] = sys.orig_argv[:] = [os.path.basename(path)]
    return vars(module)


def execute(path: str, names: dict[str, Any]) -> int:
    """Run the file in a main module; what it raises is told on standard error.

    Returns:
        The exit status. `SystemExit` is raised on.
    """
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, names)
        return 0
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(trace and trace.tb_next), trace and trace.tb_next)
        return 1


def run_and_end(path: str, names: dict[str, Any]) -> NoReturn:
    """Run the file and end this process as an interpreter does, but that modules are left as they are.

    Taking them apart writes to all of their memory, which this process shares with the one that it was forked from:
    with much loaded, that is half of the time of a short program.
    """
    try:
        status = execute(path, names)
    except SystemExit as error:
        status = _status_of(error)
    with contextlib.suppress(BaseException):  # whatever is raised from here on changes nothing any more
        wait_for_threads()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        names.clear()  # what is left of the program's own is taken apart
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001 - it was closed, or replaced by something else
            status = status if getattr(stream, "closed", False) else UNWRITTEN
    os._exit(status)


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    with contextlib.suppress(BaseException):
        print(error.code, file=sys.stderr)
    return 1


def wait(process: int, timeout_s: float) -> int | None:
    """The exit code of a child, negative for a signal; None: out of time. The child is still to be waited for.

    The signal SIGCHLD must be blocked.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        # Seen, but not waited for: until then its number stays that of its process group.
        ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        signal.sigtimedwait([signal.SIGCHLD], left_s)
