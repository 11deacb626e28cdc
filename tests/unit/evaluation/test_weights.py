"""What a name of weights stands for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mega_rl.bridge.files.torch_dist.manifest import manifest, written
from mega_rl.errors import InputError
from mega_rl.evaluation.weights import find_weights, with_adapter
from mega_rl.models.shape import read_model_shape
from tests.models import adapters, families


def model(directory: Path, weights: bytes = b"w") -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def checkpoint(run: Path, step: int, is_whole: bool = True, **progress: object) -> Path:
    directory = run / "checkpoints" / f"step_{step:08d}"
    (directory / "megatron").mkdir(parents=True)
    files = [directory / "progress.json", directory / "megatron" / "shard"]
    files[0].write_text(json.dumps({"model": {}, **progress}))
    files[1].write_text(f"{step}")
    (directory / "manifest.json").write_text(manifest(written(directory, files)))
    if not is_whole:
        files[1].unlink()
    return directory


def run_of(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model: {path: m}\n")
    return run


def aged(path: Path, seconds: int) -> None:
    os.utime(path, (1_000_000 + seconds,) * 2)


def test_a_model_directory_and_a_cached_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_weights(str(model(tmp_path / "m")))
    assert not found.is_checkpoint and found.run_config is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = model(tmp_path / "hub" / "models--org--name" / "snapshots" / "abc")
    assert find_weights("org/name").directory == cached


def test_weights_are_told_apart_by_their_content_and_not_by_their_place(tmp_path: Path) -> None:
    one, same, other = (find_weights(str(model(tmp_path / n, b))) for n, b in (("a", b"w"), ("b", b"w"), ("c", b"v")))
    assert one.identity() == same.identity() != other.identity()


def test_a_run_gives_the_newer_one_of_its_newest_whole_checkpoint_and_its_export(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with pytest.raises(InputError, match="no whole checkpoint of a language model and no export"):
        find_weights(str(run))
    second = checkpoint(run, 2)
    checkpoint(run, 4, is_whole=False)
    found = find_weights(str(run))
    assert (found.directory, found.is_checkpoint, found.run_config) == (second, True, run / "config.yaml")
    assert find_weights(str(second)) == found
    export = model(run / "huggingface")
    aged(second / "manifest.json", 0)
    aged(export / "config.json", 1)
    assert find_weights(str(run)).directory == export and find_weights(str(export)).run_config == run / "config.yaml"
    aged(second / "manifest.json", 2)
    assert find_weights(str(run)).directory == second
    assert json.dumps(find_weights(str(run)).identity())


@pytest.mark.parametrize(("name", "words"), [("nowhere", "is no directory and no model"), (".", "has neither config")])
def test_anything_else_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        find_weights(str(tmp_path / name))


def test_a_checkpoint_of_a_part_or_of_values_is_passed_over(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    whole = checkpoint(run, 2)
    checkpoint(run, 4, tuning={"settings": {"method": "lora"}, "base": "b"})
    checkpoint(run, 6, model={"head": "value"})
    assert find_weights(str(run)).directory == whole


def test_an_adapter_belongs_to_the_weights_and_is_told_apart_by_its_content(tmp_path: Path) -> None:
    families.make("qwen2").save_pretrained(tmp_path / "qwen2")
    base, shape = find_weights(str(tmp_path / "qwen2")), read_model_shape(tmp_path / "qwen2")
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        adapters.save(tmp_path / name, adapters.state(adapters.pairs(shape, seed=seed)), tmp_path / "qwen2")
        found.append(with_adapter(base, tmp_path / name, "--adapter"))
    one, same, other = (weights.identity() for weights in found)
    assert one == same != other and base.identity().items() < one.items()
    assert base.is_loadable and not found[0].is_loadable


def test_a_checkpoint_takes_no_adapter(tmp_path: Path) -> None:
    weights = find_weights(str(checkpoint(run_of(tmp_path), 2)))
    assert not weights.is_loadable
    with pytest.raises(InputError, match="--adapter takes the model that the adapter was trained from, and .* is a"):
        with_adapter(weights, tmp_path / "adapter", "--adapter")
