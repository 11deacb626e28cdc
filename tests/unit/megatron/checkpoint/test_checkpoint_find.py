"""Which checkpoint a run resumes from: whole ones only, the newest first, and a sentence for each passed over."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mega_rl.bridge.files.torch_dist import manifest as checkpoint_files
from mega_rl.bridge.files.torch_dist.manifest import MANIFEST, PROGRESS, WEIGHTS
from mega_rl.errors import InputError
from mega_rl.megatron.checkpoint.checkpoint import all_checkpoints, damage, directory_of, find, set_aside

SHARD = f"{WEIGHTS}/__0_0.distcp"
INDEX = f"{WEIGHTS}/.metadata"


def write(root: Path, step: int) -> Path:
    """A directory as ``save`` leaves it, with other content."""
    directory = directory_of(root, step)
    contents = {SHARD: b"0123456789", PROGRESS: json.dumps({"step": step}).encode(), INDEX: index("__0_0.distcp")}
    for name, content in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    write_manifest(directory, *contents)
    return directory


def index(*shards: str) -> bytes:
    """An index of tensors of which each shard holds one."""
    places = {MetadataIndex(shard): _StorageInfo(shard, 0, 10) for shard in shards}
    return pickle.dumps(Metadata({}, None, places))


def write_manifest(directory: Path, *names: str) -> None:
    files = checkpoint_files.written(directory, [directory / name for name in names])
    (directory / MANIFEST).write_text(checkpoint_files.manifest(files))


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGES = {
    "truncated_file": (lambda d: truncate(d / SHARD, 4), f"file {SHARD} has 4 bytes instead of 10"),
    "empty_file": (lambda d: truncate(d / SHARD, 0), f"file {SHARD} has 0 bytes instead of 10"),
    "longer_file": (lambda d: (d / SHARD).write_bytes(b"0" * 11), f"file {SHARD} has 11 bytes instead of 10"),
    "other_content": (lambda d: (d / SHARD).write_bytes(b"0123456780"), f"file {SHARD} is not what was written"),
    "missing_file": (lambda d: (d / PROGRESS).unlink(), f"file {PROGRESS} is missing"),
    "missing_manifest": (lambda d: (d / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "truncated_manifest": (lambda d: truncate(d / MANIFEST, 12), f"{MANIFEST} is not readable"),
    "empty_manifest": (lambda d: truncate(d / MANIFEST, 0), f"{MANIFEST} is not readable"),
    "zeroed_manifest": (lambda d: (d / MANIFEST).write_bytes(bytes(50)), f"{MANIFEST} is not readable"),
    "manifest_of_nothing": (lambda d: (d / MANIFEST).write_text("{}"), f"{MANIFEST} is not readable"),
    "manifest_of_a_list": (lambda d: (d / MANIFEST).write_text("[]"), f"{MANIFEST} is not readable"),
    "manifest_of_no_file": (
        lambda d: (d / MANIFEST).write_text(json.dumps({"version": 2, "files": {}})),
        f"file {PROGRESS} is not in {MANIFEST}",
    ),
    "unlisted_file": (
        lambda d: (d / WEIGHTS / "__1_0.distcp").write_bytes(b""),
        f"file {WEIGHTS}/__1_0.distcp is not in {MANIFEST}",
    ),
    "manifest_nested_without_end": (lambda d: (d / MANIFEST).write_text("[" * 100_000), f"{MANIFEST} is not readable"),
    "manifest_without_digests": (
        lambda d: (d / MANIFEST).write_text(json.dumps({"files": {SHARD: 10}})),
        f"{MANIFEST} is not readable",
    ),
}


@pytest.mark.parametrize("is_of_before", [False, True])
def test_a_shard_that_was_never_there_is_missed(tmp_path: Path, is_of_before: bool) -> None:
    """As when ranks wrote on disks of their own and one of them listed what it saw: the index knows of the others."""
    directory = write(tmp_path, 1)
    (directory / INDEX).write_bytes(index("__0_0.distcp", "__1_0.distcp"))
    write_manifest(directory, SHARD, PROGRESS, INDEX)
    if is_of_before:
        content = json.loads((directory / MANIFEST).read_text())
        del content["version"]
        (directory / MANIFEST).write_text(json.dumps(content))
    absent = f"{WEIGHTS}/__1_0.distcp"
    assert damage(directory) == f"file {absent} is missing: {INDEX} names it, and {MANIFEST} does not"


def test_newest_is_found(tmp_path: Path) -> None:
    for step in (2, 10, 9, 100):
        write(tmp_path, step)
    assert find(tmp_path, "auto") == (directory_of(tmp_path, 100), [])
    assert all_checkpoints(tmp_path) == [directory_of(tmp_path, step) for step in (100, 10, 9, 2)]


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert find(tmp_path / "absent", "auto") == (None, [])
    assert find(tmp_path, "auto") == (None, [])
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_00000003").write_text("a file of that name is no checkpoint")
    assert find(tmp_path, "auto") == (None, [])


def test_never_looks_at_nothing(tmp_path: Path) -> None:
    truncate(write(tmp_path, 1) / SHARD, 1)
    assert find(tmp_path, "never") == (None, [])


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_an_older_one_chosen(tmp_path: Path, name: str) -> None:
    older, newest = write(tmp_path, 3), write(tmp_path, 4)
    assert damage(newest) is None
    apply, sentence = DAMAGES[name]
    apply(newest)
    assert damage(newest) == sentence
    assert find(tmp_path, "auto") == (older, [f"passing over damaged checkpoint {newest}: {sentence}"])
    with pytest.raises(InputError, match="checkpoint.resume=") as refused:
        find(tmp_path, str(newest))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_every_damaged_one_gets_a_sentence(tmp_path: Path) -> None:
    directories = [write(tmp_path, step) for step in (1, 2, 3)]
    for directory in directories[1:]:
        truncate(directory / SHARD, 1)
    found, sentences = find(tmp_path, "auto")
    assert found == directories[0]
    assert len(sentences) == 2 and "step_00000003" in sentences[0] and "step_00000002" in sentences[1]


def test_no_whole_one_is_an_error(tmp_path: Path) -> None:
    for step in (1, 2):
        truncate(write(tmp_path, step) / SHARD, 1)
    with pytest.raises(InputError, match=r"no checkpoint under .* is whole .*checkpoint\.resume=never") as refused:
        find(tmp_path, "auto")
    assert str(directory_of(tmp_path, 2)) in str(refused.value)


def test_half_written_directory_is_ignored(tmp_path: Path) -> None:
    """Whether its manifest is there already or not."""
    older = write(tmp_path, 1)
    for step, has_manifest in ((2, False), (3, True)):
        hidden = write(tmp_path, step).rename(tmp_path / f".step_{step:08d}.incomplete")
        if not has_manifest:
            (hidden / MANIFEST).unlink()
    assert find(tmp_path, "auto") == (older, [])
    older.rename(tmp_path.parent / "elsewhere")
    assert find(tmp_path, "auto") == (None, [])


def test_named_checkpoint(tmp_path: Path) -> None:
    """It is taken as named: not the newest, and from any place."""
    write(tmp_path / "run", 5)
    named = write(tmp_path / "other", 2)
    assert find(tmp_path / "run", str(named)) == (named, [])
    for path in (tmp_path / "absent", named / MANIFEST):
        with pytest.raises(InputError, match="there is no such directory"):
            find(tmp_path / "run", str(path))


END = checkpoint_files.END_BYTES


@pytest.mark.parametrize("position", [0, END - 1, END, 3 * END // 2, 2 * END - 1, -END, -1])
def test_every_byte_of_a_large_file_is_checked(tmp_path: Path, position: int) -> None:
    directory = write(tmp_path, 1)
    content = bytearray(3 * END)
    (directory / SHARD).write_bytes(content)
    write_manifest(directory, SHARD, PROGRESS, INDEX)
    assert damage(directory) is None
    content[position] = 1
    (directory / SHARD).write_bytes(content)
    assert damage(directory) == f"file {SHARD} is not what was written"


def test_a_manifest_of_before_is_taken_by_the_ends_of_files(tmp_path: Path) -> None:
    """It has no version, and digests of the first and the last MiB of each file."""
    directory = write(tmp_path, 1)
    content = bytearray(3 * END)
    (directory / SHARD).write_bytes(content)
    hashed = hashlib.blake2b(bytes(2 * END), digest_size=16).hexdigest()
    (directory / MANIFEST).write_text(json.dumps({"files": {SHARD: [3 * END, hashed]}}))
    assert damage(directory) is None
    for position in (0, END - 1, -END, -1):
        changed = bytearray(content)
        changed[position] = 1
        (directory / SHARD).write_bytes(changed)
        assert damage(directory) == f"file {SHARD} is not what was written"


def test_a_manifest_of_later_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, 1)
    (directory / MANIFEST).write_text(json.dumps({"version": 4, "files": {}}))
    assert damage(directory) == f"{MANIFEST} is of version 4, and this program reads up to 3"


def test_what_a_run_does_not_continue_is_set_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
    set_aside(tmp_path, after=directory_of(tmp_path, 4))
    assert find(tmp_path, "auto") == (directory_of(tmp_path, 4), [])
    assert [p.name for p in (tmp_path / "superseded_1").iterdir()] == ["step_00000006"]
    set_aside(tmp_path, after=directory_of(tmp_path, 4))
    set_aside(tmp_path, after=None)
    assert find(tmp_path, "auto") == (None, [])
    assert sorted(p.name for p in (tmp_path / "superseded_2").iterdir()) == ["step_00000002", "step_00000004"]
    assert damage(tmp_path / "superseded_2" / "step_00000004") is None, "it can still be resumed by name"


def test_nothing_is_set_aside_for_the_newest_or_a_checkpoint_of_elsewhere(tmp_path: Path) -> None:
    for step in (2, 4):
        write(tmp_path / "run", step)
    set_aside(tmp_path / "absent", after=None)
    set_aside(tmp_path / "run", after=directory_of(tmp_path / "run", 4))
    set_aside(tmp_path / "run", after=write(tmp_path / "other", 9))
    assert all_checkpoints(tmp_path / "run") == [directory_of(tmp_path / "run", step) for step in (4, 2)]
