"""``mega-rl COMMAND ARGUMENTS``: the tools under one name; ``train`` and ``eval`` are started on all visible devices.

A tool is the same script as ``python tools/NAME.py``, with the same arguments. It takes the place of this process, so
signals and the exit status are its own. Where several processes are wanted and there is no launcher yet, torchrun
starts them (``mega_rl.parallel.watch.launch``); some of its options may stand among the tool's own, such as
``--nproc-per-node 4``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LAUNCHER = "mega_rl.parallel.watch.launch"
LAUNCH_OPTIONS = ("nproc-per-node", "nnodes", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "max-restarts")


@dataclass(frozen=True)
class Tool:
    """One command."""

    script: str  # under tools/
    about: str
    is_parallel: bool = False  # runs in as many processes as there are devices


TOOLS: Mapping[str, Tool] = {
    "train": Tool("train.py", "train as a configuration says", is_parallel=True),
    "eval": Tool("eval.py", "grade a model's answers to data sets; compare two evaluations", is_parallel=True),
    "check": Tool("check_env.py", "check this machine"),
    "plan": Tool("plan.py", "the memory plan of a configuration"),
    "simulate": Tool("simulate.py", "predict step times of synchronous and asynchronous training"),
    "fleet": Tool("fleet.py", "see the engines of a run that goes on, add some, remove some"),
    "compare": Tool("compare.py", "compare the metrics of runs"),
    "report": Tool("report.py", "show runs as one page"),
    "convert": Tool("convert.py", "convert weights"),
    "merge": Tool("merge_lora.py", "add an adapter to its model"),
    "import": Tool("import_config.py", "make a configuration from another trainer's"),
    "prepare": Tool("prepare_data.py", "make data files"),
    "serve": Tool("serve.py", "serve a model to agents, and record what they do"),
    "sandbox-server": Tool("sandbox_server.py", "run untrusted programs for other machines"),
    "tiny-model": Tool("make_tiny_model.py", "make a small model with random weights"),
}


def usage() -> str:
    width = max(map(len, TOOLS))
    lines = [f"  {name:{width}}  {tool.about}" for name, tool in TOOLS.items()]
    return "\n".join(["usage: mega-rl COMMAND ARGUMENTS", "", *lines, "", "mega-rl COMMAND --help says more of one."])


def script(tool: Tool) -> Path:
    """Where the tool lies: beside the package in a clone or an editable installation, inside it in any other."""
    beside = PACKAGE.parent / "tools" / tool.script
    return beside if beside.is_file() else PACKAGE / "tools" / tool.script


def command(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What Python is to run."""
    tool = TOOLS[name]
    plain = [str(script(tool)), *arguments]
    if not tool.is_parallel or "WORLD_SIZE" in environment:
        return plain
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in LAUNCH_OPTIONS:
        parser.add_argument(f"--{option}", f"--{option.replace('-', '_')}", dest=option)
    found, rest = parser.parse_known_args(arguments)
    launch = {option: value for option, value in vars(found).items() if value is not None}
    plain = [str(script(tool)), *rest]
    if not launch and (number := _processes(name, rest)) is not None:
        launch["nproc-per-node"] = str(number)
    if launch == {"nproc-per-node": "1"}:
        return plain
    return ["-m", LAUNCHER, *(f"--{option}={value}" for option, value in launch.items()), *plain]


def _processes(name: str, arguments: Sequence[str]) -> int | None:
    """How many processes the arguments ask for; None: as many as there are devices."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", "--dry-run", dest="is_single", action="store_true")
    if name == "eval":
        parser.add_argument("--engines", type=int)
        parser.add_argument("--tensor-parallel", type=int)
        parser.add_argument("--placement")
        parser.add_argument("--compare", nargs=2)
    try:
        found = vars(parser.parse_known_args(arguments)[0])
    except SystemExit:  # argparse has said which value is no number
        sys.exit(2)
    if found["is_single"] or found.get("compare") or found.get("placement") == "separate":
        return 1
    engines, size = found.get("engines"), found.get("tensor_parallel")
    if engines is None:
        return size if size is not None and size > 1 else None
    return max(1, engines * (1 if size is None else size))


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point; does not return."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0 if given else 2)
    if given[0] not in TOOLS:
        print(f"error: mega-rl has no command {given[0]!r}: choose from {', '.join(TOOLS)}", file=sys.stderr)
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, *command(given[0], given[1:], os.environ)])


if __name__ == "__main__":
    main()
