"""Plan a run's memory before any device is touched: ``python tools/plan.py --config FILE [key=value ...]``.

Asks for nothing but the configuration and the model's config.json. Shown is what lies on the fullest device in every
phase of a step, the engine's key-value memory, what a weight sync moves, the host's memory, the length of the run, and,
where it does not fit, what to change. See docs/plan.md.

Exit status 0: it fits, 1: it does not (one sentence on stderr), 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mega_rl import platform
from mega_rl.config import RunConfig, load_config, validate
from mega_rl.config.checks.model import trained_shape
from mega_rl.config.load import naming_forgotten_bases
from mega_rl.config.schema.stage import samples
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape
from mega_rl.planning.advice import Change, advise, spend
from mega_rl.planning.automatic import automatic
from mega_rl.planning.memory_plan import Item, Machine, MemoryPlan, Phase, make_plan, smallest_world
from mega_rl.planning.steps import RunLength, fullest_microbatches, run_length
from mega_rl.platform.operators.memory import OPERATOR_MEMORY

GIB = 1 << 30
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file, see configs/README.md; repeatable: each changes those before it",
    )
    parser.add_argument("--device-memory", default="64GiB", metavar="SIZE", help="of one device (default: 64GiB)")
    parser.add_argument("--devices", type=int, metavar="N", help="of the trainer (default: the fewest it can start on)")
    parser.add_argument(
        "--reserve",
        default="4GiB",
        metavar="SIZE",
        help="of a device, for what is not counted: driver, communication buffers, fragmentation (default: 4GiB)",
    )
    parser.add_argument(
        "--platform", choices=sorted(OPERATOR_MEMORY), help="default: platform.name, and npu where that is auto"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example parallel.tensor=4")
    return parser.parse_intermixed_args(arguments)  # overrides and options in any order


def size_in_bytes(option: str, text: str) -> int:
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{option} is {text!r}: write a number with a unit, such as 64GiB or 80GB")
    number, prefix, is_binary = match.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** ("KMGT".index(prefix) + 1))


def machine_of(options: argparse.Namespace, config: RunConfig) -> Machine:
    name = options.platform or config.platform.name
    if name == "auto":
        name = os.environ.get(platform.VARIABLE, "npu")
    if name not in OPERATOR_MEMORY:
        raise InputError(f"platform.name is {name!r}: choose one of {', '.join(sorted(OPERATOR_MEMORY))}")
    devices = smallest_world(config) if options.devices is None else options.devices
    if devices < 1:
        raise InputError(f"--devices is {devices}: give at least 1")
    total = size_in_bytes("--device-memory", options.device_memory)
    reserve = size_in_bytes("--reserve", options.reserve)
    if reserve >= total:
        raise InputError(f"--reserve {options.reserve} leaves nothing of --device-memory {options.device_memory}")
    return Machine(devices, total, reserve, name)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f}"


def phase_table(plan: MemoryPlan) -> Table:
    """One row per phase, each for the rank that is fullest in it."""
    phases = [plan.worst_of(phase.name) for phase in plan.worst.phases]
    names = list(dict.fromkeys(item.name for _, phase in phases for item in phase.items))
    table = Table(title="Device memory, GiB, of the fullest rank in each phase of a step")
    for column in ("phase", "rank", *names, "reserve", "sum", "of", ""):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for rank, phase in phases:
        sizes = {item.name: item.num_bytes for item in phase.items}
        total = phase.num_bytes + plan.machine.reserve_bytes
        verdict = "fits" if total <= plan.machine.device_bytes else "TOO MUCH"
        cells = [gib(sizes[name]) if name in sizes else "" for name in names]
        ends = [gib(plan.machine.reserve_bytes), gib(total), gib(plan.machine.device_bytes), verdict]
        table.add_row(phase.name, str(rank.rank), *cells, *ends)
    return table


def weights_table(plan: MemoryPlan) -> Table:
    """Trainer weights by kind, of the fullest rank of every pipeline stage."""
    stages = {rank.stage: rank for rank in sorted(plan.ranks, key=lambda rank: rank.fullest.num_bytes)}
    kinds = list(dict.fromkeys(kind for stage in sorted(stages) for kind in stages[stage].state.by_kind))
    table = Table(title="Trainer, GiB, of the fullest rank of each pipeline stage (exact but for the activations)")
    columns = ("stage", "rank", *kinds, "gradients", "masters", "moments", "activations kept", "of micro-batches")
    for column in columns:
        table.add_column(column, justify="right")
    for stage, rank in sorted(stages.items()):
        state, activations = rank.state, rank.activations
        sizes = [gib(state.by_kind.get(kind, 0)) for kind in kinds]
        sizes += [gib(n) for n in (state.gradients, state.masters, state.moments, activations.kept)]
        table.add_row(str(stage), str(rank.rank), *sizes, f"{activations.in_flight:g}")
    return table


def engine_lines(plan: MemoryPlan) -> list[str]:
    engine, rollout = plan.engine, plan.config.rollout
    if engine is None:
        return []
    lines = [
        f"engine: {gib(engine.share)} GiB per device while awake: weights {gib(engine.weights)} (exact), working "
        f"memory {gib(engine.working)} (estimate), key-value memory {gib(engine.cache)}",
        f"        {engine.num_blocks:,} blocks, {engine.bytes_per_token:,} bytes per token and device: "
        f"{engine.num_sequences:,} sequences of the greatest length at a time, {engine.sequences_per_engine:,} to "
        f"sample per engine and step; {rollout.tensor_parallel_size} devices per engine",
    ]
    if not engine.fits:
        lines.append("        TOO LITTLE for a single sequence: raise rollout.vllm.gpu_memory_utilization")
    if plan.sync is not None:
        sync = plan.sync
        lines.append(
            f"sync:   {gib(sync.local)} GiB copied within ranks, {gib(sync.sent)} sent, least possible "
            f"{gib(sync.minimum)}; the busiest rank receives {gib(sync.largest_received)}; buffers "
            f"{gib(sync.buffers)} per rank"
        )
    return lines


def run_lines(plan: MemoryPlan, length: RunLength) -> list[str]:
    tokens = fullest_microbatches(plan.config, plan.layout)
    steps = "unknown (the data files are not here)" if length.total_steps is None else f"{length.total_steps:,}"
    rows = "" if length.num_rows is None else f" of {length.num_rows:,} rows"
    return [
        f"run:    {steps} steps{rows}, {length.sequences_per_step:,} sequences and at most "
        f"{length.max_tokens_per_step:,} tokens per step; micro-batches of at most {tokens.num_tokens:,} tokens, "
        f"{tokens.num_microbatches} per rank and optimizer step",
    ]


def host_lines(plan: MemoryPlan) -> list[str]:
    rank = max(plan.ranks, key=lambda rank: sum(item.num_bytes for item in rank.host))
    total = sum(item.num_bytes for item in rank.host)
    parts = ", ".join(f"{item.name} {gib(item.num_bytes)}" for item in rank.host) or "nothing besides its process"
    return [f"host:   {gib(total)} GiB per rank ({parts}); {gib(8 * total)} for 8 ranks of one host"]


def verdict(plan: MemoryPlan) -> str:
    """One sentence."""
    phase, rank, machine = plan.worst.fullest.name, plan.worst.rank, plan.machine
    where = f"rank {rank} in phase {phase}"
    if plan.excess_bytes > 0:
        return (
            f"does not fit: {where} lacks {gib(plan.excess_bytes)} GiB of {gib(machine.device_bytes)} GiB on "
            f"{machine.num_devices} devices"
        )
    if plan.engine is not None and not plan.engine.fits:
        return (
            "does not fit: the engine's share leaves no key-value memory for one sequence, raise "
            "rollout.vllm.gpu_memory_utilization"
        )
    return f"fits: {gib(-plan.excess_bytes)} GiB to spare at the fullest moment, {where}"


def advice_table(changes: Sequence[Change]) -> Table:
    """What makes the plan fit; keys stand in plain text, since rich would take their brackets for its own."""
    table = Table(title="Advice, each on top of the ones before it")
    for column in ("change", "saves GiB", "then lacking", "costs"):
        table.add_column(column, justify="right" if "GiB" in column or "then" in column else "left", overflow="fold")
    for change in changes:
        lacking = "0, it fits" if change.plan.fits else gib(max(0, change.plan.excess_bytes))
        table.add_row(Text("\n".join(change.keys)), gib(change.saved_bytes), lacking, change.cost)
    return table


def spending_table(changes: Sequence[Change]) -> Table:
    table = Table(title="What the memory that is left over could buy, each on top of the ones before it")
    for column in ("change", "takes GiB", "then to spare", "gives"):
        table.add_column(column, justify="right" if "GiB" in column or "then" in column else "left", overflow="fold")
    for change in changes:
        spare = gib(-change.plan.excess_bytes)
        table.add_row(Text("\n".join(change.keys)), gib(-change.saved_bytes), spare, change.cost)
    return table


def as_json(plan: MemoryPlan, length: RunLength, changes: Sequence[Change]) -> dict[str, Any]:
    def items(listed: Sequence[Item]) -> list[dict[str, Any]]:
        return [asdict(item) for item in listed]

    def phase(one: Phase) -> dict[str, Any]:
        return {"name": one.name, "num_bytes": one.num_bytes, "items": items(one.items)}

    return {
        "fits": plan.fits,
        "verdict": verdict(plan),
        "excess_bytes": plan.excess_bytes,
        "worst_rank": plan.worst.rank,
        "worst_phase": plan.worst.fullest.name,
        "machine": asdict(plan.machine),
        "layout": asdict(plan.layout),
        "ranks": [
            {
                "rank": rank.rank,
                "stage": rank.stage,
                "state": asdict(rank.state),
                "activations": asdict(rank.activations),
                "phases": [phase(one) for one in rank.phases],
                "host": items(rank.host),
            }
            for rank in plan.ranks
        ],
        "engine": plan.engine and asdict(plan.engine),
        "sync": plan.sync and asdict(plan.sync),
        "run": asdict(length),
        "advice": [] if plan.fits else [change_as_json(change) for change in changes],
        "spending": [change_as_json(change) for change in changes] if plan.fits else [],
    }


def change_as_json(change: Change) -> dict[str, Any]:
    return {
        "keys": list(change.keys),
        "cost": change.cost,
        "saved_bytes": change.saved_bytes,
        "excess_bytes": change.plan.excess_bytes,
        "fits": change.plan.fits,
    }


def show(plan: MemoryPlan, shape: ModelShape, length: RunLength, changes: Sequence[Change]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine, layout = plan.machine, plan.layout
    axes = ("tensor", "context", "data", "pipeline", "expert", "expert_tensor")
    sizes = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
    console.print(
        f"{shape.family}, {shape.num_layers} layers, on {machine.num_devices} devices of "
        f"{gib(machine.device_bytes)} GiB ({machine.platform}): {sizes}\n",
        highlight=False,
    )
    console.print(phase_table(plan), weights_table(plan), highlight=False)
    for line in [*engine_lines(plan), *host_lines(plan), *run_lines(plan, length)]:
        console.print(line, highlight=False, soft_wrap=True)
    if changes:
        console.print(spending_table(changes) if plan.fits else advice_table(changes), highlight=False)
    console.print(f"\n{verdict(plan)}", highlight=False, soft_wrap=True)
    if samples(plan.config):
        console.print("how long a step takes, and with how many engines: mega-rl simulate", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    config = load_config(options.config, options.overrides)
    platform.check_name(config.platform.name)
    with naming_forgotten_bases(options.config):
        validate(config, has_files=False)
    machine = machine_of(options, config)
    shape = trained_shape(config)
    validate(config, machine.num_devices, has_files=False)
    config, chosen = automatic(config, shape, machine)
    plan = make_plan(config, shape, machine)
    changes = spend(plan, shape) if plan.fits else advise(plan, shape)
    length = run_length(config)
    if options.json:
        print(json.dumps(as_json(plan, length, changes), indent=2))
    else:
        for line in chosen:
            print(line)
        show(plan, shape, length, changes)
    if plan.fits:
        return 0
    fix = f"; it does with {' '.join(k for c in changes for k in c.keys)}" if changes and changes[-1].plan.fits else ""
    print(f"error: {verdict(plan)}{fix}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
