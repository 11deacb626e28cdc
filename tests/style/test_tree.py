"""What no tracked file may be or hold (paths of one machine, package indexes, grab-bag modules, great length), and
where a unit test stands.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent.parent
MAX_LINES = 424
MAX_FUNCTION_LINES = 60
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.}$/~-])/(work|root|home|opt|mnt|srv|tmp|Users)/\w"),
    "a package index address": re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|file:/{3}"),
    "a marker of a merge": re.compile(r"^(<{7}|>{7}) "),
    "a marker of unfinished work": re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
}
MAX_MODULES = 12
CROWDED = {"tests/npu"}  # one emulation, of which every part names the others
GRAB_BAGS = {"utils", "util", "helpers", "misc", "common"}


def tracked_files() -> list[str]:
    """Everything that is or would be committed, and exists."""
    if not (REPO / ".git").exists():
        pytest.skip("not a git checkout: there is no list of tracked files")
    command = ["git", "-c", f"safe.directory={REPO}", "ls-files", "-co", "--exclude-standard"]
    listing = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    return sorted({path for path in listing.splitlines() if (REPO / path).is_file()})


def content_faults(path: str, text: str) -> list[str]:
    return [
        f"{path}:{number}: {what}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


def name_faults(path: str) -> list[str]:
    words = {Path(part).stem for part in Path(path).parts}
    return [f"{path}: no {word} module: name it after what it does" for word in sorted(words & GRAB_BAGS)]


def length_faults(path: str, text: str) -> list[str]:
    lines = text.count("\n")
    too_long = path.startswith("mega_rl/") and lines > MAX_LINES
    return [f"{path}: {lines} lines, at most {MAX_LINES}"] if too_long else []


def function_faults(path: str, text: str) -> list[str]:
    """Functions of mega_rl that are too long, from ``def`` to the last line."""
    if not path.startswith("mega_rl/") or not path.endswith(".py"):
        return []
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {(node.name, node.lineno): (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    return [
        f"{path}:{line}: {name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        for (name, line), length in lengths.items()
        if length > MAX_FUNCTION_LINES
    ]


def room_faults(path: str, text: str) -> list[str]:
    """A module of ``tests/unit`` stands in the folder of the package and room that it imports, or of ``tools``."""
    room, *inner = Path(path).relative_to("tests/unit").parts
    if not inner:  # of a module that is in no package
        is_module = (REPO / "mega_rl" / room.removeprefix("test_")).is_file()
        return [] if is_module else [f"{path}: every unit test stands in the folder of a package, or in tools"]
    if room == "tools":  # the command lines, and everything else outside of the package
        return []
    tested = "/".join((room, *inner[:-1]))
    if not (REPO / "mega_rl" / tested).is_dir():
        return [f"{path}: mega_rl has no room {tested}"]
    *outer, last = ("mega_rl", *tested.split("/"))
    name = rf"{re.escape('.'.join(outer))}(\.| import (.*\W|\([^)]*\W)?){last}\b"
    imports = re.compile(rf"^(from|import) {name}", re.MULTILINE)
    return [] if imports.search(text) else [f"{path}: imports nothing of mega_rl/{tested}, so it belongs elsewhere"]


def crowd_faults(paths: list[str]) -> list[str]:
    """Folders of tests with so many modules that nobody finds the one he looks for."""
    modules = Counter(str(Path(path).parent) for path in paths if path.startswith("tests/") and path.endswith(".py"))
    return [
        f"{room}: {count} modules, at most {MAX_MODULES}: make rooms in it"
        for room, count in sorted(modules.items())
        if count > MAX_MODULES and room not in CROWDED
    ]


def test_tree_keeps_the_rules() -> None:
    faults = crowd_faults(tracked_files())
    for path in tracked_files():
        faults += name_faults(path)
        try:
            text = (REPO / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image
        faults += content_faults(path, text) + length_faults(path, text) + function_faults(path, text)
        if path.startswith("tests/unit/") and path.endswith(".py"):
            faults += room_faults(path, text)
    assert faults == []


@pytest.mark.parametrize(
    "text",
    [
        "path = '/" + "work/model'",
        "see /" + "tmp/x/y",
        "cd /" + "root/code",
        "--index-url https://" + "pypi" + ".org/simple",
        "file:" + "///wheels",
        "# TO" + "DO later",
        "<" * 7 + " HEAD",
        "a\n" + ">" * 7 + " branch",
    ],
)
def test_forbidden_text_is_found(text: str) -> None:
    assert content_faults("a.py", text)


@pytest.mark.parametrize("text", ["/usr/local/Ascend/env.sh", "tests/tmp/x", "{run}/work/x", "$HOME/work/x", "a/opt/x"])
def test_other_text_is_accepted(text: str) -> None:
    assert content_faults("a.py", text) == []


def test_grab_bag_and_length_are_found() -> None:
    assert name_faults("mega_rl/data/utils.py") and name_faults("mega_rl/utils/a.py")
    assert not name_faults("mega_rl/data/packing.py")
    assert length_faults("mega_rl/a.py", "\n" * (MAX_LINES + 1))
    assert not length_faults("mega_rl/a.py", "\n" * MAX_LINES) and not length_faults("LICENSE", "\n" * 9999)


def test_long_function_is_found() -> None:
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert not function_faults("mega_rl/a.py", f"def f():\n{body}")
    assert function_faults("mega_rl/a.py", f"def f():\n{body}    y = 2\n")
    assert function_faults(
        "mega_rl/a.py", f"class C:\n    async def f(self):\n{body.replace('    ', '        ')}        y = 2\n"
    )
    assert not function_faults("tests/a.py", f"def f():\n{body}    y = 2\n")


def test_a_unit_test_in_the_wrong_room_is_found() -> None:
    text = "from mega_rl.data.packing import pack\n"
    assert not room_faults("tests/unit/data/test_a.py", text) and not room_faults("tests/unit/tools/test_a.py", "")
    assert not room_faults("tests/unit/test_types.py", "")
    assert not room_faults("tests/unit/platform/test_a.py", "from mega_rl import errors, platform\n")
    in_room = "from mega_rl.rollout import (\n    engine,\n    collect,\n)\n"
    assert not room_faults("tests/unit/rollout/collect/test_a.py", in_room)
    assert room_faults("tests/unit/rollout/remote/test_a.py", in_room)
    assert room_faults("tests/unit/data/made/test_a.py", text)
    for path in ("tests/unit/test_a.py", "tests/unit/rollout/test_a.py", "tests/unit/sampling/test_a.py"):
        assert room_faults(path, text), path


def test_a_crowded_folder_is_found() -> None:
    room = [f"tests/unit/data/test_{number}.py" for number in range(MAX_MODULES)]
    assert not crowd_faults([*room, "tests/unit/data/rows/test_a.py", "mega_rl/data/a.py", "tests/unit/data/a.json"])
    assert crowd_faults([*room, "tests/unit/data/test_a.py"])
