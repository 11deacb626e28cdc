"""Started by torchrun: ``write`` saves in the background and ends, ``hold`` stops amid such a save, ``resume`` goes on.

``write`` and ``hold`` run on two tensor-parallel ranks, ``resume`` on any number.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch import Tensor

from mega_rl import platform
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.parallel.layout import ParallelLayout
from tests.distributed.megatron.run_memory import assert_equal, poison, state_of
from tests.models import tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, pack_for_rank, run_config, total_loss
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES, make_sequences

OBJECTIVE = OBJECTIVES["sft"]
HELD = "held.txt"  # the writers wait until it is gone
AFTER = "after.pt"  # loss of the step after the checkpoint


class Run:
    def __init__(self, case: Case, layout: ParallelLayout, root: Path) -> None:
        self.layout, self.root = layout, root
        config = run_config(case, OBJECTIVE)
        config.optimizer.schedule = "linear"
        self.sequences = make_sequences(OBJECTIVE, tiny_models.vocab_size("qwen2"))
        self.microbatches = pack_for_rank(case, layout, self.sequences)
        self.make: Callable[[], MegatronEngine] = lambda: build_engine(config, layout, root / "model", 10)
        self.engine = self.make()

    def step(self, is_bad: bool = False) -> float:
        reports = self.engine.forward_backward(self.microbatches, loss_of(OBJECTIVE, self.sequences))
        if is_bad:
            poison(self.engine, "model.norm.weight", math.nan, 0)
        assert self.engine.optimizer_step().skipped == is_bad
        return total_loss(self.layout, reports)


def hold_writers(root: Path) -> None:
    """Let the writer processes wait before their first byte while the file ``HELD`` is there."""
    write = FileSystemWriterAsync.write_preloaded_data

    def held(*args: Any, **kwargs: Any) -> None:
        while (root / HELD).exists():
            time.sleep(0.02)
        write(*args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(held)


def set_held(root: Path, is_held: bool) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        (root / HELD).touch() if is_held else (root / HELD).unlink()
    dist.barrier()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def loaded(run: Run, directory: Path) -> dict[str, Tensor]:
    engine = run.make()
    assert checkpoint.load(directory, engine)["note"] == directory.name
    assert engine.stepper.skipped == run.engine.stepper.skipped
    return state_of(engine)


def progress(name: str) -> dict[str, Any]:
    """What a run keeps beside its weights, with the name of the checkpoint that it is for."""
    return {"data": {}, "validations": {}, "note": name}


def write(run: Run) -> None:
    """What is written is the state at the call, whatever is trained meanwhile, and equals a synchronous save."""
    background = CheckpointWriter(run.root / "async", keep=2, is_async=True)
    plain = CheckpointWriter(run.root / "sync", keep=2, is_async=False)
    background.poll()
    run.step()
    run.step(is_bad=True)
    background.save(2, run.engine, progress("step_00000002"))
    background.finish()
    set_held(run.root, True)
    run.step()
    background.save(3, run.engine, progress("step_00000003"))
    state_at_the_save = state_of(run.engine)
    run.step()
    background.poll()
    assert names(run.root / "async") == [".step_00000003.incomplete", "step_00000002"], names(run.root / "async")
    set_held(run.root, False)
    background.finish()
    assert names(run.root / "async") == ["step_00000002", "step_00000003"], names(run.root / "async")
    checkpoint.load(run.root / "async" / "step_00000003", run.engine)
    assert_equal(state_of(run.engine), state_at_the_save)
    plain.save(3, run.engine, progress("step_00000003"))
    assert_equal(loaded(run, run.root / "async" / "step_00000003"), loaded(run, run.root / "sync" / "step_00000003"))
    assert checkpoint.damage(run.root / "async" / "step_00000003") is None
    for step in (4, 5):
        background.save(step, run.engine, progress(f"step_{step:08d}"))
    background.finish()
    assert names(run.root / "async") == ["step_00000004", "step_00000005"], names(run.root / "async")


def hold(run: Run) -> None:
    """A checkpoint of step 3 that is whole, and one of step 4 that is under way for ever."""
    run.step()
    run.step(is_bad=True)
    run.step()
    writer = CheckpointWriter(run.root / "cut", keep=1, is_async=True)
    writer.save(3, run.engine, progress("step_00000003"))
    writer.finish()
    set_held(run.root, True)
    loss = run.step()
    writer.save(4, run.engine, progress("step_00000004"))
    writer.poll()
    if dist.get_rank() == 0:
        torch.save(loss, run.root / AFTER)
        print("HELD amid the save\n", end="", flush=True)
    time.sleep(600)


def resume(run: Run) -> None:
    """From the newest whole checkpoint, at this layout: the next step's loss and the counts are the same."""
    directory, warnings = checkpoint.find(run.root / "cut", "auto")
    assert directory is not None and directory.name == "step_00000003" and warnings == [], (directory, warnings)
    assert checkpoint.load(directory, run.engine)["step"] == 3
    assert run.engine.stepper.skipped.state_dict() == {"total": 1, "in_a_row": 0}
    assert run.engine.lr_schedule.num_steps == 3
    expected = torch.load(run.root / AFTER)
    loss = run.step()
    assert abs(loss - expected) <= 1e-6 * abs(expected), (loss, expected)
    (run.root / HELD).unlink(missing_ok=True)
    writer = CheckpointWriter(run.root / "cut", keep=1, is_async=True)
    writer.save(4, run.engine, progress("step_00000004"))  # takes the place of the cut one
    writer.finish()
    assert names(run.root / "cut") == ["step_00000004"], names(run.root / "cut")


PARTS = {"write": write, "hold": hold, "resume": resume}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    world_size = dist.get_world_size()
    if dist.get_rank() == 0 and arguments.part != "resume":
        tiny_models.make("qwen2").save_pretrained(arguments.dir / "model")
    dist.barrier()
    hold_writers(arguments.dir)
    case = Case(world_size, tensor=world_size, sequence=world_size > 1)
    with groups(case) as layout:
        PARTS[arguments.part](Run(case, layout, arguments.dir))
    if dist.get_rank() == 0:
        print(f"PASSED {arguments.part}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
