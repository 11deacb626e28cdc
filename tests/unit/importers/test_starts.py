"""Whole files of every neighbour, written here in the shape of published ones, start when they are imported.

``python -m benchmarks.importing.starts`` does the same with the published files of a checkout.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.importing.published import is_another, read
from benchmarks.importing.starts import measure, processes, start
from mega_rl.config.reading.tables import NEIGHBOURS
from mega_rl.importers.draft.draft import Draft

FILES = sorted((Path(__file__).parent / "whole").iterdir())
PROGRAM = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

adapter = LoraConfig(r=16, target_modules=modules)
arguments = GRPOConfig(
    output_dir=str(folder),
    num_generations=8,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    max_completion_length=args.max_completion_length,
    chat_template_kwargs={"enable_thinking": False},
)
trainer = GRPOTrainer(model=args.model, reward_funcs=[reward_func], train_dataset=dataset, args=arguments)
"""


def neighbour_of(path: Path) -> str:
    return next(name for name in NEIGHBOURS if path.name.startswith(f"{name}_"))


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_a_whole_file_starts(path: Path, tmp_path: Path) -> None:
    check(read(neighbour_of(path), path, 8), tmp_path)


def test_a_program_starts_with_what_it_says(tmp_path: Path) -> None:
    program = tmp_path / "grpo.py"
    program.write_text(PROGRAM)
    check(read("trl", program, 8), tmp_path)


def check(draft: Draft | str, folder: Path) -> None:
    assert not isinstance(draft, str), draft
    assert not is_another(draft)
    assert "unknown" not in {outcome.became for outcome in draft.outcomes.values()}
    assert start(draft, folder, 8)[0] is None


def test_the_processes_of_a_layout_hold_its_experts() -> None:
    draft = read("llamafactory", Path(__file__).parent / "whole" / "llamafactory_seeing.yaml", None)
    assert isinstance(draft, str)  # a batch per device needs their number
    draft = read("llamafactory", Path(__file__).parent / "whole" / "llamafactory_seeing.yaml", 16)
    assert not isinstance(draft, str) and processes(draft, 8) == 16


def test_what_does_not_start_is_counted_with_its_reason(tmp_path: Path) -> None:
    good, bad, odd = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "odd.yaml"
    good.write_text("stage: sft\nmodel_name_or_path: m\ndataset: mine\n")
    bad.write_text(
        "stage: sft\nmodel_name_or_path: m\ndataset: mine\nmax_steps: 10\nweight_decay: 1.0\ncutoff_len: 9000000\n"
    )
    odd.write_text("compute_environment: LOCAL_MACHINE\n")
    found = measure("llamafactory", [good, bad, odd], 8)
    assert (found["files"], found["read"], found["start"]) == (2, 2, 1)
    assert list(found["failed"]) == [str(bad)] and "max_position_embeddings" in found["failed"][str(bad)]
