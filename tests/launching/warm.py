"""A process that has imported what the scripts of the distributed tests import, and starts their ranks as copies of it.

``python -m tests.launching.warm DESCRIPTOR MODULE ...``: the descriptor is its end of a connection, and it ends with
the other.
It is no child of ``multiprocessing``, which would leave its marks on the ranks: they have children of their own.
Only on a CPU: a device does not survive the copying of its process.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from mega_rl.observe.lines import write_whole_lines
from mega_rl.rollout.vllm.start.environment import set_environment


@dataclass(frozen=True)
class Request:
    """One launch, as ``torchrun`` has it."""

    argv: tuple[str, ...]  # the script and its arguments
    num_ranks: int  # 0: one plain process, which knows of no ranks
    port: int  # of the ranks' meeting
    environ: dict[str, str]
    output: str  # an existing file, which takes what all ranks write


def serve(requests: Connection, modules: list[str]) -> None:
    """Answer every request with the process id of the launch, a process group of its own, then with its exit status."""
    if "vllm" in modules:
        set_environment("cpu")  # before it is imported
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported is never garbage: no collection in a copy looks at it again
    while True:
        try:
            request: Request = requests.recv()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            sys.exit(_launch(request))
        requests.send(pid)
        requests.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _launch(request: Request) -> int:
    """Start the ranks and wait for them: 0, or 1 once one has failed; of a plain process its own exit status. A rank
    comes back when its script has ended.
    """
    os.setsid()
    output = os.open(request.output, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    write_whole_lines()
    ranks: dict[int, int] = {}  # process id -> rank
    for rank in range(max(1, request.num_ranks)):
        pid = os.fork()
        if pid == 0:
            _run(request, rank)
            return 0
        ranks[pid] = rank
    failed = False
    while ranks:
        pid, status = os.wait()
        code, rank = os.waitstatus_to_exitcode(status), ranks.pop(pid, None)
        if rank is not None and request.num_ranks == 0:
            return code if code >= 0 else 128 - code  # as a shell has it
        if rank is not None and code != 0 and not failed:
            failed = True
            print(f"rank {rank} ended with {code}: the others are ended")
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return int(failed)


def _run(request: Request, rank: int) -> None:
    os.environ.clear()
    os.environ.update(request.environ)
    if size := request.num_ranks:
        coordinates = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request.port)})
        os.environ.update({name: str(value) for name, value in coordinates.items()})
    sys.argv[:] = request.argv
    sys.path.insert(0, str(Path(request.argv[0]).parent))
    runpy.run_path(request.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:])
