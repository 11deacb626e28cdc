"""Train: ``torchrun --nproc-per-node 8 tools/train.py --config FILE [key=value ...]``.

Exit status 0 after a finished run, 2 for input that a user can fix (one sentence on stderr), 75 for a run that a signal
stopped after its step, with a checkpoint, 1 for anything else.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mega_rl import platform
from mega_rl.config import load_config, samples, to_yaml, validate, workers_rewards
from mega_rl.config.schema import RunConfig
from mega_rl.errors import InputError, Stopped, shown
from mega_rl.rewards.scorer import build_scorer
from mega_rl.rollout.vllm.options import check_options, installed_arguments

STAGES = {name: f"mega_rl.stages.{name}" for name in ("rl", "pt", "sft", "rm", "dpo", "kto")}
TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"  # an environment variable that torchrun gives to the processes it starts
STOPPED = 75  # exit status: sysexits.h's EX_TEMPFAIL, "try again later"
PR_SET_PDEATHSIG = 1  # of prctl(2)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, see configs/")
    parser.add_argument("--dry-run", action="store_true", help="validate, print the resolved configuration, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example optimizer.lr=1e-6")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    config = load_config(options.config, options.overrides)
    platform.check_name(config.platform.name)
    world_size = processes()
    validate(config, world_size if options.dry_run else world_size or 1)
    if options.dry_run:
        if samples(config):
            check_sampling(config)
        print(to_yaml(config))
        return
    # The platform is fixed before the stage is imported: Megatron-core looks for its device while it is imported.
    role = platform.trainer_role(config.rollout if samples(config) else None, config.platform.deterministic)
    platform.select(config.platform.name, role, config.platform.mindspeed)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(platform.environment_report()), flush=True)
    importlib.import_module(STAGES[config.trainer.stage]).run(config)


def processes() -> int | None:
    """What the launcher says in WORLD_SIZE; None without a launcher."""
    given = os.environ.get("WORLD_SIZE")
    if given is None:
        return None
    if not (given.isdecimal() and given.isascii() and 1 <= len(given) <= 7 and int(given) >= 1):
        raise InputError(f"WORLD_SIZE is {shown(given)}: start with torchrun, which sets it to the number of processes")
    return int(given)


def check_sampling(config: RunConfig) -> None:
    """What the engine and the reward workers of a run would refuse as they start; nothing heavy is started.

    Raises:
        InputError: an argument of vLLM that is not one or is ours, or a reward that cannot be used.
    """
    if config.rollout.replay is None:
        check_options(config.rollout.vllm, installed_arguments(), config.platform.name)
    if rewards := workers_rewards(config):
        build_scorer(rewards, replace(config.reward_workers, num_workers=1)).close()


def end_with_torchrun() -> None:
    """Have the kernel kill this rank when torchrun dies, even by SIGKILL; does nothing if torchrun did not start it.

    The kernel sends the signal when the *thread* that started this process ends: torchrun starts its ranks in its main
    thread. A script between torchrun and this process must ``exec`` it, or the signal follows the script.
    """
    if TORCHRUN_MARK not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not may_be_launcher(os.getppid()):
        print("error: torchrun died while this rank was starting", file=sys.stderr, flush=True)
        os._exit(1)


def may_be_launcher(pid: int) -> bool:
    """False if the process is surely neither torchrun nor a script of its, but what adopts processes: an init."""
    process = Path(f"/proc/{pid}")
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
        is_python = "python" in os.path.basename(os.readlink(process / "exe"))
        return is_python or any(variable.startswith(f"{TORCHRUN_MARK}=".encode()) for variable in variables)
    except OSError:  # not ours to read
        return pid != 1


def stop(reason: Stopped) -> None:
    """Leave a run that was asked to end; nothing is left to do."""
    if os.environ.get("RANK", "0") == "0":
        print(reason)
    sys.stdout.flush()
    os._exit(STOPPED)


def fail(error: Exception) -> None:
    """Say what is wrong and leave at once, so that torchrun ends the other ranks instead of letting them wait."""
    is_input = isinstance(error, InputError)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(15)  # where rank 0 says the same, torchrun ends this rank before it repeats it
    if is_input:
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if is_input else 1)


if __name__ == "__main__":
    end_with_torchrun()
    try:
        main()
    except Stopped as reason:
        stop(reason)
    except Exception as error:  # noqa: BLE001 - the last frame: whatever it is, the exit status says so
        fail(error)
