"""Started on 2 ranks: whole runs on pictures, one layout of the trainer after the other, all with one engine.

Arguments: a configuration file, a directory for the runs, and for every run its name and what it changes, in one word
each, separated by commas. The engine has both ranks; before each run it holds the weights of ``model.path`` again.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mega_rl import platform
from mega_rl.config import load_config, validate
from mega_rl.parallel.store import shared_store
from mega_rl.parallel.watch.process import join
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.stages import rl
from mega_rl.stages.run import opening
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.weights import engines


class OneEngine:
    """In the place of ``VLLMEngine``: the engine of the first call, with the weights that it had then."""

    def __init__(self) -> None:
        self._engine: VLLMEngine | None = None
        self._start: dict[str, torch.Tensor] = {}

    def __call__(self, *arguments: Any, **keys: Any) -> VLLMEngine:
        if self._engine is None:
            self._engine = VLLMEngine(*arguments, **keys)
            self._start = {name: data.clone() for name, data in self._engine.parameters().items()}
        self._engine.begin_update()
        for name, data in self._engine.parameters().items():
            data.copy_(self._start[name])
        self._engine.finish_update(0)
        return self._engine


def main() -> None:
    file, directory, *runs = sys.argv[1:]
    engines.VLLMEngine = OneEngine()  # type: ignore[misc, assignment]
    store = None
    for run in runs:
        name, *overrides = run.split(",")
        config = load_config(file, [*overrides, f"trainer.output_dir={directory}/{name}"])
        validate(config, 2)
        if store is None:
            platform.select("cpu", platform.trainer_role(config.rollout, config.platform.deterministic))
            device = join(config)
            store = shared_store(config.trainer.collective_timeout_s)
        with opening._opened(config, device, dist.PrefixStore(name, store)) as opened:
            rl.train(SamplingJob.of(opened))
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
