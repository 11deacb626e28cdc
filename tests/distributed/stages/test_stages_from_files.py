"""The stages pt, dpo and kto as a user runs them: against transformers, at several layouts, killed and resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.launching.launch import once
from tests.launching.training import TinyWorld, computed, copies, digests, metrics_of, steps_saved, write_rows

pytestmark = pytest.mark.slow
NUM_STEPS, BATCH, BETA = 5, 8, 0.3
CONFIG = """
model: {{path: {model}, dtype: float32}}
data: {{train_files: [{train}], val_files: [{val}], train_batch_size: 8, max_prompt_length: 8, max_response_length: 6,
        shuffle: false}}
preference: {{beta: 0.3}}
kto: {{beta: 0.3, undesirable_weight: 1.5}}
optimizer: {{lr: 1.0e-3}}
trainer: {{stage: {stage}, total_steps: 5, max_tokens_per_microbatch: 48}}
checkpoint: {{save_freq: 2}}
validation: {{test_freq: 2}}
platform: {{name: cpu}}
"""
TP = ("parallel.tensor=2", "parallel.sequence=true")
LAYOUTS = {
    "data": (),
    "tensor": TP,
    "stages": ("parallel.pipeline=2",),
    "context": ("parallel.context=2",),
}


def rows_of(stage: str, count: int, first: int = 0) -> list[dict[str, Any]]:
    """Sums, right and wrong ones of several lengths."""
    rows: list[dict[str, Any]] = []
    for i in range(first, first + count):
        prompt, right, wrong = f"{i % 7}+{i % 5}=", str(i % 7 + i % 5), "+" * (i % 3 + 1) + str(i % 9)
        match stage:
            case "dpo":
                rows.append({"prompt": prompt, "chosen": right, "rejected": wrong})
            case "kto":
                rows.append({"prompt": prompt, "completion": right if i % 3 else wrong, "label": bool(i % 3)})
            case _:
                rows.append({"text": (prompt + right + " ") * (1 + i % 4)})
    return rows


@pytest.fixture(scope="module")
def run_of(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(stage, layout) -> the directory of an uninterrupted run; not to be written to."""
    root = tmp_path_factory.mktemp("from_files")
    for stage in ("pt", "dpo", "kto"):
        files = {
            name: write_rows(root / f"{stage}_{name}.jsonl", rows_of(stage, *size)) for name, size in SIZES.items()
        }
        (root / f"{stage}.yaml").write_text(CONFIG.format(model=tiny_world.model, stage=stage, **files))

    @once
    def run(stage: str, layout: str = "data", *more: str) -> Path:
        output_dir = root / "-".join([stage, layout, *more])
        copies(root / f"{stage}.yaml", output_dir, *LAYOUTS[layout], *more).check()
        return output_dir

    return run


SIZES = {"train": (21,), "val": (5, 40)}


def answer_logprob(model: Any, tokenizer: Any, prompt: str, answer: str) -> torch.Tensor:
    """Of the answer and its end, in nats, as transformers has it."""
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = prompt_ids + tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return sum(logprobs[t, ids[t + 1]] for t in range(len(prompt_ids) - 1, len(ids) - 1))


def margins(policy: Path, reference: Path, rows: list[dict[str, Any]]) -> torch.Tensor:
    """[rows]: by how much more than the reference the policy prefers the chosen answers, in nats."""
    tokenizer, found = AutoTokenizer.from_pretrained(reference), []
    for directory in (policy, reference):
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        with torch.no_grad():
            parts = [
                [answer_logprob(model, tokenizer, row["prompt"], row[name]) for name in ("chosen", "rejected")]
                for row in rows
            ]
        found.append(torch.tensor(parts))
    return (found[0] - found[1]) @ torch.tensor([1.0, -1.0])


def test_dpo_of_an_exported_model_is_what_was_validated(run_of: Callable[..., Path], tiny_world: TinyWorld) -> None:
    metrics = metrics_of(run_of("dpo"))
    assert list(metrics) == [*range(1, NUM_STEPS + 1)] and metrics[1]["dpo/loss"] == pytest.approx(math.log(2))
    assert [step for step, row in metrics.items() if "dpo/val_loss" in row] == [2, 4, 5]
    found = BETA * margins(run_of("dpo") / "huggingface", tiny_world.model, rows_of("dpo", *SIZES["val"]))
    last = metrics[NUM_STEPS]
    assert last["dpo/val_loss"] == pytest.approx(float(F.softplus(-found).mean()), abs=1e-5)
    assert last["dpo/val_margin"] == pytest.approx(float(found.mean()), abs=1e-5)
    assert last["dpo/val_accuracy"] == pytest.approx(float((found > 0).float().mean()))
    assert last["dpo/val_loss"] < 0.9 * math.log(2) and last["dpo/margin"] > metrics[2]["dpo/margin"] > 0


