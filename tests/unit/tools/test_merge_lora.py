"""tools/merge_lora.py: W + scale B A of every adapted tensor, all else copied, whole or not there at all."""

from __future__ import annotations

import json
import signal
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mega_rl.models.shape import read_model_shape
from tests.launching.launch import REPO, run_copy
from tests.models import adapters, families

KILLED = """
import os, signal, sys
sys.path.insert(0, "tools")
import merge_lora
from mega_rl.bridge.files import copy
from mega_rl.bridge.files.assembly import Assembly
copy.RECORDED_BLOCKS = 4
record = Assembly.record
def record_and_die(self, num_done):
    record(self, num_done)
    if num_done:
        os.kill(os.getpid(), signal.SIGKILL)
Assembly.record = record_and_die
merge_lora.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = util.spec_from_file_location("merge_lora_tool", REPO / "tools" / "merge_lora.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in float32 and several shards, one with experts in bfloat16, an adapter of each, one fused."""
    root = tmp_path_factory.mktemp("merge")
    families.make("qwen2").save_pretrained(root / "qwen2", max_shard_size="40KB")
    families.make("qwen3_moe").to(torch.bfloat16).save_pretrained(root / "qwen3_moe")
    path = root / "qwen3_moe" / "model.safetensors"
    tensors = load_file(path)
    tensors |= {name: t.float() for name, t in tensors.items() if name.endswith("norm.weight")}  # of mixed dtypes
    save_file(tensors, path, metadata={"format": "pt"})
    for name in ("qwen2", "qwen3_moe"):
        (root / name / "tokenizer.json").write_text("{}")
        shape = read_model_shape(root / name)
        factors = adapters.pairs(shape)
        tensors = adapters.state(factors) if name == "qwen2" else adapters.fused_state(factors, shape)
        patterns = {"rank_pattern": {".*gate_up_proj": 8}, "alpha_pattern": {".*gate_up_proj": 16}}
        adapters.save(root / f"{name}_adapter", tensors, root / name, **({} if name == "qwen2" else patterns))
    return root


def weights(directory: Path) -> dict[str, Tensor]:
    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_every_tensor_is_what_the_formula_says(tool: ModuleType, root: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "merged"
    base, adapter = str(root / name), str(root / f"{name}_adapter")
    assert tool.main([base, adapter, "-o", str(out), "--verify", "--max-shard-gib", "0.0001"]) == 0
    before, after = weights(root / name), weights(out)
    factors = adapters.pairs(read_model_shape(root / name))
    assert before.keys() == after.keys() and len(list(out.glob("*.safetensors"))) > 1
    for tensor, weight in before.items():
        assert after[tensor].dtype == weight.dtype, tensor
        if tensor not in factors:
            assert torch.equal(after[tensor], weight), tensor
            continue
        a, b = factors[tensor]
        exact = weight.double() + adapters.ALPHA / adapters.RANK * (b.double() @ a.double())
        assert not torch.equal(after[tensor], weight)
        unit = 2**-23 if weight.dtype == torch.float32 else 2**-8  # one rounding, and the sum's
        assert ((after[tensor].double() - exact).abs() <= unit * (exact.abs() + weight.abs().double() + 1)).all()
    assert (out / "tokenizer.json").read_text() == "{}"
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["tensors"].keys() == before.keys()
    AutoModelForCausalLM.from_pretrained(out)


def test_sizes_of_blocks_change_nothing(tool: ModuleType, root: Path, tmp_path: Path) -> None:
    names = [str(root / "qwen2"), str(root / "qwen2_adapter")]
    for number, size in enumerate(("1", "64")):
        assert tool.main([*names, "-o", str(tmp_path / str(number)), "--bucket-mib", size]) == 0
    assert contents(tmp_path / "0") == contents(tmp_path / "1")


def test_a_killed_merge_leaves_nothing_that_looks_whole_and_goes_on(
    tool: ModuleType, root: Path, tmp_path: Path
) -> None:
    names, out = [str(root / "qwen2"), str(root / "qwen2_adapter")], tmp_path / "out"
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    killed = run_copy(script, *names, "-o", out)
    assert killed.returncode == -signal.SIGKILL and not out.exists()
    assert (tmp_path / ".out.unfinished").is_dir()
    assert tool.main([*names, "-o", str(out)]) == 0
    assert tool.main([*names, "-o", str(tmp_path / "plain")]) == 0
    assert contents(out) == contents(tmp_path / "plain") and not (tmp_path / ".out.unfinished").exists()


def test_bad_input_ends_with_one_sentence(
    tool: ModuleType, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for base, adapter, word in (
        ("qwen3_moe", "qwen2_adapter", "qwen2"),  # of another base
        ("gone", "qwen2_adapter", "BASE"),
        ("qwen2", "gone", "ADAPTER"),
    ):
        assert tool.main([str(root / base), str(root / adapter), "-o", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and word in error
    assert list(tmp_path.iterdir()) == []
