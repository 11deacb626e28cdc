"""Reinforcement learning with adapters through ``tools/train.py``: merged into what is sent, exported, gone on from."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import training
from tests.distributed.training import TinyWorld, metrics_of
from tests.launch import REPO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LORA = (
    "tuning.method=lora",
    "tuning.adapter.rank=4",
    "tuning.adapter.alpha=16",
    "optimizer.lr=1e-2",
    "checkpoint.save_freq=null",
    "validation.test_freq=-1",
    "validation.val_before_train=false",
)


@pytest.fixture(scope="module")
def runs(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: adapters that begin with nothing, and one that goes on from what they became."""
    runs = tmp_path_factory.mktemp("lora")
    training.train(tiny_world.rl, runs / "first", *LORA, "trainer.total_steps=3").check()
    more = ("trainer.total_steps=1", "aqn.enabled=false", f"tuning.adapter.path={runs / 'first' / 'adapter'}")
    training.train(tiny_world.rl, runs / "second", *LORA, *more).check()
    return runs


def test_the_engine_samples_from_the_merged_policy(runs: Path) -> None:
    """float32 and every tensor verified; the noise comes on top of the merge."""
    metrics = metrics_of(runs / "first")
    assert [metrics[step]["adapter/largest_b"] > 0 for step in (1, 2, 3)] == [False, True, True]
    assert [metrics[step]["aqn/sigma"] for step in (1, 2, 3)] == [0.0, 0.2, 0.05]
    assert all(metrics[step]["bridge/verified_tensors"] > 0 for step in (1, 2, 3))
    assert metrics[1]["rollout/logprob_diff_mean"] < 1e-5
    second = metrics_of(runs / "second")[1]
    assert second["adapter/largest_b"] > 0 and second["rollout/logprob_diff_mean"] < 1e-5


def test_later_syncs_bring_only_what_changes(runs: Path, tiny_world: TinyWorld) -> None:
    """Of the dense model: no embedding, head and biases; the norms, which get noise."""
    moved = {s: row["bridge/bytes_local"] + row["bridge/bytes_sent"] for s, row in metrics_of(runs / "first").items()}
    weights = load_file(tiny_world.model / "model.safetensors")
    kept = sum(t.numel() * 4 for name, t in weights.items() if "embed" in name or "lm_head" in name or "bias" in name)
    assert 0 < moved[2] == moved[3] < moved[1] - kept / 2


def test_the_reference_of_a_run_that_goes_on_is_where_it_began(runs: Path) -> None:
    assert metrics_of(runs / "second")[1]["gate/reference"] == 0.0


def test_merged_export_is_the_base_and_the_exported_adapter(runs: Path, tiny_world: TinyWorld, tmp_path: Path) -> None:
    """Bit for bit what tools/merge_lora.py makes of the two, and not the base."""
    spec = util.spec_from_file_location("merge_lora_tool", REPO / "tools" / "merge_lora.py")
    assert spec is not None and spec.loader is not None
    tool = util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main([str(tiny_world.model), str(runs / "first" / "adapter"), "-o", str(tmp_path / "merged")]) == 0
    ours = load_file(runs / "first" / "huggingface" / "model.safetensors")
    tools, base = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", tiny_world.model))
    assert ours.keys() == tools.keys() and all(torch.equal(ours[name], tools[name]) for name in ours)
    assert not torch.equal(ours["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])
