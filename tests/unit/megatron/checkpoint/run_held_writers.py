"""Stays amid a checkpoint for ever, with each writer process of Megatron at its first byte: ``plain|async DIRECTORY``.

``plain``: this process forks the writers. ``async``: it forks one in the background, which forks them, and looks after
it as a run does in every step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from mega_rl import platform

platform.select("cpu")

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # noqa: E402

from mega_rl.megatron.checkpoint import saving  # noqa: E402
from mega_rl.parallel.watch.process import fail  # noqa: E402


def main() -> None:
    mode, root = sys.argv[1], Path(sys.argv[2])

    def held(*_: Any, **__: Any) -> None:
        (root / f"writer_{os.getpid()}").touch()
        time.sleep(600)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(held)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = {"tensor": ShardedTensor.from_rank_offsets("tensor", torch.arange(4.0))}
    saving.sharded_state = lambda *_, **__: (state, {})
    saving.parallel_state.get_data_parallel_group = lambda **_: dist.group.WORLD
    saving.model_record = saving.tuning_record = lambda _: {}
    engine = MagicMock()
    engine.policy.layout.expert = 1
    engine.companions = {}
    engine.stepper.skipped.state_dict.return_value = {}
    writer = saving.CheckpointWriter(root, keep=0, is_async=mode == "async")
    writer.save(1, engine, {})
    while True:
        writer.poll()
        time.sleep(0.05)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 - as the entry of a run
        fail(error)
