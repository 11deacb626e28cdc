"""Whatever is done to a checkpoint, it is read or refused in a sentence, soon, and what is read is what was written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from mega_rl.bridge.files.torch_dist.manifest import MANIFEST, PROGRESS, WEIGHTS, damage, digest
from mega_rl.bridge.files.torch_dist.progress import KEYS, OPTIONAL, read_progress
from mega_rl.bridge.files.torch_dist.torch_dist import INDEX
from mega_rl.errors import InputError
from mega_rl.megatron.checkpoint.checkpoint import GENERATORS, find, read_state
from tests.fuzzing import TEXTS, VALUES, accepted_or_sentence, cases

TENSOR = torch.arange(12.0).reshape(3, 4)
GOOD = {
    "step": 3,
    "model": {"family": "qwen2"},
    "world_size": 1,
    "expert_parallel": 1,
    "skipped_steps": {"total": 0, "in_a_row": 0},
    "data": {"epoch": 0, "position": 2},
    "validations": {"first": {"acc": 0.5}},
    "metrics": {"loss": 1.0},
}
FILES = [MANIFEST, PROGRESS, GENERATORS, f"{WEIGHTS}/{INDEX}", f"{WEIGHTS}/__0_0.distcp", f"{WEIGHTS}/common.pt"]
FILES += [f"{WEIGHTS}/metadata.json"]
NAMES = st.sampled_from(FILES)
ODD_FILES = ["gone", "directory", "pipe", "loop", "empty", "zeros", "terminal", "elsewhere"]


def state_of(tensor: torch.Tensor, value: object) -> dict[str, Any]:
    return {
        "tensor": ShardedTensor.from_rank_offsets("tensor", tensor),
        "object": ShardedObject("object", value, (1,), (0,)),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint, in a process group of its own."""
    directory = tmp_path_factory.mktemp("whole") / "step_00000003"
    (directory / WEIGHTS).mkdir(parents=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist_checkpointing.save(state_of(TENSOR, {"plain": 1}), str(directory / WEIGHTS))
        torch.save([{"torch": torch.get_rng_state()}], directory / GENERATORS)
        (directory / PROGRESS).write_text(json.dumps(GOOD))
        seal(directory)
        assert resumed(directory)
        yield directory
    finally:
        dist.destroy_process_group()


def seal(directory: Path) -> None:
    """Write the manifest anew: what has changed was meant to."""
    names = [name for name in FILES if name != MANIFEST and (directory / name).is_file()]
    files = {name: (os.path.getsize(directory / name), digest(directory / name)) for name in names}
    (directory / MANIFEST).write_text(json.dumps({"version": 2, "files": files}))


def resumed(directory: Path) -> bool:
    """What a run does with a checkpoint that it was told to resume from, short of filling a model."""
    found, _ = find(directory.parent, str(directory))
    assert found == directory
    progress = read_progress(directory, needed=None)
    loaded, states = read_state(directory, state_of(torch.zeros(3, 4), None))
    assert loaded["tensor"].shape == (3, 4) and isinstance(states, list) and isinstance(progress["step"], int)
    return True


def copied(whole: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    return copy


def is_same(directory: Path, whole: Path) -> bool:
    return all((directory / name).read_bytes() == (whole / name).read_bytes() for name in FILES)


@cases(30)
@given(st.data())
def test_bytes_changed(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    """With the old manifest it is refused; with a manifest made anew it is data from somewhere."""
    copy = copied(whole, tmp_path)
    path = copy / data.draw(NAMES)
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content)))
    kind = data.draw(st.sampled_from(["noise", "cut", "more", "gap"]))
    noise = data.draw(st.binary(min_size=1, max_size=16))
    end = {"noise": start + len(noise), "cut": len(content), "more": start, "gap": start + len(noise)}[kind]
    path.write_bytes(content[:start] + (noise if kind in ("noise", "more") else b"") + content[end:])
    if data.draw(st.booleans()):
        seal(copy)
        accepted_or_sentence(lambda: resumed(copy))
    elif accepted_or_sentence(lambda: resumed(copy)):
        same = {name: (copy / name).read_bytes() == (whole / name).read_bytes() for name in FILES if name != MANIFEST}
        assert all(same.values()), f"changed unseen: {same}"


@cases(20)
@given(NAMES, st.sampled_from(ODD_FILES), st.booleans())
def test_a_file_that_is_something_else(whole: Path, tmp_path: Path, name: str, kind: str, is_sealed: bool) -> None:
    """Nothing waits for a pipe or reads a device without end."""
    copy = copied(whole, tmp_path)
    path = copy / name
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    elif kind != "gone":
        targets = {"loop": path.name, "zeros": "/dev/zero", "terminal": "/dev/tty", "elsewhere": "/etc/hostname"}
        path.symlink_to(targets[kind])
    if is_sealed and name != MANIFEST:
        seal(copy)
    answer = accepted_or_sentence(lambda: resumed(copy))
    assert not answer or is_sealed and name == f"{WEIGHTS}/metadata.json", "it was resumed from"


