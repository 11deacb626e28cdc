"""Copies of the last good state in the memory of the nodes, for a run that torchrun starts again when a rank died."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mega_rl.bridge.files.torch_dist.manifest import model_record
from mega_rl.config import RunConfig
from mega_rl.megatron.checkpoint import local_state
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.collectives import broadcast_object, gather_objects
from mega_rl.parallel.watch.state_copies import StateCopies

RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # what torchrun tells its ranks


class StateInMemory:
    """The copies of one run. All ranks call its methods together.

    Args:
        frequency: steps between copies.
        run: what tells this run from others.
    """

    def __init__(self, frequency: int, run: str, say: Callable[[str], None]) -> None:
        self._frequency, self._say = frequency, say
        self._copies = StateCopies(run)
        self.step = self._copies.newest()  # that can be gone on from; None at the first start

    def restore(self, actor: MegatronEngine) -> dict[str, Any]:
        """Put the state after ``step`` back; returns the progress."""
        assert self.step is not None
        begin = time.monotonic()
        progress = broadcast_object(local_state.from_bytes(actor, self._copies.get(self.step)))
        dist.barrier()
        seconds = time.monotonic() - begin
        self._say(f"resuming after step {self.step} from the memory of the nodes ({seconds:.1f} s)")
        return progress  # type: ignore[no-any-return]

    def keep_if_due(self, step: int, actor: MegatronEngine, progress: Callable[[], Mapping[str, Any]]) -> None:
        """Keep a copy of the state after ``step`` if one is due. ``progress``: what else a resume needs."""
        if step % self._frequency == 0:
            self._copies.keep(step, local_state.to_bytes(actor, {**progress(), "step": step}))


def state_in_memory(config: RunConfig, shape: ModelShape, say: Callable[[str], None]) -> StateInMemory | None:
    """What ``checkpoint.local`` asks for; None without it, or where nothing starts a run again. Collective."""
    if config.checkpoint.local == 0:
        return None
    if gather_objects(os.environ.get(RESTARTS, "0"))[0] == "0":
        say("warning: checkpoint.local does nothing here: only torchrun --max-restarts starts ranks again")
        return None
    what = {
        "output_dir": str(Path(config.trainer.output_dir).resolve()),
        "model": model_record(shape),
        "parallel": asdict(config.parallel),
        "world_size": dist.get_world_size(),
    }
    run = hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16).hexdigest()
    return StateInMemory(config.checkpoint.local, run, say)
