"""``tools/train.py`` with everything wrong that the first step's gates look for.

The reference gets another norm weight, the engine another embedding, and the policy's forward pass without gradients
is a little off.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch

from mega_rl.megatron.engine import MegatronEngine
from mega_rl.microbatch import Microbatch, TokenStats
from mega_rl.stages.models import trainer
from mega_rl.stages.weights.weight_sync import Pushed, WeightSync
from tools import train


def break_reference() -> None:
    build = trainer.reference

    def broken(session: Any, actor: MegatronEngine) -> Any:
        reference = build(session, actor)
        assert reference is not None
        with torch.no_grad():
            reference._policy.parameters["decoder.final_layernorm.weight"][0] += 0.25
        return reference

    trainer.reference = broken


def break_engine() -> None:
    push = WeightSync.push

    def enlarge(parameters: dict[str, torch.Tensor]) -> list[int]:
        parameters["model.embed_tokens.weight"][3:9] *= 1.5
        return []

    def broken(self: WeightSync, version: int) -> Pushed:
        pushed = push(self, version)
        assert self.sink.inspect is not None
        with torch.no_grad():
            self.sink.inspect(enlarge, [()] * len(self.sink.layout()))
        return pushed

    WeightSync.push = broken  # type: ignore[method-assign]


def break_forward() -> None:
    token_stats = MegatronEngine.token_stats

    def broken(self: MegatronEngine, microbatches: Sequence[Microbatch]) -> list[TokenStats]:
        stats = token_stats(self, microbatches)
        return [dataclasses.replace(s, logprobs=s.logprobs + 1e-3) for s in stats]

    MegatronEngine.token_stats = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    break_reference()
    break_engine()
    break_forward()
    train.main(sys.argv[1:])
