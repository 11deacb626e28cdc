"""This process as one rank of a job: what its launcher says, how it joins the others, and how it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from mega_rl import platform
from mega_rl.config import RunConfig
from mega_rl.errors import InputError, shown
from mega_rl.parallel.collectives import join_world, own_name
from mega_rl.parallel.interfaces import choose_interface

TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"  # an environment variable that torchrun gives to the processes it starts
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # one for each rank: where it may say why it ended, which ours do not
PR_SET_PDEATHSIG = 1  # of prctl(2)


def processes() -> int | None:
    """What the launcher says in WORLD_SIZE; None without a launcher."""
    given = os.environ.get("WORLD_SIZE")
    if given is None:
        return None
    if not (given.isdecimal() and given.isascii() and 1 <= len(given) <= 7 and int(given) >= 1):
        raise InputError(f"WORLD_SIZE is {shown(given)}: start with torchrun, which sets it to the number of processes")
    return int(given)


def join(config: RunConfig) -> torch.device:
    """Set this process up and join the other ranks; returns its device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    here = platform.current()
    if config.platform.num_threads or here.name == "cpu":
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(config.platform.num_threads or max(1, len(os.sched_getaffinity(0)) // ranks_here))
    device = here.set_device(local_rank)
    platform.use_kernels(config.platform.kernels)
    platform.check_layers(config.platform.layers, here.name)
    choose_interface()
    join_world(here.backend, config.trainer.collective_timeout_s)
    return device


def end_with_torchrun() -> None:
    """Have the kernel kill this rank when torchrun dies, even by SIGKILL; does nothing if torchrun did not start it.

    The kernel sends the signal when the *thread* that started this process ends: torchrun starts its ranks in its main
    thread. A script between torchrun and this process must ``exec`` it, or the signal follows the script.
    """
    if TORCHRUN_MARK not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    remove_empty_logs()
    if not may_be_launcher(os.getppid()):
        print("error: torchrun died while this rank was starting\n", end="", file=sys.stderr, flush=True)
        os._exit(1)


def remove_empty_logs() -> None:
    """Remove the directories that torchrun has made in the temporary folder for this rank, and never removes itself.

    Without ``--redirects`` nothing is written there. One that holds something stays, and with it those around it; the
    last rank removes what all of them share.
    """
    places = [*Path(os.environ.get(ERROR_FILE, "")).parents]
    roots = [place for place in places if place.name.startswith("torchelastic_")]
    for place in places[: places.index(roots[0]) + 1] if roots else ():
        try:
            place.rmdir()
        except OSError:
            return


def may_be_launcher(pid: int) -> bool:
    """False if the process is surely neither torchrun nor a script of its, but what adopts processes: an init."""
    process = Path(f"/proc/{pid}")
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
        is_python = "python" in os.path.basename(os.readlink(process / "exe"))
        return is_python or any(variable.startswith(f"{TORCHRUN_MARK}=".encode()) for variable in variables)
    except OSError:  # not ours to read
        return pid != 1


def out_of_memory(error: Exception) -> str | None:
    """One sentence if an allocation of this rank failed: which rank, what it asked for, and which keys take less."""
    of_device = isinstance(error, torch.OutOfMemoryError) or str(error).startswith("NPU out of memory")
    of_host = isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
    if not of_device and not of_host:
        return None
    if of_device:
        whose, less = "device", "rollout.vllm.gpu_memory_utilization, set memory.recompute or memory.offload"
    else:
        whose, less = "host", "reward_workers.num_workers, use less of memory.offload, checkpoint.async_save"
        less += " and checkpoint.local"
    asked = (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")
    return (
        f"{own_name()} ran out of its {whose}'s memory ({asked}): lower trainer.max_tokens_per_microbatch or {less}, "
        "or spread the model over more ranks (parallel.*); tools/plan.py says what fits"
    )


def fail(error: Exception) -> None:
    """Say what is wrong and leave at once, so that torchrun ends the other ranks instead of letting them wait."""
    is_input = isinstance(error, InputError)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(15)  # where rank 0 says the same, torchrun ends this rank before it repeats it
    if is_input:
        print(f"error: {error}\n", end="", file=sys.stderr)  # one write, though it may be of several lines
    else:
        traceback.print_exception(error)
        if (sentence := out_of_memory(error)) is not None:
            print(f"error: {sentence}\n", end="", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if is_input else 1)
