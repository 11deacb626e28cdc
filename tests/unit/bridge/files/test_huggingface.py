"""Hugging Face directories in and out, against transformers, and the faults that must be named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mega_rl.bridge.files.huggingface import HFReader, HFWriter
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.slices import indices, whole_box
from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape
from mega_rl.observe.heartbeat import HEART
from tests.models.families import FILES

FAMILIES = tuple(FILES.own)


def save_model(path: Path, family: str = "qwen2", tied: bool = False, shard: str = "1GB", seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = FILES.new_model(family, tie_word_embeddings=tied)
    model.save_pretrained(path, max_shard_size=shard)
    return path


def logits(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_reader_gives_boxes_of_single_and_sharded_models(tmp_path: Path, shard: str) -> None:
    model = save_model(tmp_path / "m", shard=shard)
    assert (model / "model.safetensors.index.json").exists() == (shard == "20KB")
    expected = {k: v for file in model.glob("*.safetensors") for k, v in load_file(file).items()}
    reader = HFReader(model)
    reader.check(read_model_shape(model))
    assert set(reader.names()) == set(expected)
    for name, tensor in expected.items():
        assert reader.shape(name) == tuple(tensor.shape)
        box = tuple((n // 3, n - n // 4) for n in tensor.shape)
        assert torch.equal(reader.read(name, box), tensor[indices(box)])
        assert torch.equal(reader.read(name, whole_box(tensor.shape)), tensor)


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_loads_in_transformers(tmp_path: Path, family: str, tied: bool, max_shard_bytes: int) -> None:
    source = save_model(tmp_path / "source", family, tied)
    (source / "tokenizer_config.json").write_text('{"a": 1}')
    (source / "optimizer.bin").write_text("not copied")
    shape, reader, out = read_model_shape(source), HFReader(source), tmp_path / "deep" / "out"
    with HFWriter(out, shape, torch.float32, max_shard_bytes, source) as writer:
        for name in reversed(hf_tensors(shape)):  # any order
            assert not out.exists()
            writer.write(name, reader.read(name, whole_box(reader.shape(name))))
    assert torch.equal(logits(out), logits(source))
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 1 << 30)
    HFReader(out).check(shape)
    for file in files:
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, reader.read(name, whole_box(tensor.shape)))
    assert (out / "tokenizer_config.json").read_text() == '{"a": 1}'
    assert not (out / "optimizer.bin").exists()
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_the_config_states_the_dtype_that_was_written(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source")
    shape, reader = read_model_shape(source), HFReader(source)
    with HFWriter(tmp_path / "out", shape, torch.bfloat16, 1 << 30, source) as writer:
        for name, size in hf_tensors(shape).items():
            writer.write(name, reader.read(name, whole_box(size)).bfloat16())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {config[key] for key in ("dtype", "torch_dtype") if key in config} == {"bfloat16"}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_nothing_that_looks_whole_is_left_by_a_failed_write(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source")
    shape = read_model_shape(source)
    with pytest.raises(RuntimeError, match="trainer"), HFWriter(tmp_path / "out", shape, torch.float32, 1, source):
        raise RuntimeError("trainer")
    with (
        pytest.raises(AssertionError, match="not written"),
        HFWriter(tmp_path / "out", shape, torch.float32, 1, source),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_an_existing_output_directory_is_left_alone(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="out exists"):
        HFWriter(tmp_path / "out", read_model_shape(source), torch.float32, 1 << 30, source)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_writers_leftovers_do_not_get_into_the_next_output(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "stale").write_text("")
    shape, reader = read_model_shape(source), HFReader(source)
    with HFWriter(tmp_path / "out", shape, torch.float32, 1 << 30, source) as writer:
        for name, size in hf_tensors(shape).items():
            writer.write(name, reader.read(name, whole_box(size)))
    assert not (tmp_path / "out" / "stale").exists()


def test_every_file_that_reaches_the_disk_is_progress(tmp_path: Path) -> None:
    """Else the watch over the ranks ends a run whose storage is slow, in the middle of its export."""
    model = save_model(tmp_path / "m")
    before = HEART.count
    with HFWriter(tmp_path / "out", read_model_shape(model), torch.float32, 1 << 30, model) as writer:
        for name, tensor in load_file(model / "model.safetensors").items():
            writer.write(name, tensor)
        assert HEART.count == before
    assert HEART.count - before >= len(list((tmp_path / "out").iterdir()))


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        HFWriter(tmp_path / "file" / "out", read_model_shape(source), torch.float32, 1 << 30, source)


def rewrite(model: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(model / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "missing tensors model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}, "unexpected tensors model.layers.2.mlp.up_proj.weight"),
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight has shape \[31\].*\[32\]"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "model.norm.weight is I8"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, changes: dict[str, torch.Tensor | None], words: str) -> None:
    model = save_model(tmp_path / "m")
    rewrite(model, **changes)
    with pytest.raises(InputError, match=words):
        HFReader(model).check(read_model_shape(model))


def test_known_buffers_and_a_doubled_tied_head_are_ignored(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", tied=True)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(37, 32)}
    rewrite(model, **extra)
    HFReader(model).check(read_model_shape(model))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", shard="20KB")
    shards = sorted(model.glob("*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    with pytest.raises(InputError, match=f"{shards[1].name} is truncated"):
        HFReader(model)
    shutil.copyfile(shards[0], shards[1])
    with pytest.raises(InputError, match="names tensors that its shards lack"):
        HFReader(model)
    shards[1].unlink()
    with pytest.raises(InputError, match=f"{shards[1].name} is missing"):
        HFReader(model)
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match="not a safetensors index"):
        HFReader(model)
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match="has neither"):
        HFReader(model)
