"""Adapters through ``tools/train.py`` on two processes: what a run trains, exports, saves, and resumes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mega_rl.bridge.files.torch_dist.torch_dist import read_index
from mega_rl.data.rows.rows import read_rows
from tests.distributed.stages.test_sft_end_to_end import held_out
from tests.launching import training
from tests.launching.training import TinyWorld, computed, digests, metrics_of

pytestmark = pytest.mark.slow
LORA = ("tuning.method=lora", "tuning.adapter.rank=8", "tuning.adapter.alpha=16", "optimizer.lr=1.0e-2")


@pytest.fixture(scope="module")
def lora_run(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("lora") / "run"
    training.copies(tiny_world.sft, output_dir, *LORA, "checkpoint.save_freq=4").check()
    return output_dir


def test_export_has_the_adapters_in_it(lora_run: Path, tiny_world: TinyWorld) -> None:
    metrics = metrics_of(lora_run)
    losses = [row["sft/loss"] for row in metrics.values()]
    assert losses[-1] < 0.9 * losses[0]
    file = tiny_world.sft_rows.with_name("sft_val.jsonl")
    rows = [(row.get("prompt"), row.get("response")) for row in read_rows([str(file)], "file")]
    assert held_out(lora_run / "huggingface", rows)[0] == pytest.approx(metrics[8]["sft/val_loss"], rel=1e-5)
    after, before = (load_file(path / "model.safetensors") for path in (lora_run / "huggingface", tiny_world.model))
    assert set(after) == set(before)
    changed = {name for name in after if (after[name] != before[name]).any()}
    assert changed and all("_proj.weight" in name for name in changed)


def test_checkpoint_leaves_the_base_out_and_is_resumed(lora_run: Path, tiny_world: TinyWorld, tmp_path: Path) -> None:
    saved = training.checkpoint(lora_run, 4)
    record = json.loads((saved / "progress.json").read_text())["tuning"]
    assert record["settings"]["method"] == "lora" and len(record["base"]) == 32
    held = read_index(saved / "megatron").state_dict_metadata
    assert any(".linear_qkv.adapter.A" in name for name in held)
    assert not [name for name in held if ".weight" in name], "a frozen weight in the checkpoint"
    output_dir = tmp_path / "run"
    resumed = training.copies(tiny_world.sft, output_dir, *LORA, f"checkpoint.resume={saved}").check()
    assert "resuming after step 4" in resumed.stdout
    expected = {step: computed(row) for step, row in metrics_of(lora_run).items() if step > 4}
    assert {step: computed(row) for step, row in metrics_of(output_dir).items()} == expected
    assert digests(output_dir / "huggingface") == digests(lora_run / "huggingface")
