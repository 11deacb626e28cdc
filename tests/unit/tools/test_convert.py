"""tools/convert.py on files: round trips, interruption, a full disk, and what it says of bad input."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega_rl.bridge.files import assembly
from mega_rl.bridge.files.torch_dist.torch_dist_layout import (
    global_shapes,
    global_slices,
    layout_chunks,
    smallest_layout,
)
from mega_rl.bridge.mapping.megatron import padded_vocab_size
from mega_rl.bridge.slices import intersect, num_elements
from mega_rl.models.shape import read_model_shape
from tests.launching.launch import REPO, run
from tests.models import families

LAYOUTS = [(1, 1, None, 1, None), (2, 2, None, 1, None), (2, 2, 2, 1, None), (4, 1, None, 2, 2), (1, 4, None, 8, 1)]
KILLED = """
import os, signal, sys
sys.path.insert(0, "tools")
import convert
from mega_rl.bridge.files.assembly import Assembly
record = Assembly.record
def record_and_die(self, num_done):
    record(self, num_done)
    if num_done:
        os.kill(os.getpid(), signal.SIGKILL)
Assembly.record = record_and_die
convert.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_tool", REPO / "tools" / "convert.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in several shards, and one with experts of mixed dtypes; both with tokenizer files."""
    root = tmp_path_factory.mktemp("models")
    families.make("qwen2").save_pretrained(root / "qwen2", max_shard_size="40KB")
    families.make("deepseek_v3").to(torch.bfloat16).save_pretrained(root / "mixed")
    path = root / "mixed" / "model.safetensors"
    tensors = load_file(path)
    biases = {
        name: tensor.float() + 1e-4 for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")
    }
    assert biases
    save_file(tensors | biases, path, metadata={"format": "pt"})
    for name in ("qwen2", "mixed"):
        (root / name / "tokenizer.json").write_text("{}")
        (root / name / "chat_template.jinja").write_text("{{ x }}")
    return root


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def unfinished(out: Path) -> Path:
    return out.with_name(f".{out.name}.unfinished")


@pytest.mark.parametrize("name", ["qwen2", "mixed"])
def test_there_and_back_is_the_same_model(tool: ModuleType, models: Path, tmp_path: Path, name: str) -> None:
    """Every tensor in its own dtype, and everything that a loader wants beside the weights."""
    there, other, back = tmp_path / "there", tmp_path / "other", tmp_path / "back"
    layout = ("--tp", "2", "--pp", "2", *(("--ep", "2", "--etp", "1") if name == "mixed" else ("--vpp", "2")))
    check = ("--verify", "--no-logits")
    assert tool.main(["hf-to-megatron", "--model", str(models / name), "--out", str(there), *layout, *check]) == 0
    assert tool.main(["reshard", "--checkpoint", str(there), "--out", str(other), "--tp", "4", *check]) == 0
    assert tool.main(["megatron-to-hf", "--checkpoint", str(other), "--out", str(back), *check]) == 0
    assert same(weights(back), weights(models / name))
    for file in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        original, copied = (directory / file for directory in (models / name, back))
        assert (
            json.loads(original.read_text()) == json.loads(copied.read_text())
            if file == "config.json"
            else (original.read_bytes() == copied.read_bytes())
        )
    certificates = [json.loads((d / "certificate.json").read_text()) for d in (there, other, back)]
    assert all(c["tensors"] == certificates[0]["tensors"] and c["round_trip"] == "bit-exact" for c in certificates)
    assert certificates[0]["logits"] == {"compared": False, "reason": "--no-logits"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_norms_before_experts_by_the_names_of_transformer_engine(tool: ModuleType, tmp_path: Path) -> None:
    """Its layers with experts keep that norm apart; Megatron's own layers give it the name of a fused one."""
    families.make("qwen3_moe").save_pretrained(tmp_path / "model")
    there, back, model = tmp_path / "there", tmp_path / "back", ("--model", str(tmp_path / "model"))
    assert tool.main(["hf-to-megatron", *model, "--out", str(there), "--ep", "2"]) == 0
    renamed: list[str] = []

    def rename(index: Any) -> None:
        def named(key: str) -> str:
            is_sparse = key.endswith(fused) and any(
                name.startswith(key.removesuffix(fused) + "mlp.router") for name in names
            )
            if is_sparse:
                renamed.append(key)
            return key.removesuffix(fused) + "pre_mlp_layernorm.weight" if is_sparse else key

        fused, names = "mlp.linear_fc1.layer_norm_weight", list(index.state_dict_metadata)
        index.state_dict_metadata = {named(key): entry for key, entry in index.state_dict_metadata.items()}
        index.storage_data = {replace(at, fqn=named(at.fqn)): info for at, info in index.storage_data.items()}

    edit_index(rename)(there)
    assert renamed
    assert tool.main(["megatron-to-hf", "--checkpoint", str(there / "megatron"), *model, "--out", str(back)]) == 0
    assert same(weights(back), weights(tmp_path / "model"))


