"""Whole supervised runs of a model with experts, in bfloat16, at layouts that one process's run must agree with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.launching.launch import once
from tests.launching.training import TinyWorld, copies, metrics_of, steps_saved

pytestmark = pytest.mark.slow
NUM_STEPS = 3
ALONE = ("parallel.tensor=1", "parallel.sequence=false")
LAYOUTS = {  # number of processes (0: a plain one), overrides
    "alone": (0, ALONE),
    "experts": (2, (*ALONE, "parallel.expert=2", "parallel.overlap_grad_reduce=true")),
    "stages": (
        4,  # its experts have two replicas, which collect them from each other between the steps
        (
            *(*ALONE, "parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.context=2"),
            "parallel.overlap_param_gather=true",
        ),
    ),
}
TOLERANCE = 2e-2  # relative; bfloat16 keeps 8 bits


def write_model(directory: Path, tokenizer_dir: Path) -> Path:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def run_of(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sft_layouts")
    model = write_model(root / "model", tiny_world.model)

    @once
    def run(name: str) -> Path:
        nproc, layout = LAYOUTS[name]
        overrides = (f"model.path={model}", "model.dtype=bfloat16", f"trainer.total_steps={NUM_STEPS}")
        more = ("validation.test_freq=-1", "checkpoint.save_freq=-1", "trainer.max_tokens_per_microbatch=40")
        copies(tiny_world.sft, root / name, *overrides, *more, *layout, nproc=nproc).check()
        return root / name

    return run


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "alone"])
def test_a_run_at_a_layout_is_the_run_of_one_process(run_of: Callable[[str], Path], name: str) -> None:
    own, expected = metrics_of(run_of(name)), metrics_of(run_of("alone"))
    assert list(own) == list(expected) == list(range(1, NUM_STEPS + 1))
    for step, row in expected.items():
        for metric in ("sft/loss", "sft/grad_norm", "sft/lr", "sft/tokens"):
            assert own[step][metric] == pytest.approx(row[metric], rel=TOLERANCE), (step, metric)
    last = own[NUM_STEPS]
    assert last["sft/val_loss"] == pytest.approx(expected[NUM_STEPS]["sft/val_loss"], rel=TOLERANCE)
    assert last["sft/loss"] < 0.9 * own[1]["sft/loss"] and last["sft/skipped_steps_total"] == 0
    assert steps_saved(run_of(name)) == [NUM_STEPS]
    assert last["memory/peak_host_gib"] >= last["memory/peak_host_gib/update"] > 0, "peaks of every phase"


def test_checkpoint_of_split_experts_is_refused_without_them(
    run_of: Callable[[str], Path], tiny_world: TinyWorld
) -> None:
    """In one sentence, before a model is built, and nothing is changed."""
    directory = run_of("experts")
    saved = directory / "checkpoints" / f"step_{NUM_STEPS:08d}"
    overrides = (f"model.path={directory.parent / 'model'}", "model.dtype=bfloat16", f"checkpoint.resume={saved}")
    launched = copies(tiny_world.sft, directory.parent / "refused", *overrides, *ALONE, nproc=0)
    assert launched.returncode != 0
    assert "was written with parallel.expert 2" in launched.stdout and "set parallel.expert to 2" in launched.stdout
    assert not (directory.parent / "refused" / "metrics.jsonl").exists()
