"""A user's code by its name: where it may stand, and the sentence for each thing that can be wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from mega_rl.errors import InputError
from mega_rl.own_code import MOVED, is_own, load, name_problem


def test_files_of_one_name_do_not_meet_and_each_is_imported_once(tmp_path: Path) -> None:
    files = [tmp_path / folder / "json.py" for folder in ("one", "other")]
    for file in files:
        file.parent.mkdir()
        file.write_text(
            f"count = 0\ndef where():\n    global count\n    count += 1\n    return {file.parent.name!r}, count\n"
        )
    one, other = (load(f"{file}:where", "key") for file in files)
    assert (one(), one(), other()) == (("one", 1), ("one", 2), ("other", 1))
    assert load(f"{files[0]}:where", "key")() == ("one", 3)
    assert sys.modules[one.__module__].where is one


def test_a_module_of_the_path() -> None:
    assert load("pathlib:Path", "key", "class") is Path


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere.py:f", "key: 'nowhere.py:f' names nowhere.py, which is no file; correct the path"),
        ("no_such_package:f", r"key: 'no_such_package:f' cannot be imported \(ModuleNotFoundError"),
        ("pathlib:Pth", r"key: pathlib has no function 'Pth' \(did you mean Path\?\); correct the name"),
        ("math:pi", "key: math has no function 'pi'"),
    ],
)
def test_what_cannot_be_loaded_is_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load(name, "key")


def test_a_module_that_has_moved_is_named_with_its_new_place(tmp_path: Path) -> None:
    sentence = r"cannot be imported \(mega_rl.rewards.math is now mega_rl.rewards.functions.math\)"
    with pytest.raises(InputError, match=f"key: 'mega_rl.rewards.math:gsm8k' {sentence}; correct the name"):
        load("mega_rl.rewards.math:gsm8k", "key")
    file = tmp_path / "of_before.py"
    file.write_text("from mega_rl.rewards.math import gsm8k\n")
    with pytest.raises(InputError, match=rf"key: {file} {sentence}; fix that file"):
        load(f"{file}:gsm8k", "key")


@pytest.mark.parametrize(("old", "now"), MOVED.items())
def test_modules_that_have_moved(old: str, now: str) -> None:
    assert importlib.util.find_spec(old) is None and importlib.util.find_spec(now) is not None


def test_a_file_that_fails_is_imported_again_when_it_is_mended(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise SystemExit(3)\n")
    with pytest.raises(InputError, match=r"broken.py cannot be imported \(SystemExit: 3\); fix that file"):
        load(f"{file}:f", "key")
    file.write_text("def f(): return 'mended'\n")
    assert load(f"{file}:f", "key")() == "mended"


def test_problems_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.touch()
    assert is_own("a.b:c") and not is_own("grpo")
    assert name_problem("a.b:c") is None and name_problem(f"{file}:c") is None
    assert (
        name_problem("a.b:c d") == name_problem(":c") == ": write package.module:function or path/to/file.py:function"
    )
    assert name_problem("gone.py:c", "Class") == ", but gone.py is not a file: give an existing Python file"
