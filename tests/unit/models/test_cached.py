"""Ids of models are looked up in the local caches, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.config import load_config
from mega_rl.errors import InputError
from mega_rl.models.cached import local_directory
from mega_rl.models.files import read_config


def made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_the_caches_of_both_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, scope = tmp_path / "hub", tmp_path / "scope"
    environment = {"HF_HUB_CACHE": str(hub), "MODELSCOPE_CACHE": str(scope)}
    first, second = (made(hub / "models--org--a" / "snapshots" / name) for name in ("1", "2"))
    assert local_directory("org/a", environment) in (str(first), str(second))
    (hub / "models--org--a" / "refs").mkdir()
    (hub / "models--org--a" / "refs" / "main").write_text("1\n")
    assert local_directory("org/a", environment) == str(first)
    other = made(scope / "hub" / "models" / "org" / "b-1___5")
    assert local_directory("org/b-1.5", environment) == str(other)
    for name in ("org/absent", "../a", "a", str(first), "org/a/b"):
        assert local_directory(name, environment) == name
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: org/a}\n")
    assert load_config(file).model.path == str(first)


def test_what_is_nowhere_is_told_with_both_commands() -> None:
    with pytest.raises(InputError, match=r"does not exist: give a .*hf download ID.*modelscope download --model ID"):
        read_config("org/absent")