@cases(15)
@given(NAMES, NAMES, st.booleans())
def test_two_files_swapped(whole: Path, tmp_path: Path, one: str, other: str, is_sealed: bool) -> None:
    copy = copied(whole, tmp_path)
    shutil.copy(whole / one, copy / other)
    shutil.copy(whole / other, copy / one)
    if is_sealed:
        seal(copy)
    if accepted_or_sentence(lambda: resumed(copy)) and not is_sealed:
        assert is_same(copy, whole)


@cases(30)
@given(st.data())
def test_values_in_the_manifest(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    copy = copied(whole, tmp_path)
    content: Any = json.loads((copy / MANIFEST).read_text())
    files = content["files"]
    kind = data.draw(st.sampled_from(["row", "name", "size", "digest", "version", "files", "all"]))
    name = data.draw(st.sampled_from(sorted(files)))
    if kind == "row":
        files[name] = data.draw(VALUES)
    elif kind == "name":
        files[data.draw(TEXTS)] = files.pop(name)
    elif kind in ("size", "digest"):
        files[name][("size", "digest").index(kind)] = data.draw(VALUES)
    elif kind == "all":
        content = data.draw(VALUES)
    else:
        content[kind] = data.draw(VALUES)
    (copy / MANIFEST).write_text(json.dumps(content))
    problem = damage(copy)
    assert problem is None or (len(problem) < 1000 and problem.isprintable())
    accepted_or_sentence(lambda: resumed(copy))


@cases(30)
@given(st.dictionaries(st.sampled_from([*KEYS, *OPTIONAL]) | TEXTS, VALUES, max_size=3), VALUES, st.booleans())
def test_values_in_the_progress(
    whole: Path, tmp_path: Path, changes: dict[str, Any], other: Any, is_table: bool
) -> None:
    copy = copied(whole, tmp_path)
    (copy / PROGRESS).write_text(json.dumps(GOOD | changes if is_table else other))
    seal(copy)
    accepted_or_sentence(lambda: resumed(copy))


PLAIN = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from([torch.float32, torch.Size([3, 4]), Path("x")]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@cases(30)
@given(st.data())
def test_values_in_the_index(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Anything that the classes of an index can hold."""
    copy = copied(whole, tmp_path)
    path = copy / WEIGHTS / INDEX
    index: Any = pickle.loads(path.read_bytes())
    places = [index, *index.state_dict_metadata.values(), *index.storage_data.values()]
    places += [part for entry in index.state_dict_metadata.values() for part in getattr(entry, "chunks", [])]
    place = data.draw(st.sampled_from(places))
    name = data.draw(st.sampled_from(sorted(vars(place)) or ["x"]))
    value = data.draw(
        PLAIN | st.sampled_from(["../x", "/dev/zero", "/etc/passwd", -1, 1 << 40, 1 << 70, torch.Size([9])])
    )
    if data.draw(st.booleans()) and vars(place):
        vars(place).pop(name)
    else:
        vars(place)[name] = value
    path.write_bytes(pickle.dumps(index))
    seal(copy)
    accepted_or_sentence(lambda: resumed(copy))


@cases(20)
@given(PLAIN | st.lists(st.dictionaries(st.text(max_size=3), PLAIN, max_size=2), max_size=2))
def test_values_in_the_random_states(whole: Path, tmp_path: Path, value: Any) -> None:
    copy = copied(whole, tmp_path)
    torch.save(value, copy / GENERATORS)
    seal(copy)
    accepted_or_sentence(lambda: resumed(copy))


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hostname", "a/../../x", "a\0b", "x" * 300, "a/" * 3000 + "b", "\ud800", "", "."]
)
def test_a_manifest_names_files_of_its_checkpoint_only(whole: Path, tmp_path: Path, name: str) -> None:
    copy = copied(whole, tmp_path)
    content = json.loads((copy / MANIFEST).read_text())
    content["files"][name] = (0, "")
    (copy / MANIFEST).write_text(json.dumps(content))
    problem = damage(copy)
    assert problem is not None and "which is no file of the checkpoint" in problem and len(problem) < 500


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/b", "..", "\ud800"])
def test_an_index_names_files_beside_it_only(whole: Path, tmp_path: Path, name: str) -> None:
    copy = copied(whole, tmp_path)
    path = copy / WEIGHTS / INDEX
    index = pickle.loads(path.read_bytes())
    next(iter(index.storage_data.values())).relative_path = name
    path.write_bytes(pickle.dumps(index))
    seal(copy)
    with pytest.raises(InputError, match="which is no file beside it"):
        read_state(copy, state_of(torch.zeros(3, 4), None))


def test_the_files_are_all_of_a_checkpoint(whole: Path) -> None:
    assert sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()) == sorted(FILES)
