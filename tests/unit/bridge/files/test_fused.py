"""Experts that files hold together: both orders are read, the hub's is written, and transformers reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mega_rl.bridge.files.huggingface import HFReader, HFWriter
from mega_rl.bridge.files.stored import OpenTensors
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.slices import indices, whole_box
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape, read_model_shape
from mega_rl.rollout.vllm.start.seeing import sight_arguments
from tests.models import families

FILE = "model.safetensors"
GATE_UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.language_model.layers.0.mlp.experts.down_proj"
EXPERT = "model.language_model.layers.0.mlp.experts.5."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers 5 saves it: the experts [E, 2F, D] and [E, D, F]."""
    directory = tmp_path_factory.mktemp("plain")
    families.make("qwen3_vl_moe").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def transposed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the hub has it."""
    directory = tmp_path_factory.mktemp("transposed")
    shutil.copy(plain / "config.json", directory)
    tensors = load_file(plain / FILE)
    turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(turned, directory / FILE, metadata={"format": "pt"})
    return directory


def read_all(directory: Path) -> tuple[ModelShape, dict[str, torch.Tensor]]:
    shape, reader = read_model_shape(directory), HFReader(directory)
    reader.check(shape)
    return shape, {name: reader.read(name, whole_box(size)) for name, size in hf_tensors(shape).items()}


def test_engines_read_one_order_and_a_key_that_transformers_leaves_out(plain: Path, transposed: Path) -> None:
    with pytest.raises(InputError, match=r"as transformers 5 writes them, .*mega-rl convert"):
        sight_arguments(str(plain), None)
    with pytest.raises(InputError, match="config.json: text_config has no norm_topk_prob, which engines read: add"):
        sight_arguments(str(transposed), None)
    config = json.loads((transposed / "config.json").read_text())
    config["text_config"]["norm_topk_prob"] = True
    (transposed / "config.json").write_text(json.dumps(config))
    assert sight_arguments(str(transposed), None) == {"limit_mm_per_prompt": {"image": 0, "video": 0}}


def test_both_orders_are_read(plain: Path, transposed: Path) -> None:
    expected = families.as_saved(families.make("qwen3_vl_moe").state_dict())
    for directory in (plain, transposed):
        shape, tensors = read_all(directory)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        reader, box = HFReader(directory), ((3, 20), (5, 31))
        stored = reader.stored(shape)
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"{EXPERT}{part}.weight"
            inner = ((box[0] if part != "down_proj" else (0, 32)), (box[1] if part != "down_proj" else (3, 20)))
            assert torch.equal(reader.read(name, inner), expected[name][indices(inner)])
            with OpenTensors(stored) as opened:
                assert torch.equal(opened.read(name, inner), expected[name][indices(inner)])


@pytest.mark.parametrize("max_shard_bytes", [1 << 13, 1 << 30])
def test_the_order_of_the_hub_is_written(plain: Path, transposed: Path, tmp_path: Path, max_shard_bytes: int) -> None:
    shape, tensors = read_all(plain)
    with HFWriter(tmp_path / "out", shape, torch.float32, max_shard_bytes, plain) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    written = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    expected = load_file(transposed / FILE)
    assert written.keys() == expected.keys() and all(torch.equal(written[name], t) for name, t in expected.items())
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    own = families.make("qwen3_vl_moe").state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({DOWN: None}, "missing tensors .*0.mlp.experts.down_proj"),
        ({GATE_UP: torch.zeros(8, 32, 50)}, "gate_up_proj has shape .*8, 32, 50.*config.json says"),
        ({GATE_UP: torch.zeros(48)}, "gate_up_proj has shape .*48.*config.json says"),
        ({DOWN: torch.zeros(24)}, "down_proj has shape"),
        ({EXPERT + "gate_proj.weight": torch.zeros(24, 32)}, "unexpected tensors .*experts.5.gate_proj"),
    ],
)
def test_files_that_are_not_of_the_model(
    transposed: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], words: str
) -> None:
    shutil.copytree(transposed, tmp_path / "model")
    tensors = {**load_file(transposed / FILE), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "model" / FILE)
    with pytest.raises(InputError, match=words):
        HFReader(tmp_path / "model").check(read_model_shape(tmp_path / "model"))


def test_a_value_that_is_no_number_is_told_by_its_expert(transposed: Path, tmp_path: Path) -> None:
    shutil.copytree(transposed, tmp_path / "model")
    tensors = load_file(transposed / FILE)
    tensors[GATE_UP][5, 0, 0] = torch.nan
    save_file(tensors, tmp_path / "model" / FILE)
    reader = HFReader(tmp_path / "model")
    reader.read(EXPERT + "up_proj.weight", whole_box((24, 32)))
    with pytest.raises(InputError, match="experts.5.gate_proj.weight has NaN"):
        reader.read(EXPERT + "gate_proj.weight", whole_box((24, 32)))
