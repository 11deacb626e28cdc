"""``tools/eval.py`` on engines without a model: the arguments are its own."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.vllm.start.seeing import Sight
from tests.pretended.samplers import ScriptedEngine
from tools import eval as tool


def build_engine(config: RunConfig, device: torch.device, sight: Sight | None) -> tuple[Any, EngineLayout]:
    tokenizer: Any = load_tokenizer(config.model.path)
    return ScriptedEngine(tokenizer, order=dist.get_rank()), EngineLayout(dist.get_world_size(), 1)


if __name__ == "__main__":
    tool.build_engine = build_engine
    tool.main(sys.argv[1:])
