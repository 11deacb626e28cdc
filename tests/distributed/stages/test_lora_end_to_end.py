"""Reinforcement learning with adapters through ``tools/train.py``: merged into what is sent, exported, gone on from."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launching.launch import ENGINE, REPO, ranks
from tests.launching.training import (
    FLEET_SETTINGS,
    PINNED_TWO,
    STRUCK_FLEET,
    STRUCK_LOG,
    TinyWorld,
    copies,
    metrics_of,
    sampled,
)

pytestmark = pytest.mark.slow
LORA = (
    "tuning.method=lora",
    "tuning.adapter.rank=4",
    "tuning.adapter.alpha=16",
    "optimizer.lr=1e-2",
    "aqn.num_stages=2",  # no noise in the first two steps of three
    "checkpoint.save_freq=null",
    "validation.test_freq=-1",
    "validation.val_before_train=false",
    "trainer.total_steps=3",
)


@pytest.fixture(scope="module")
def runs(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: new adapters, in the slots of one engine of two ranks; one that goes on from them, merged, with two
    engines of one rank."""
    runs = tmp_path_factory.mktemp("lora")
    copies(tiny_world.rl, runs / "slots", *LORA, "rollout.adapter=slots", modules=ENGINE).check()
    more = ("rollout.tensor_parallel_size=1", f"tuning.adapter.path={runs / 'slots' / 'adapter'}")
    copies(tiny_world.rl, runs / "merged", *LORA, *more, modules=ENGINE).check()
    return runs


@pytest.mark.parametrize("way", ["slots", "merged"])
def test_the_engine_samples_from_the_policy_with_its_adapters(runs: Path, tiny_world: TinyWorld, way: str) -> None:
    """float32 and every tensor verified, those in slots too; the noise comes on top."""
    metrics = metrics_of(runs / way)
    assert [metrics[step]["aqn/sigma"] for step in (1, 2, 3)] == [0.0, 0.0, 0.2]
    for step in (1, 2):
        assert (metrics[step]["adapter/largest_b"] > 0) == (step > 1 or way == "merged")
        assert metrics[step]["rollout/logprob_diff_mean"] < 1e-5
    assert metrics[3]["rollout/logprob_diff_mean"] > 1e-3
    num_verified = {metrics[step]["bridge/verified_tensors"] for step in (1, 2, 3)}
    num_tensors = len(load_file(tiny_world.model / "model.safetensors"))
    assert num_verified == {num_tensors + (2 * 14 if way == "slots" else 0)}  # factors of seven projections, two layers


@pytest.mark.parametrize("way", ["slots", "merged"])
def test_later_syncs_bring_only_what_changes(runs: Path, tiny_world: TinyWorld, way: str) -> None:
    """The norms that get noise; and the adapter once per engine, or the weights that it is merged into."""
    first, *later = (
        row["bridge/bytes_local"] + row["bridge/bytes_sent"] for step, row in metrics_of(runs / way).items() if step
    )
    weights = load_file(tiny_world.model / "model.safetensors")
    adapter = load_file(runs / way / "adapter" / "adapter_model.safetensors")
    adapted = [name.removeprefix("base_model.model.").replace("lora_A.", "") for name in adapter if "lora_A" in name]
    norms = [t for name, t in weights.items() if name.endswith("layernorm.weight")]
    if (
        way == "slots"
    ):  # one engine, whose two ranks both have the norms, the As of layers cut by rows, the Bs of others
        twice = [t for name, t in adapter.items() if ("lora_A" in name) != ("o_proj" in name or "down_proj" in name)]
        sent = [*adapter.values(), *twice, *norms, *norms]
    else:  # two engines
        sent = 2 * [*(weights[name] for name in adapted), *norms]
    assert later == [4.0 * sum(t.numel() for t in sent)] * 2 and later[0] < first


def test_engines_of_a_fleet_are_brought_factors(
    tiny_world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every load is proved by the hashes of the sums that the trainer's two ranks have made; float32 brings sums."""
    monkeypatch.setenv(STRUCK_LOG, str(tmp_path / "told.jsonl"))
    moved = {}
    for dtype in ("bfloat16", "float32"):
        run = tmp_path / dtype
        more = (*LORA, "parallel={tensor: 2, sequence: true}", f"model.dtype={dtype}", "rollout.adapter=merged")
        settings = ("--config", tiny_world.rl, f"trainer.output_dir={run}", *FLEET_SETTINGS, *PINNED_TWO, *more)
        ranks(STRUCK_FLEET, "calm", *settings, nproc=2).check()
        brings = (
            "their factors, which engines merge" if dtype == "bfloat16" else "the weights that they are merged into"
        )
        assert f"rollout.adapter: of merged adapters every version brings {brings}" in (run / "run.log").read_text()
        rows = metrics_of(run)
        assert rows[1]["adapter/largest_b"] == 0.0 < rows[3]["adapter/largest_b"] and sampled(run)
        moved[dtype] = [rows[step]["bridge/bytes_local"] + rows[step]["bridge/bytes_sent"] for step in (1, 2, 3)]
    weights = load_file(tiny_world.model / "model.safetensors")
    num_elements = sum(
        4 * sum(tensor.shape) for name, tensor in weights.items() if "_proj." in name and tensor.dim() == 2
    )
    assert moved["bfloat16"][1:] == [2.0 * num_elements] * 2
    assert moved["float32"][1] > 4 * moved["bfloat16"][1], moved


def test_the_reference_of_a_run_that_goes_on_is_where_it_began(runs: Path) -> None:
    assert metrics_of(runs / "merged")[1]["gate/reference"] == 0.0


def test_merged_export_is_the_base_and_the_exported_adapter(runs: Path, tiny_world: TinyWorld, tmp_path: Path) -> None:
    """Bit for bit what tools/merge_lora.py makes of the two, and not the base."""
    spec = util.spec_from_file_location("merge_lora_tool", REPO / "tools" / "merge_lora.py")
    assert spec is not None and spec.loader is not None
    tool = util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main([str(tiny_world.model), str(runs / "slots" / "adapter"), "-o", str(tmp_path / "merged")]) == 0
    ours = load_file(runs / "slots" / "huggingface" / "model.safetensors")
    tools, base = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", tiny_world.model))
    assert ours.keys() == tools.keys() and all(torch.equal(ours[name], tools[name]) for name in ours)
    assert not torch.equal(ours["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])
