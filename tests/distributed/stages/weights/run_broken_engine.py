"""``tools/train.py`` with an engine that goes wrong.

Usage: run_broken_engine.py WHAT STEP ARGUMENTS...: WHAT is ``weights`` (after the push of version STEP the engine holds
another embedding) or ``raw`` (its sampler, from the start, returns log-probabilities before the temperature).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.stages.weights.weight_sync import Pushed, WeightSync
from tools import train


def break_weights(step: int) -> None:
    push = WeightSync.push

    def enlarge(parameters: dict[str, torch.Tensor]) -> list[int]:
        parameters["model.embed_tokens.weight"][3:9] *= 1.5
        return []

    def broken(self: WeightSync, version: int, is_validation: bool = False) -> Pushed:
        pushed = push(self, version, is_validation)
        if version == step and not is_validation:
            assert self.sink.inspect is not None
            with torch.no_grad():
                self.sink.inspect(enlarge, [()] * len(self.sink.layout()))
        return pushed

    WeightSync.push = broken  # type: ignore[method-assign]


def break_sampler(step: int) -> None:
    construct = VLLMEngine.__init__

    def make_raw(worker: Any) -> None:
        sampler = worker.model_runner.sampler
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"

    def broken(self: VLLMEngine, *args: Any, **keys: Any) -> None:
        construct(self, *args, **keys)
        self._llm.collective_rpc(make_raw)

    VLLMEngine.__init__ = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    what, step, *arguments = sys.argv[1:]
    {"weights": break_weights, "raw": break_sampler}[what](int(step))
    train.main(arguments)
