"""The command line of ``tools/check_env.py``: arguments, the table, the JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mega_rl.config import RunConfig, load_config, samples
from mega_rl.doctor.examine import CHECKS, examine, likely_platform, verdict
from mega_rl.doctor.finding import STATES, USUAL_ROLES, Finding, Wanted
from mega_rl.doctor.host import Host, ThisHost
from mega_rl.doctor.machine import parse_ports
from mega_rl.doctor.trials import LOOP
from mega_rl.errors import InputError
from mega_rl.models.files import read_config
from mega_rl.platform import VARIABLE, ProcessRole, check_name, engine_role, trainer_role

SCHEMA = 1  # version of the JSON; it rises when a field changes or goes
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def parse(description: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="of the run, whose processes and output it asks for; repeatable",
    )
    parser.add_argument("--platform", metavar="NAME", help="auto (what the machine shows, the default), cpu, cuda, npu")
    parser.add_argument("--quick", action="store_true", help="no trials: no kernels, collectives and imports")
    parser.add_argument(
        "--trial", choices=["loop"], help="nothing but this: loop, three steps of GRPO with a tiny model"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="how many nodes the run will have")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="where the run will write; default: runs")
    parser.add_argument("--ports", metavar="LIST", help="ports that must be free, for example 29500,60000-60015")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="a warning counts as a failure")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the configuration")
    return parser.parse_intermixed_args(arguments)


def wanted(options: argparse.Namespace, host: Host) -> Wanted:
    """
    Raises:
        InputError: an unknown platform, a configuration that cannot be read, or ports that are none.
    """
    if options.overrides and options.config is None:
        raise InputError(f"{options.overrides[0]} changes a configuration: name its file with --config")
    config = None if options.config is None else load_config(options.config, options.overrides)
    name, source = options.platform, "--platform"
    if name is None:
        name, source = ("auto", source) if config is None else (config.platform.name, "platform.name")
    if name == "auto" and host.environ.get(VARIABLE):
        name, source = host.environ[VARIABLE], f"the environment variable {VARIABLE}"
    check_name(name, source)
    if options.nodes < 1:
        raise InputError(f"--nodes is {options.nodes}: write how many nodes the run will have, 1 or more")
    try:
        ports = None if options.ports is None else parse_ports(options.ports)
    except ValueError:
        raise InputError(
            f"--ports is {options.ports!r}: write ports from 1 to 65535, as in 29500,60000-60015"
        ) from None
    return Wanted(
        platform=likely_platform(host) if name == "auto" else name,
        num_nodes=options.nodes,
        output_dir=options.output_dir or Path("runs" if config is None else config.trainer.output_dir),
        ports=ports,
        quick=options.quick,
        roles=USUAL_ROLES if config is None else roles(config),
        shows_pictures=config is not None and shows_pictures(config),
    )


def shows_pictures(config: RunConfig) -> bool:
    """Whether the run's engines answer about pictures; a model that is not there yet is taken by its name."""
    if not samples(config):
        return False
    try:
        return "vision_config" in read_config(config.model.path)
    except InputError:
        return "-vl-" in f"{Path(config.model.path).name.lower()}-"


def roles(config: RunConfig) -> tuple[ProcessRole, ...]:
    """What the processes of a run are for, the trainer's first."""
    rollout, is_deterministic = config.rollout if samples(config) else None, config.platform.deterministic
    found: tuple[ProcessRole, ...] = (trainer_role(rollout, is_deterministic),)
    if rollout is not None and rollout.placement == "separate" and rollout.replay is None:
        found += (engine_role(rollout, is_deterministic),)
    return found


def print_table(findings: Iterable[Finding], platform_name: str) -> None:
    table = Table(title=f"Environment for the {platform_name} platform", title_justify="left")
    for column in ("area", "check", "state", "found", "fix"):
        table.add_column(column, overflow="fold", min_width=5)
    last_area = ""
    for finding in findings:
        if finding.area != last_area and last_area:
            table.add_section()
        area = "" if finding.area == last_area else finding.area
        last_area = finding.area
        state = Text(finding.state, COLOURS[finding.state])
        found, fix = Text(finding.found), Text(finding.fix)  # brackets in them are no markup
        table.add_row(area, finding.check, state, found, fix)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    found = Counter(finding.state for finding in findings)
    return {state: found[state] for state in STATES}


def examined(options: argparse.Namespace, host: Host) -> int:
    asked = wanted(options, host)
    findings = []
    for finding in examine(host, asked, CHECKS if options.trial is None else (LOOP,)):
        if not options.json and sys.stderr.isatty():
            print(f"\r\033[K{finding.area}: {finding.check}", end="", file=sys.stderr, flush=True)
        findings.append(finding)
    result = verdict(findings)
    if options.json:
        rows = [asdict(finding) for finding in findings]
        summary = {"schema": SCHEMA, "platform": asked.platform, "verdict": result, "counts": counts(findings)}
        print(json.dumps({**summary, "findings": rows}, indent=2))
    else:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        print_table(findings, asked.platform)
        print(", ".join(f"{number} {state}" for state, number in counts(findings).items()))
    return int(result == "fail" or (options.strict and result == "warn"))


def main(description: str, environ: Mapping[str, str], arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = parse(description, arguments)
    try:
        return examined(options, ThisHost(environ))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