def test_the_first_gradient_of_dpo_is_that_of_transformers(run_of: Callable[..., Path], tiny_world: TinyWorld) -> None:
    """Where policy and reference are equal the loss has the slope -beta / 2 in every margin."""
    model = AutoModelForCausalLM.from_pretrained(tiny_world.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_world.model)
    for row in rows_of("dpo", BATCH):
        chosen, rejected = (answer_logprob(model, tokenizer, row["prompt"], row[n]) for n in ("chosen", "rejected"))
        (-0.5 * BETA * (chosen - rejected) / BATCH).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert metrics_of(run_of("dpo"))[1]["dpo/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_kto_learns_good_from_bad(run_of: Callable[..., Path]) -> None:
    metrics = metrics_of(run_of("kto"))
    weights = [1.0 if i % 3 else 1.5 for i in range(BATCH)]
    assert metrics[1]["kto/loss"] == pytest.approx(sum(weights) / 2 / BATCH, abs=1e-6), "all ratios are 1"
    assert metrics[1]["kto/kl"] == pytest.approx(0.0, abs=1e-5)
    last = metrics[NUM_STEPS]
    assert last["kto/chosen_reward"] > 0 > last["kto/rejected_reward"]
    assert last["kto/loss"] < 0.9 * metrics[1]["kto/loss"]


def test_pt_predicts_text_better(run_of: Callable[..., Path]) -> None:
    metrics = metrics_of(run_of("pt"))
    last = metrics[NUM_STEPS]
    assert last["pt/val_loss"] < metrics[2]["pt/val_loss"]
    assert last["pt/val_perplexity"] == pytest.approx(math.exp(last["pt/val_loss"]))


@pytest.mark.parametrize(
    ("stage", "layout"), [("dpo", "tensor"), ("dpo", "stages"), ("dpo", "context"), ("kto", "context")]
)
def test_a_layout_changes_nothing(run_of: Callable[..., Path], stage: str, layout: str) -> None:
    own, expected = metrics_of(run_of(stage, layout)), metrics_of(run_of(stage))
    for step, row in expected.items():
        for name, value in computed(row).items():
            # At the first step nothing but rounding decides whose reward is higher.
            if not (step == 1 and name.endswith(("accuracy", "margin", "reward", "kl"))):
                assert own[step][name] == pytest.approx(value, rel=1e-3, abs=1e-4), (step, name)


def test_answers_of_pairs_apart_change_nothing(run_of: Callable[..., Path]) -> None:
    """Micro-batches of 9 tokens hold every answer and no pair of more tokens."""
    small = ("data.max_prompt_length=4", "data.max_response_length=5", "trainer.max_tokens_per_microbatch=9")
    apart, expected = metrics_of(run_of("dpo", "stages", *small)), metrics_of(run_of("dpo", "stages"))
    for name, value in computed(expected[2]).items():
        if "val" not in name and not name.startswith("data"):
            assert apart[2][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert apart[NUM_STEPS]["dpo/val_loss"] == pytest.approx(expected[NUM_STEPS]["dpo/val_loss"], rel=1e-3)


@pytest.mark.parametrize("stage", ["pt", "dpo", "kto"])
def test_killed_and_resumed_it_is_the_same_run(run_of: Callable[..., Path], tmp_path: Path, stage: str) -> None:
    """And the reference's log-probabilities are computed once, whatever the policy is by then."""
    whole = run_of(stage, "tensor")
    config, output_dir = whole.parent / f"{stage}.yaml", tmp_path / "run"
    struck = copies(config, output_dir, *TP, struck_after=3)
    assert struck.returncode != 0 and steps_saved(output_dir) == [2]
    assert ("computing the log-probabilities" in struck.stdout) == (stage != "pt")
    resumed = copies(config, output_dir, *TP).check()
    assert "resuming after step 2" in resumed.stdout and "computing the log-prob" not in resumed.stdout
    expected = {step: computed(row) for step, row in metrics_of(whole).items()}
    assert {step: computed(row) for step, row in metrics_of(output_dir).items()} == expected
    assert digests(output_dir / "huggingface") == digests(whole / "huggingface")


def test_a_damaged_or_foreign_reference_file_is_computed_again(run_of: Callable[..., Path], tmp_path: Path) -> None:
    whole, output_dir = run_of("dpo", "tensor"), tmp_path / "run"
    output_dir.mkdir()
    name = "reference_logprobs_{}.safetensors"
    own = (whole / name.format("train")).read_bytes()
    (output_dir / name.format("train")).write_bytes(own[:-1] + bytes([own[-1] ^ 1]))
    (output_dir / name.format("val")).write_bytes(own)
    launched = copies(whole.parent / "dpo.yaml", output_dir, *TP, "trainer.total_steps=1", "checkpoint.export_hf=false")
    assert "train.safetensors (the file is damaged)" in launched.check().stdout
    assert "val.safetensors (the file is of another model or of other data)" in launched.stdout
    for which in ("train", "val"):
        found, wanted = (load_file(directory / name.format(which)) for directory in (output_dir, whole))
        assert torch.equal(found["logprobs"], wanted["logprobs"])
    assert json.loads((output_dir / "metrics.jsonl").read_text())["metrics"]["dpo/loss"] == pytest.approx(math.log(2))


def test_orpo_has_no_reference(run_of: Callable[..., Path]) -> None:
    directory = run_of("dpo", "data", "preference.loss=orpo", "trainer.total_steps=2")
    assert not list(directory.glob("reference_logprobs*")) and metrics_of(directory)[2]["dpo/loss"] > 0
