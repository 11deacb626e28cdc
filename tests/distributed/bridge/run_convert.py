"""Started by torchrun on two ranks: converted checkpoints are loaded and trained, and trained ones converted back.

Prints ``CONVERTED name`` on rank 0 for every layout.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.engine import MegatronEngine
from tests.launching.launch import REPO
from tests.models import families
from tests.models.engine_support import build_engine, groups, optimizer_of, owned_span, run_config
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES

sys.path.insert(0, str(REPO / "tools"))
import convert  # noqa: E402 - a tool, not a package

# (layout of the engine, family, layout that the checkpoint is cut for, dtype of the training)
CASES = [
    (
        Case(2, tensor=2, sequence=True, expert=2, expert_tensor=1),
        "deepseek_v3",
        ("--pp", "2", "--tp", "4"),
        "bfloat16",
    ),
    (Case(2, tensor=2, sequence=True, expert=2, expert_tensor=1), "qwen3_moe", ("--ep", "4", "--etp", "1"), "float32"),
    (Case(2, pipeline=2, virtual_pipeline=2), "qwen2", ("--tp", "4"), "float32"),
    (Case(2, pipeline=2), "qwen2", ("--tp", "2", "--pp", "2"), "bfloat16"),
]


def check_weights(engine: MegatronEngine, reader: HFReader, dtype: torch.dtype) -> None:
    """Every weight is the model's, bit for bit in the training's dtype."""
    for piece in engine.slices_of(dist.get_rank()):
        expected = reader.read(piece.hf_name, piece.hf_box).to(dtype)
        own = engine.policy.local(piece.local_name, piece.local_box)
        assert torch.equal(own.to(dtype), expected), piece
        is_parameter = piece.local_name in engine.policy.parameters  # else float32 whatever the training's dtype is
        assert not is_parameter or torch.equal(own.float(), expected.float()), piece


def check_masters(engine: MegatronEngine) -> None:
    """The optimizer starts from the loaded weights, not from those that the engine was built with."""
    for name, parameter in engine.policy.parameters.items():
        optimizer, (start, end) = optimizer_of(engine, parameter), owned_span(engine, parameter)
        if optimizer is not None:
            group, order = optimizer.model_param_group_index_map[parameter]
            master = optimizer.optimizer.param_groups[group]["params"][order]
            assert torch.equal(master.detach().float(), parameter.detach().float().flatten()[start:end]), name


def train_one_step(engine: MegatronEngine) -> None:
    """Any gradient will do: it only has to move every weight, and to leave optimizer state."""
    for chunk in engine.wrapped:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    assert not engine.optimizer_step().skipped


def run_case(case: Case, family: str, layout_options: tuple[str, ...], dtype_name: str, root: Path) -> None:
    """``root`` has the family's model as ``family`` and another one of the same shape as ``family.other``."""
    work = root / f"{case.name}_{dtype_name}"
    model, converted, dtype = root / family, work / "converted", getattr(torch, dtype_name)
    if dist.get_rank() == 0:
        work.mkdir()
        status = convert.main(["hf-to-megatron", "--model", str(model), "--out", str(converted), *layout_options])
        assert status == 0
    dist.barrier()
    with groups(case) as layout:
        config = run_config(case, OBJECTIVES["sft"], dtype_name)
        config.optimizer.lr = 0.1
        engine = build_engine(config, layout, root / f"{family}.other", 3)
        assert checkpoint.find(work, str(converted)) == (converted, [])
        progress = checkpoint.load(converted, engine)
        assert progress["weights_only"] and progress["step"] == 0
        check_weights(engine, HFReader(model), dtype)
        check_masters(engine)
        train_one_step(engine)
        CheckpointWriter(work, 0, is_async=False).save(1, engine, {"data": {}, "validations": {}})
        if dist.get_rank() == 0:
            command = ["megatron-to-hf", "--checkpoint", str(checkpoint.directory_of(work, 1)), "--model", str(model)]
            assert convert.main([*command, "--out", str(work / "trained"), "--verify", "--no-logits"]) == 0
        dist.barrier()
        check_weights(engine, HFReader(work / "trained"), dtype)
        moved = [
            not torch.equal(
                HFReader(work / "trained").read(p.hf_name, p.hf_box), HFReader(model).read(p.hf_name, p.hf_box)
            )
            for p in engine.slices_of(dist.get_rank())[:4]
        ]
        assert all(moved), "the step moved the weights"
    if dist.get_rank() == 0:
        print(f"CONVERTED {family} {dtype_name} {case.name}", flush=True)


def write_models(root: Path) -> None:
    for family in sorted({case[1] for case in CASES}):
        model = families.make(family)
        model.save_pretrained(root / family)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1.0)
        model.save_pretrained(root / f"{family}.other")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    root = parser.parse_args().root
    dist.init_process_group(platform.current().backend)
    if dist.get_rank() == 0:
        write_models(root)
    dist.barrier()
    for case in CASES:
        run_case(*case, root)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
