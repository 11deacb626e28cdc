"""The engines of a run that goes on: ``python tools/fleet.py status|add|remove|timeline RUN ...``.

RUN is the run's trainer.output_dir, seen from any machine; the run has rollout.mode pinned or in_flight. See
docs/fleet.md.

    status RUN                     every engine: where it is, what it does, how fast
    add RUN COUNT [--wait S]       start so many engines more, as soon as there is room for all of them
    remove RUN ENGINE ...          take these engines out of use; what they have in hand is sampled by the others
    remove RUN --count COUNT       the same with those that lose least
    timeline RUN --trace FILE      write who was busy with what, and when, for ui.perfetto.dev or chrome://tracing
    timeline RUN --picture FILE    draw it (.png, .svg; needs matplotlib)

Exit status 0, or 2: bad input, no such run, or the run says why not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mega_rl.errors import InputError
from mega_rl.observe.analysis.timeline_picture import draw
from mega_rl.observe.timeline import Activity, read_trace, write_trace
from mega_rl.rollout.scheduling.fleet_record import TIMELINE
from mega_rl.rollout.scheduling.fleet_requests import DIRECTORY, MAX_COUNT, PATIENCE_S, ControlQuestion, ask

WAIT_S = 10.0  # for room


def count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_COUNT:
        raise ValueError
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1e6:
        raise ValueError
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("status", "add", "remove", "timeline"):
        one = commands.add_parser(name)
        one.add_argument("run", type=Path, metavar="RUN", help="its output directory")
        if name == "timeline":
            one.add_argument("--trace", type=Path, metavar="FILE", help="for ui.perfetto.dev or chrome://tracing")
            one.add_argument("--picture", type=Path, metavar="FILE", help=".png or .svg; needs matplotlib")
            one.add_argument("--steps", metavar="FIRST:LAST", help="what the trainer did in these only")
            continue
        one.add_argument("--json", action="store_true", help="print JSON instead of a table")
        one.add_argument(
            "--patience", type=seconds, default=PATIENCE_S, metavar="S", help="for an answer (default: 60)"
        )
        if name == "add":
            one.add_argument("count", type=count, metavar="COUNT", help="engines")
            one.add_argument("--wait", type=seconds, default=WAIT_S, metavar="S", help="for room (default: 10)")
        if name == "remove":
            one.add_argument("engines", type=int, nargs="*", metavar="ENGINE", help="by the numbers of status")
            one.add_argument("--count", type=count, metavar="COUNT", help="so many, those that lose least")
    return parser.parse_args(arguments)


def question(options: argparse.Namespace) -> ControlQuestion:
    if options.command == "add":
        return ControlQuestion("add", count=options.count, wait_s=options.wait)
    if options.command == "remove":
        if bool(options.engines) == bool(options.count):
            raise InputError("remove needs engines or --count, one of the two: name engines as `status` numbers them")
        return ControlQuestion("remove", count=options.count or 0, engines=tuple(options.engines))
    return ControlQuestion("status")


def table_of(status: dict[str, Any]) -> Table:
    table = Table()
    columns = ("engine", "node", "process", "condition", "version", "steps behind", "in hand", "tokens/s", "restarts")
    for column in columns:
        table.add_column(column, justify="left" if column in ("node", "condition") else "right")
    for engine in status["engines"]:
        values = (
            engine["engine"],
            engine["node"] or "-",
            ", ".join(map(str, engine["processes"])) or "-",
            engine["condition"],
            "-" if engine["version"] is None else engine["version"],
            "-" if engine["staleness"] is None else engine["staleness"],
            engine["responses_in_hand"],
            f"{engine['tokens_per_s']:,.0f}",
            engine["restarts"],
        )
        table.add_row(*map(str, values))
    return table


def sentence(status: dict[str, Any]) -> str:
    air = status["steps_in_the_air"]
    steps = f"steps {air[0]} to {air[-1]}" if len(air) > 1 else f"step {air[0]}" if air else "no step"
    return (
        f"{status['mode']}, max_staleness {status['max_staleness']}: {status['trained_steps']:,} of "
        f"{status['total_steps']:,} steps trained, {steps} in the air, {status['responses_in_hand']:,} responses in "
        f"hand, {status['responses_waiting']:,} wait for an engine"
    )


def of_steps(activities: Sequence[Activity], which: str | None) -> list[Activity]:
    """Those that lie in the time of these steps of the trainer, counted from its first."""
    found = list(activities)
    if which is not None:
        first, _, last = which.partition(":")
        if not (first.isdecimal() and last.isdecimal()):
            raise InputError(f"--steps is {which!r}: give the first and the last, such as 3:8")
        own = [a for a in found if a.lane == "trainer" and int(first) <= a.details.get("step", -1) + 1 <= int(last)]
        if not own:
            raise InputError(f"--steps is {which!r}: the timeline has none of these steps")
        begin, end = min(a.begin_s for a in own), max(a.end_s for a in own)
        found = [
            a._replace(begin_s=max(begin, a.begin_s), end_s=min(end, a.end_s))
            for a in found
            if a.begin_s <= end and a.end_s >= begin
        ]
    if not found:
        raise InputError("the timeline is empty: the run has only begun")
    origin = min(a.begin_s for a in found)
    return [a._replace(begin_s=a.begin_s - origin, end_s=a.end_s - origin) for a in found]


def timeline(options: argparse.Namespace) -> None:
    if options.trace is None and options.picture is None:
        raise InputError("timeline needs --trace FILE, --picture FILE or both")
    path = options.run / DIRECTORY / TIMELINE
    if not path.is_file():
        raise InputError(f"{path} does not exist: a run with rollout.mode=pinned or in_flight writes it")
    activities = of_steps(read_trace(path), options.steps)
    try:
        if options.trace is not None:
            write_trace(options.trace, activities)
        if options.picture is not None:
            draw(options.picture, str(options.run), activities)
    except OSError as error:
        raise InputError(f"the timeline cannot be written ({error}): name files that can be") from error


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.command == "timeline":
        timeline(options)
        return 0
    status = ask(options.run, question(options), options.patience)
    if options.json:
        print(json.dumps(status, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table_of(status), highlight=False)
    console.print(sentence(status), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
