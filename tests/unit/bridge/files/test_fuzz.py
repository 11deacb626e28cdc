"""Whatever stands in a safetensors index or header, its model is read or refused, and nothing outside is opened."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.slices import whole_box
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape, read_model_shape
from tests.fuzzing import TEXTS, VALUES, accepted_or_sentence, cases
from tests.models.families import FILES

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelShape]:
    model = tmp_path_factory.mktemp("model")
    FILES.new_model("qwen2").save_pretrained(model, max_shard_size="20KB")
    return model, read_model_shape(model)


def read_all(model: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    reader = HFReader(model)
    reader.check(shape)
    found = {name: reader.read(name, whole_box(reader.shape(name))) for name in reader.names()}
    reader.stored(shape)
    return found


def change_index(copy: Path, content: Any, data: st.DataObject) -> tuple[Any, bool]:
    """The index with a change, and whether it still says the same of the shards in ``copy``."""
    weights = content["weight_map"]
    kind = data.draw(st.sampled_from(["order", "more", "renamed", "shard", "name", "moved", "map", "all"]))
    if kind == "order":
        content["weight_map"] = {name: weights[name] for name in data.draw(st.permutations(sorted(weights)))}
    elif kind == "more":
        content[data.draw(st.sampled_from(["metadata", "x"]))] = data.draw(VALUES)
    elif kind == "renamed":
        old = data.draw(st.sampled_from(sorted(set(weights.values()))))
        (copy / old).rename(copy / "other.safetensors")
        content["weight_map"] = {n: "other.safetensors" if shard == old else shard for n, shard in weights.items()}
    elif kind == "shard":
        weights[data.draw(st.sampled_from(sorted(weights)))] = data.draw(VALUES | TEXTS)
    elif kind == "name":
        weights[data.draw(TEXTS)] = data.draw(st.sampled_from(sorted(weights.values())))
    elif kind == "moved":
        weights[data.draw(st.sampled_from(sorted(weights)))] = data.draw(st.sampled_from(sorted(weights.values())))
    elif kind == "map":
        content["weight_map"] = data.draw(VALUES)
    else:
        content = data.draw(VALUES)
    return content, kind in ("order", "more", "renamed")


def test_a_changed_index(sharded: tuple[Path, ModelShape], tmp_path: Path) -> None:
    """One that says the same in other words gives the same weights; of any other one no wrong weight is read."""
    model, shape = sharded
    expected, copy, tally = read_all(model, shape), tmp_path / "copy", Counter[tuple[bool, bool]]()

    @cases(100)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(model, copy)
        content, is_same = change_index(copy, json.loads((model / INDEX).read_text()), data)
        (copy / INDEX).write_text(json.dumps(content))
        found = accepted_or_sentence(lambda: read_all(copy, shape))
        tally[is_same, found is not None] += 1
        if found is not None:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert found is not None or not is_same, content

    check()
    assert tally[True, True] and tally[False, False], tally


@cases(100)
@given(st.binary(min_size=1, max_size=16), st.integers(0, 1500))
def test_a_changed_header(sharded: tuple[Path, ModelShape], tmp_path: Path, noise: bytes, start: int) -> None:
    model, shape = sharded
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(model, copy)
    shard = min(copy.glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:start] + noise + whole[start + len(noise) :])
    accepted_or_sentence(lambda: read_all(copy, shape))


@pytest.mark.parametrize("name", ["../outside.safetensors", "{outside}", "a/b.safetensors", "..", ".", "", "a\0b"])
def test_an_index_does_not_lead_out_of_its_directory(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"w": torch.ones(2)}, outside)
    model = tmp_path / "model"
    model.mkdir()
    (model / INDEX).write_text(json.dumps({"weight_map": {"w": name.format(outside=outside)}}))
    with pytest.raises(InputError, match=r"give the name of a file beside the index|is missing"):
        HFReader(model)


def test_a_link_beside_the_index_is_followed(tmp_path: Path) -> None:
    """As the caches of model hubs have them."""
    save_file({"w": torch.ones(2)}, tmp_path / "blob")
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.safetensors").symlink_to("../blob")
    (model / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    assert HFReader(model).names() == ["w"]


def test_an_index_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": ' * 100_000)
    with pytest.raises(InputError, match="is not a safetensors index"):
        HFReader(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    weights = torch.ones(4, 4, dtype=dtype)
    weights[2, 2] = bad
    save_file({"w": weights}, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    assert reader.read("w", ((0, 2), (0, 4))).shape == (2, 4)  # only what is read is looked at
    with pytest.raises(InputError, match="model.safetensors: w has NaN or infinity in it"):
        reader.read("w", whole_box((4, 4)))
