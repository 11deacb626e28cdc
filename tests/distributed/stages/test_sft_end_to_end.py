"""Supervised fine-tuning through ``tools/train.py`` on two processes: what it logs, writes, and resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mega_rl.data.rows.rows import read_rows
from mega_rl.observe.analysis import trace
from tests.launching import training
from tests.launching.launch import started, torchrun_command
from tests.launching.training import TinyWorld, computed, digests, metrics_of, steps_saved

pytestmark = pytest.mark.slow
TOTAL_STEPS = 8


def held_out(model_dir: Path, rows: list[tuple[str, str]]) -> tuple[float, float]:
    """Of the responses and their ends: mean negative log-likelihood in nats, and hits, per token, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    total, hits, count = 0.0, 0, 0
    for prompt, response in rows:
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = prompt_ids + tokenizer(response, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        learnt = range(len(prompt_ids) - 1, len(ids) - 1)
        total -= sum(float(logprobs[position, ids[position + 1]]) for position in learnt)
        hits += sum(int(logprobs[position].argmax()) == ids[position + 1] for position in learnt)
        count += len(learnt)
    return total / count, hits / count


def test_loss_falls_and_everything_is_logged(sft_run: Path) -> None:
    metrics = metrics_of(sft_run)
    assert list(metrics) == list(range(1, TOTAL_STEPS + 1))
    losses = [row["sft/loss"] for row in metrics.values()]
    assert losses[-1] < 0.7 * losses[0]
    assert [step for step, row in metrics.items() if "sft/val_loss" in row] == [4, 8]
    assert metrics[8]["sft/val_loss"] < metrics[4]["sft/val_loss"]
    assert [row["sft/lr"] for row in metrics.values()][:2] == [pytest.approx(1.5e-3), pytest.approx(3e-3)]
    assert metrics[8]["sft/lr"] < 1e-3
    assert steps_saved(sft_run) == [4, 6, 8]


def test_a_step_is_recorded_and_every_step_says_what_share_of_the_device_it_used(sft_run: Path) -> None:
    (directory,) = (sft_run / "profile").rglob("rank_*")
    assert directory == sft_run / "profile" / "step_00000003" / "rank_00001"
    table = (directory / "operators.md").read_text()
    phases = [line for line in table.splitlines() if line.startswith("## ")]
    assert any(phase.startswith("## update: host, ") for phase in phases), table
    update = table.partition("## update: host")[2].partition("## ")[0]
    costs = trace.costs_of(trace.read_events(directory))["update", trace.HOST]
    rows = [line.split(" | ")[:2] for line in update.splitlines() if line.startswith("| ")]
    ten = [[f"| {cost.name}", f"{cost.calls:,}"] for cost in costs[: trace.NUM_ROWS]]
    assert rows == [["| operator", "calls"], *ten], "a header and the ten costliest"
    products = {cost.name: cost.microseconds for cost in costs if cost.name in ("aten::mm", "aten::addmm")}
    assert sum(products.values()) > 0, "how costly they are among tiny tensors depends on what else the machine does"
    for row in metrics_of(sft_run).values():
        assert row["throughput/mfu"] == pytest.approx(row["throughput/tflops_per_device"] / 2.0)
        assert row["throughput/tflops_per_device"] > 0.0


def test_exported_model_is_the_one_that_was_validated(sft_run: Path, tiny_world: TinyWorld) -> None:
    file = tiny_world.sft_rows.with_name("sft_val.jsonl")
    rows = [(row.get("prompt"), row.get("response")) for row in read_rows([str(file)], "file")]
    logged = metrics_of(sft_run)[TOTAL_STEPS]
    loss, accuracy = held_out(sft_run / "huggingface", rows)
    assert loss == pytest.approx(logged["sft/val_loss"], rel=1e-5)
    assert accuracy == logged["sft/val_token_accuracy"] > 0, "not one token more or less"
    assert held_out(tiny_world.model, rows)[0] != pytest.approx(logged["sft/val_loss"], rel=1e-1)
    assert 0 < logged["sft/token_accuracy"] <= 1


def test_resume_after_kill_inside_a_save_with_a_damaged_checkpoint(
    sft_run: Path, tiny_world: TinyWorld, tmp_path: Path
) -> None:
    output_dir = tmp_path / "run"
    arguments = ("save", 6, "--config", tiny_world.sft, f"trainer.output_dir={output_dir}")
    with started(torchrun_command(training.HELD, *arguments)) as running:
        running.wait_for("held at save 6", timeout=600)
    assert steps_saved(output_dir) == [2, 4]
    training.truncate(training.checkpoint(output_dir, 4) / "megatron" / "__1_0.distcp")

    resumed = training.copies(tiny_world.sft, output_dir).check()
    assert f"passing over damaged checkpoint {training.checkpoint(output_dir, 4)}" in resumed.stdout
    assert "resuming after step 2" in resumed.stdout
    expected = {step: computed(row) for step, row in metrics_of(sft_run).items()}
    assert {step: computed(row) for step, row in metrics_of(output_dir).items()} == expected
    assert digests(output_dir / "huggingface") == digests(sft_run / "huggingface")
    assert steps_saved(output_dir) == [4, 6, 8]
    assert not list((output_dir / "checkpoints").glob("*.incomplete"))
