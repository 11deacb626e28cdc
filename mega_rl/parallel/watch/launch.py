"""``python -m mega_rl.parallel.watch.launch [torchrun's options] SCRIPT ARGUMENTS``: a script on all visible devices.

Without ``--nproc-per-node`` there is one process per device of this host that can be seen, and on a CPU one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from mega_rl import platform
from mega_rl.config.reading.yaml_text import parse_yaml
from mega_rl.errors import InputError, shown

PER_NODE = "--nproc-per-node"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; one process takes the place of this one, and then it does not return."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(PER_NODE, metavar="N")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = next((place for place, argument in enumerate(given) if not argument.startswith("--")), len(given))
    options, launch = parser.parse_known_args(given[:own] + ["--", *given[own:]])
    if options.nproc_per_node is not None and not options.nproc_per_node.isdecimal():
        raise InputError(f"{PER_NODE} is {shown(options.nproc_per_node)}: give a number of processes")
    if options.nproc_per_node is None:
        number = platform.count_devices(platform_name(options.arguments))
    else:
        number = int(options.nproc_per_node)
    if number == 1 and not launch:
        os.execv(sys.executable, [sys.executable, options.script, *options.arguments])
    is_one_node = not any(option.startswith(("--nnodes", "--rdzv")) for option in launch)
    launch += ["--standalone"] if is_one_node else []
    # without the two dashes torchrun would take the script's options for abbreviations of its own
    return torchrun([*launch, f"{PER_NODE}={number}", "--", options.script, *options.arguments])


def platform_name(arguments: Sequence[str]) -> str:
    """``platform.name`` as the script will find it: on its command line, else in its last ``--config``, else auto."""
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("platform.name=")]
    if given:
        return given[-1]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, action="append", default=[])
    names = [_platform_in(file) for file in parser.parse_known_args(arguments)[0].config]
    return next((name for name in reversed(names) if name is not None), "auto")


def _platform_in(file: Path) -> str | None:
    try:
        name = parse_yaml(file.read_text(encoding="utf-8"))["platform"]["name"]
    except (OSError, ValueError, LookupError, TypeError):  # the script says what is wrong with the file
        return None
    return name if isinstance(name, str) else None


def torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun in this process; it passes signals on to the ranks.

    Returns:
        The exit status of the rank that failed first, which torchrun by itself turns into 1; after a signal to this
        process 128 + its number, as shells have it.
    """
    try:
        run.run(run.parse_args(list(arguments)))
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
