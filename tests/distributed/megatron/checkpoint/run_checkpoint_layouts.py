"""Started by torchrun on two ranks: a checkpoint of every axis, resumed at its own layout and at others.

Prints ``RESUMED <family> <layout it was saved at> <layout>`` on rank 0 for every one that held on all ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.errors import InputError
from mega_rl.megatron.checkpoint import checkpoint
from tests.distributed.megatron.checkpoint.run_checkpoint import (
    SAVED_STEP,
    TOLERANCE,
    TOTAL_STEPS,
    Tensors,
    assert_same_state,
    follow,
    new_engine,
    save_now,
    whole_state,
)
from tests.models import tiny_models
from tests.models.engine_support import groups
from tests.models.layouts import RESHARDED, Case

DTYPE = "float32"  # so that the steps after another layout's can be compared


@dataclass(frozen=True)
class Record:
    """What the run that wrote the checkpoint had then and went on to do."""

    saved: Path
    state: Tensors
    steps: list[dict[str, float]]
    end: Tensors


def save(case: Case, family: str, directory: Path) -> Record:
    with groups(case) as layout:
        engine = new_engine(case, layout, DTYPE, directory, family)
        follow(case, layout, engine, SAVED_STEP, family)
        for weight in engine.policy.frozen.values():
            weight += torch.arange(weight.numel())  # else a resume could leave them as model.path has them
        saved = save_now(directory / f"{family}_{case.name}", SAVED_STEP, engine, keep=0)
        state = whole_state(engine)
        steps = follow(case, layout, engine, TOTAL_STEPS - SAVED_STEP, family)
        return Record(saved, state, steps, whole_state(engine))


def resume(case: Case, saved_at: Case, family: str, directory: Path, record: Record) -> None:
    with groups(case) as layout:
        if saved_at.expert > 1 and case.expert == 1:
            try:
                checkpoint.check_layout(record.saved, layout)
            except InputError as error:
                assert f"set parallel.expert to {saved_at.expert}" in str(error), error
                return
            raise AssertionError("a layout that Megatron cannot read was accepted")
        checkpoint.check_layout(record.saved, layout)
        engine = new_engine(case, layout, DTYPE, directory, family)
        checkpoint.load(record.saved, engine)
        assert_same_state(engine, record.state)
        steps = follow(case, layout, engine, TOTAL_STEPS - SAVED_STEP, family)
        if case == saved_at:
            assert steps == record.steps, (steps, record.steps)
            assert_same_state(engine, record.end)
        for own, expected in zip(steps, record.steps, strict=True):
            errors = {key: abs(own[key] - expected[key]) / expected[key] for key in expected}
            assert max(errors.values()) < TOLERANCE, errors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    if dist.get_rank() == 0:
        for family, _, _ in RESHARDED:
            tiny_models.make(family).save_pretrained(arguments.dir / family)
    dist.barrier()
    for family, saved_at, others in RESHARDED:
        record = save(saved_at, family, arguments.dir)
        for case in (saved_at, *others):
            resume(case, saved_at, family, arguments.dir, record)
            if dist.get_rank() == 0:
                print(f"RESUMED {family} {saved_at.name} {case.name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
