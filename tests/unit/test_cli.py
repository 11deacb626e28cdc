"""``mega-rl``: which command runs what, in how many processes, and what becomes of signals and exit status."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from mega_rl import cli, platform
from mega_rl.errors import InputError
from mega_rl.parallel.watch import launch
from tests.launching.launch import REPO, run, started

TRAIN, EVAL = (str(REPO / "tools" / name) for name in ("train.py", "eval.py"))
LAUNCH = ["-m", "mega_rl.parallel.watch.launch"]


def test_every_command_has_its_tool() -> None:
    of_maintainers = {"neighbour_defaults.py", "recipes.py", "reference.py"}
    scripts = sorted(path.name for path in (REPO / "tools").glob("*.py") if path.name not in of_maintainers)
    assert sorted(tool.script for tool in cli.TOOLS.values()) == scripts
    assert all(name in cli.usage() and tool.about in cli.usage() for name, tool in cli.TOOLS.items())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("convert --help", [str(REPO / "tools" / "convert.py"), "--help"]),
        ("train --config f a.b=1", [*LAUNCH, TRAIN, "--config", "f", "a.b=1"]),
        ("train --config f --nproc-per-node 4", [*LAUNCH, "--nproc-per-node=4", TRAIN, "--config", "f"]),
        (
            "train --nnodes 2 --rdzv-endpoint h:1 --config f",
            [*LAUNCH, "--nnodes=2", "--rdzv-endpoint=h:1", TRAIN, "--config", "f"],
        ),
        ("train --nproc_per_node=1 --config f", [TRAIN, "--config", "f"]),
        ("train --dry-run --config f", [TRAIN, "--dry-run", "--config", "f"]),
        ("train -h", [TRAIN, "-h"]),
        ("eval m --out o", [*LAUNCH, EVAL, "m", "--out", "o"]),
        (
            "eval m --engines 4 --tensor-parallel 2",
            [*LAUNCH, "--nproc-per-node=8", EVAL, "m", "--engines", "4", "--tensor-parallel", "2"],
        ),
        ("eval m --tensor-parallel 2", [*LAUNCH, "--nproc-per-node=2", EVAL, "m", "--tensor-parallel", "2"]),
        ("eval m --engines 1", [EVAL, "m", "--engines", "1"]),
        ("eval m --placement separate --engines 3", [EVAL, "m", "--placement", "separate", "--engines", "3"]),
        ("eval --compare a b", [EVAL, "--compare", "a", "b"]),
    ],
)
def test_what_runs(arguments: str, expected: list[str]) -> None:
    name, *rest = arguments.split()
    assert cli.command(name, rest, {}) == expected


def test_inside_of_a_launcher_nothing_is_launched() -> None:
    assert cli.command("train", ["--config", "f"], {"WORLD_SIZE": "2"}) == [TRAIN, "--config", "f"]


def test_an_installed_wheel_has_its_tools_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "PACKAGE", tmp_path / "mega_rl")
    assert cli.script(cli.TOOLS["eval"]) == tmp_path / "mega_rl" / "tools" / "eval.py"
    setup = (REPO / "setup.py").read_text()
    assert 'package_dir={"mega_rl.tools": "tools"}' in setup and "mega-rl = mega_rl.cli:main" in setup


def test_commands_without_or_with_a_wrong_name() -> None:
    result = run([sys.executable, "-m", "mega_rl.cli", "trian"])
    assert result.returncode == 2 and "error: mega-rl has no command 'trian': choose from train, eval" in result.stdout
    assert run([sys.executable, "-m", "mega_rl.cli"]).returncode == 2


def test_a_tools_exit_status_is_passed_on() -> None:
    result = run([sys.executable, "-m", "mega_rl.cli", "compare", "/nowhere", "/nowhere"])
    assert result.returncode == 2 and "error: /nowhere does not exist" in result.stdout


def test_the_platform_is_that_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("platform: {name: npu}\n")
    assert launch.platform_name(["--config", str(file)]) == "npu"
    assert launch.platform_name(["--config", str(file), "platform.name=cpu"]) == "cpu"
    (other := tmp_path / "other.yaml").write_text("platform: {name: cuda}\n")
    (silent := tmp_path / "silent.yaml").write_text("rollout: {n: 2}\n")
    files = [word for path in (file, other, silent) for word in ("--config", str(path))]
    assert launch.platform_name(files) == "cuda"  # the last file that names one
    assert launch.platform_name(["--config", str(silent)]) == "auto"
    file.write_text("platform: [")
    assert launch.platform_name(["--config", str(file)]) == launch.platform_name([]) == "auto"


def test_one_process_on_a_cpu_and_one_per_device_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform.VARIABLE, raising=False)
    assert platform.count_devices("cpu") == 1
    for known in platform.PLATFORMS.values():
        monkeypatch.setattr(known, "absence", lambda: None)
    monkeypatch.setattr(platform.PLATFORMS["npu"], "absence", lambda: "is not there")
    monkeypatch.setattr(platform.PLATFORMS["cuda"], "num_devices", lambda: 6)
    assert platform.count_devices() == 6
    monkeypatch.setenv(platform.VARIABLE, "cpu")
    assert platform.count_devices() == 1
    with pytest.raises(InputError, match="platform.name is 'gpu'"):
        platform.count_devices("gpu")


def test_one_process_takes_the_place_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: executed.append(arguments))
    monkeypatch.setattr(launch, "torchrun", lambda arguments: executed.append(arguments) or 0)
    launch.main(["script.py", "platform.name=cpu", "--x", "1"])
    assert executed[0] == [sys.executable, "script.py", "platform.name=cpu", "--x", "1"]
    executed.clear()
    launch.main(["--nproc-per-node=2", "script.py", "--x"])
    launch.main(["--nnodes=2", "--rdzv-endpoint=h:1", "--nproc-per-node=8", "script.py"])
    assert executed == [
        ["--standalone", "--nproc-per-node=2", "--", "script.py", "--x"],
        ["--nnodes=2", "--rdzv-endpoint=h:1", "--nproc-per-node=8", "--", "script.py"],
    ]
    with pytest.raises(InputError, match="--nproc-per-node is 'x': give a number"):
        launch.main(["--nproc-per-node=x", "script.py"])


RANK = """
import os, sys, time
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n", end="", flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.slow
def test_ranks_pass_their_exit_status_and_get_the_signals(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = (sys.executable, "-m", "mega_rl.parallel.watch.launch", "--nproc-per-node=2", str(script))
    failed = run([*command, "2", "--n", "x"])
    assert failed.returncode == 2 and "rank 1 of 2 ['2', '--n', 'x']" in failed.stdout
    with started([*command, "wait"]) as running:
        running.wait_for("rank 0 of 2", 120)
        running.wait_for("rank 1 of 2", 120)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(60) == 128 + signal.SIGTERM