def test_without_the_kernels_copy_the_bytes_are_the_same(
    tool: ModuleType, models: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    command = ["hf-to-megatron", "--model", str(models / "qwen2"), "--tp", "2"]
    copied: list[int] = []
    copy = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda *a: copied.append(copy(*a)) or copied[-1])
    assert tool.main([*command, "--out", str(tmp_path / "kernel")]) == 0 and copied

    def refuse(*_: Any) -> int:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert tool.main([*command, "--out", str(tmp_path / "plain")]) == 0
    assert contents(tmp_path / "kernel") == contents(tmp_path / "plain")


def test_dtype_casts_every_tensor_once(tool: ModuleType, models: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    cast = ("--dtype", "bfloat16", "--verify", "--no-logits")
    assert tool.main(["hf-to-megatron", "--model", str(models / "qwen2"), "--out", str(there), *cast]) == 0
    assert tool.main(["megatron-to-hf", "--checkpoint", str(there), "--out", str(back)]) == 0
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in weights(models / "qwen2").items()}
    assert same(weights(back), expected)
    config = json.loads((back / "config.json").read_text())
    assert {config[key] for key in ("dtype", "torch_dtype") if key in config} == {"bfloat16"}


def test_verify_sees_one_wrong_bit(tool: ModuleType, models: Path, tmp_path: Path, monkeypatch: Any) -> None:
    copy = tool.copy_tensors

    def copy_and_spoil(source: Any, target: Any, *rest: Any) -> None:
        copy(source, target, *rest)
        place = target.places["model.layers.2.mlp.up_proj.weight"][1]
        with (target.root / place.file).open("r+b") as file:
            file.seek(place.offset + 100)
            byte = file.read(1)
            file.seek(place.offset + 100)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(tool, "copy_tensors", copy_and_spoil)
    command = ["hf-to-megatron", "--model", str(models / "qwen2"), "--out", str(tmp_path / "out"), "--tp", "2"]
    with pytest.raises(RuntimeError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is not what the source holds"):
        tool.main([*command, "--verify", "--no-logits"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", families.CONTRACT.own)
def test_chunks_cover_every_global_tensor_once(family: str, models: Path, tmp_path: Path) -> None:
    families.make(family).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = [families.ARCHITECTURES[families.CONTRACT.family(family)]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(tmp_path)
    for tp, pp, vpp, ep, etp in LAYOUTS:
        layout = smallest_layout(tp, pp, vpp, ep if shape.mixture else 1, etp if shape.mixture else None)
        sizes = global_shapes(shape, global_slices(shape), padded_vocab_size(shape.vocab_size, tp))
        chunks = layout_chunks(shape, layout)
        for key, size in sizes.items():
            boxes = [chunk.box for chunk in chunks if chunk.key == key]
            assert sum(map(num_elements, boxes)) == num_elements(tuple((0, n) for n in size)), (key, layout)
            assert not any(intersect(a, b) for i, a in enumerate(boxes) for b in boxes[:i]), (key, layout)
        assert {chunk.rank for chunk in chunks} <= set(range(layout.world_size))


# --- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_killed_conversion_is_continued(tool: ModuleType, models: Path, tmp_path: Path, direction: str) -> None:
    """The result is the uninterrupted one byte for byte, and until then nothing has its name."""
    if direction == "hf-to-megatron":
        command = [direction, "--model", str(models / "qwen2"), "--tp", "2"]
    else:
        assert (
            tool.main(["hf-to-megatron", "--model", str(models / "qwen2"), "--out", str(tmp_path / "checkpoint")]) == 0
        )
        command = [direction, "--checkpoint", str(tmp_path / "checkpoint")]
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert tool.main([*command, "--out", str(whole)]) == 0
    killed = run((sys.executable, "-c", KILLED, *command, "--out", str(out)))
    assert killed.returncode == -signal.SIGKILL and not out.exists()
    num_done = json.loads((unfinished(out) / assembly.JOB).read_text())["num_done"]
    assert 0 < num_done < 50  # tensors of the model, each one block
    before = contents(unfinished(out))
    assert any(before[name] != content for name, content in contents(whole).items() if name in before)
    other = [*command, "--out", str(out), "--dtype", "bfloat16"]
    assert tool.main(other) == 2 and contents(unfinished(out)) == before, "another job does not touch it"
    assert tool.main([*command, "--out", str(out)]) == 0
    assert contents(out) == contents(whole) and not unfinished(out).exists()


def test_finished_blocks_are_not_written_again(
    tool: ModuleType, models: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    command = ["hf-to-megatron", "--model", str(models / "qwen2"), "--out", str(tmp_path / "out")]
    publish = assembly.Assembly.publish
    monkeypatch.setattr(assembly.Assembly, "publish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tool.main(command)
    monkeypatch.setattr(assembly.Assembly, "publish", publish)
    written: list[int] = []
    for name in ("pwrite", "copy_file_range"):
        monkeypatch.setattr(os, name, lambda *arguments: written.append(1))
    assert tool.main(command) == 0 and not written


def test_two_conversions_to_one_output(
    tool: ModuleType, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with assembly.Assembly(tmp_path / "out", {}, {}):
        assert tool.main(["hf-to-megatron", "--model", str(models / "qwen2"), "--out", str(tmp_path / "out")]) == 2
    assert "another process is writing it" in capsys.readouterr().err


# --- the disk --------------------------------------------------------------------------------------------------------


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writes beyond that size fail, as on a full disk; the process ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_grow(
    tool: ModuleType, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, command = (
        contents(models),
        ["hf-to-megatron", "--model", str(models / "qwen2"), "--out", str(tmp_path / "out")],
    )
    with largest_file(50_000):
        assert tool.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'out'}: cannot write (File too large); free the disk")
    assert contents(models) == source and not (tmp_path / "out").exists()
    assert tool.main(command) == 0


def test_a_disk_that_fills_up_on_the_way(
    tool: ModuleType, models: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, nothing under the final name, and the same command goes on once there is room."""
    command = ["hf-to-megatron", "--model", str(models / "qwen2")]
    source = contents(models)
    assert tool.main([*command, "--out", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    calls = iter(range(10**9))

    def until_full(write: Callable[..., int]) -> Callable[..., int]:
        def written(*arguments: Any) -> int:
            if next(calls) > 40:
                raise OSError(28, "No space left on device")
            return write(*arguments)

        return written

    with monkeypatch.context() as patch:
        for name in ("pwrite", "copy_file_range"):
            patch.setattr(os, name, until_full(getattr(os, name)))
        assert tool.main([*command, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write (No space left on device); free the disk and run the same command to continue" in line
    assert not (tmp_path / "out").exists() and contents(models) == source
    assert tool.main([*command, "--out", str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# --- bad input -------------------------------------------------------------------------------------------------------

Change = Callable[[Path], None]
LAYER = "model.layers.1.mlp.up_proj.weight"


def edit(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def apply(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def cut(name: str) -> Change:
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size - 100)


def family(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (cut("model.safetensors"), (), ("model.safetensors is truncated",)),
        (edit(lambda t: t.pop(LAYER)), (), ("missing tensors", LAYER)),
        (edit(lambda t: t.update({"model.layers.9.x": torch.ones(2)})), (), ("unexpected tensors", "model.layers.9.x")),
        (edit(lambda t: t.update({LAYER: t[LAYER].int()})), (), ("model.safetensors", LAYER, "is I32")),
        (edit(lambda t: t.update({LAYER: t[LAYER][1:]})), (), ("model.safetensors", LAYER, "has shape [47, 32]")),
        (edit(lambda t: t.update({LAYER: t[LAYER].half()})), (), (LAYER, "torch.float16", "--dtype")),
        (family, (), ("config.json (of --model)", "GPT2LMHeadModel", "choose a model of")),
        (None, ("--tp", "8"), ("--tp", "parallel.tensor is 8", "does not divide the model's num_key_value_heads")),
        (None, ("--ep", "2"), ("no experts",)),
        (None, ("--pp", "3"), ("does not divide the model's num_hidden_layers", "a divisor of 4")),
    ],
)  # fmt: skip
def test_bad_models(
    tool: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Change | None,
    options: tuple[str, ...],
    said: tuple[str, ...],
) -> None:
    families.make("qwen3").save_pretrained(tmp_path / "model")
    if change is not None:
        change(tmp_path / "model")
    refused(tool, capsys, tmp_path, ["hf-to-megatron", "--model", str(tmp_path / "model"), *options], said)


def edit_index(change: Callable[[Any], Any]) -> Change:
    def apply(directory: Path) -> None:
        path = directory / "megatron" / ".metadata"
        index = pickle.loads(path.read_bytes())
        change(index)
        path.write_bytes(pickle.dumps(index))
        (directory / "manifest.json").unlink()  # as a checkpoint of Megatron itself, which has none

    return apply


def without_manifest(change: Change) -> Change:
    def apply(directory: Path) -> None:
        change(directory)
        (directory / "manifest.json").unlink()

    return apply


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("run by an index",)


FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut("megatron/__1_0.distcp"), ("is not whole", "megatron/__1_0.distcp")),
        (without_manifest(cut("megatron/__1_0.distcp")), ("__1_0.distcp", "is truncated", "embedding.")),
        (without_manifest(lambda d: (d / "megatron/__1_0.distcp").unlink()), ("__1_0.distcp is missing", "embedding.")),
        (without_manifest(cut("megatron/.metadata")), (".metadata is truncated",)),
        (edit_index(lambda i: i.state_dict_metadata.pop(FC1)), (".metadata", f"tensor {FC1} is missing")),
        (edit_index(lambda i: i.state_dict_metadata.update({"decoder.x": i.state_dict_metadata[FC1]})),
         (".metadata", "unexpected tensor decoder.x")),
        (edit_index(lambda i: setattr(i.state_dict_metadata[FC1], "size", torch.Size([4, 90, 32]))),
         (".metadata", FC1, "has shape [4, 90, 32]")),
        (edit_index(lambda i: setattr(i.state_dict_metadata[FC1].properties, "dtype", torch.int8)),
         (".metadata", FC1, "is torch.int8")),
        (edit_index(lambda i: i.state_dict_metadata[FC1].chunks.pop()), (".metadata", FC1, "do not cover it")),
        (edit_index(lambda i: setattr(i, "storage_meta", Harmful())), (".metadata", "names builtins.print")),
    ],
)  # fmt: skip
def test_bad_checkpoints(
    tool: ModuleType,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Change,
    said: tuple[str, ...],
) -> None:
    checkpoint = tmp_path / "checkpoint"
    command = ["hf-to-megatron", "--model", str(models / "qwen2"), "--out", str(checkpoint), "--tp", "2"]
    assert tool.main(command) == 0
    change(checkpoint)
    path = checkpoint if (checkpoint / "manifest.json").exists() else checkpoint / "megatron"
    command = ["megatron-to-hf", "--checkpoint", str(path), "--model", str(models / "qwen2")]
    refused(tool, capsys, tmp_path, command, said)


def refused(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], said: tuple[str, ...]
) -> None:
    """One sentence that says so, the source untouched, nothing made."""
    before = contents(tmp_path)
    capsys.readouterr()
    assert tool.main([*command, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and all(part in line for part in said), line
    assert printed.out == "" and contents(tmp_path) == before


def test_an_output_that_exists(tool: ModuleType, models: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    refused(tool, capsys, tmp_path, ["hf-to-megatron", "--model", str(models / "qwen2")], ("exists; choose another",))


def test_a_checkpoint_of_another_model(tool: ModuleType, models: Path, tmp_path: Path, capsys: Any) -> None:
    checkpoint = tmp_path / "checkpoint"
    assert tool.main(["hf-to-megatron", "--model", str(models / "qwen2"), "--out", str(checkpoint)]) == 0
    command = ["megatron-to-hf", "--checkpoint", str(checkpoint), "--model", str(models / "mixed")]
    refused(tool, capsys, tmp_path, command, ("is of another model: family is 'qwen2' there",))
    refused(tool, capsys, tmp_path, ["reshard", "--checkpoint", str(tmp_path)], ("has neither manifest.json nor",))
