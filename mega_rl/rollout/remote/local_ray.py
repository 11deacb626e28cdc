"""A Ray of this run alone: nobody else can reach it, and nothing of it outlives the process that started it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from mega_rl.parallel.store import is_one_node
from mega_rl.rollout.remote import ray_cleanup

START_S = "300"  # Ray's own 30 are too few on a host that does much else
OBJECT_STORE_BYTES = 1 << 27  # it carries requests and trajectories, never weights


def close_to_others() -> None:
    """What a Ray that is started in this process needs in the environment; before ``import ray``, which reads it.

    A token of this run lets nobody in who cannot read this process's environment. On one node all of Ray's ports are
    at loopback too: what Ray does on Windows and macOS, where a port that is open to the network asks the user first.
    """
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    os.environ.setdefault("RAY_raylet_start_wait_time_s", START_S)
    if is_one_node():
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def start(ray: Any, num_cpus: int) -> Path:
    """Start it and connect to it; returns the directory of its logs."""
    context = ray.init(
        address="local",  # never a cluster that somebody else has started on this machine
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
    )
    raylet = next(child for child in psutil.Process().children() if child.name() == "raylet")
    command = [sys.executable, "-I", ray_cleanup.__file__, str(os.getpid()), str(raylet.pid)]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is not for it
    return Path(context.address_info["session_dir"])
