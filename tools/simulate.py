"""Predict what asynchronous training would bring: ``python tools/simulate.py --config FILE --lengths WHICH ...``.

Simulates runs of the configuration's batches on a cluster: synchronous, pinned and in flight, with several eta and
splits of the devices, and recommends one. The scheduler is that of mega_rl/fleet, under a clock of its own; no device
and no weights are needed. See docs/simulate.md.

Exit status 0, or 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from mega_rl.config import RunConfig, load_config, validate
from mega_rl.config.checks.model import trained_shape
from mega_rl.config.checks.rules import RULES
from mega_rl.errors import InputError, shown
from mega_rl.observe.analysis.timeline_picture import draw
from mega_rl.observe.timeline import write_trace
from mega_rl.planning.engine import NUM_SEQUENCES
from mega_rl.planning.speeds import DEVICES, speeds
from mega_rl.simulation import lengths as length_forms
from mega_rl.simulation.choice import (
    SimulatedBatch,
    SimulatedSetting,
    Trial,
    recommended,
    simulate,
    simulate_all,
    splits,
)
from mega_rl.simulation.cluster import NEVER, Cluster
from mega_rl.simulation.lengths import Lengths

USED = (
    "data.train_batch_size",
    "data.max_response_length",
    "rollout.n",
    "rollout.tensor_parallel_size",
    "rollout.kv_on_update",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.context",
)
TIMES = (
    "fixed_ms",
    "per_response_ms",
    "train_s",
    "colocated_train_s",
    "load_s",
    "colocated_load_s",
    "hours_between_deaths",
    "restart_s",
)
NOT_ZERO = ("train_s", "colocated_train_s", "hours_between_deaths")
LEAST, MOST = 1e-6, 1e9  # of a time that is not 0: a smaller or larger one is a mistake
MODES = ("synchronous", "pinned", "in_flight")


def number(text: str) -> float:
    """For argparse: a number that is finite and not negative."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError
    return value


def count(text: str) -> int:
    """For argparse: a whole number of at least 1, and not beyond what can be simulated."""
    value = int(text)
    if not 1 <= value <= 1_000_000:
        raise ValueError
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file, see configs/README.md; repeatable: each changes those before it",
    )
    add(
        "--lengths",
        required=True,
        metavar="WHICH",
        help="of responses: a run's directory (its rollouts/), a file with one length a line, constant:TOKENS or "
        "lognormal:MEDIAN:SIGMA",
    )
    add("--devices", type=count, required=True, metavar="N", help="of trainer and engines together")
    add("--trainer-devices", type=count, metavar="N", help="default: several splits are tried")
    add("--eta", type=int, nargs="+", default=[1, 2, 3, 4], metavar="ETA", help="default: 1 2 3 4")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--device", choices=sorted(DEVICES), help="speeds from the data sheet of this device; or give them yourself:")
    add("--fixed-ms", type=number, metavar="MS", help="of an engine's decoding step, whatever it samples")
    add("--per-response-ms", type=number, metavar="MS", help="of an engine's decoding step for each response")
    add("--train-s", type=number, metavar="S", help="of a step in the trainer: on --trainer-devices, else on --devices")
    add("--colocated-train-s", type=number, metavar="S", help="the same with all devices; default: in proportion")
    add("--load-s", type=number, default=2.0, metavar="S", help="an engine is held up by new weights (default: 2)")
    add("--colocated-load-s", type=number, metavar="S", help="the same with engines on the trainer's devices")
    add("--hours-between-deaths", type=number, metavar="H", help="of one engine (default: none dies)")
    add("--restart-s", type=number, default=120.0, metavar="S", help="of an engine that died (default: 120)")
    add("--steps", type=count, default=16, help="to simulate of each run; the first half is not counted (default: 16)")
    add("--seed", type=int, default=0, help="of lengths and deaths (default: 0)")
    add("--trace", type=Path, metavar="FILE", help="write the recommended run for ui.perfetto.dev or chrome://tracing")
    add("--picture", type=Path, metavar="FILE", help="draw the recommended run (.png, .svg; needs matplotlib)")
    add("--draw", metavar="MODE:ETA", help="the run of --trace and --picture instead, such as pinned:2")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("overrides", nargs="*", metavar="key=value", help="for example data.train_batch_size=512")
    return parser.parse_intermixed_args(arguments)


def check(options: argparse.Namespace, config: RunConfig) -> None:
    for field in USED:
        section, name = field.split(".")
        problem = RULES[field].problem(field, getattr(getattr(config, section), name))
        if problem is not None:
            raise InputError(problem)
    slots = config.rollout.vllm.get("max_num_seqs", NUM_SEQUENCES)
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
        raise InputError(f"rollout.vllm.max_num_seqs is {shown(slots)}: set it to a whole number of at least 1")
    if bad := [eta for eta in options.eta if not 1 <= eta <= 64]:
        raise InputError(f"--eta {bad[0]}: give whole numbers from 1 to 64; eta 0 is the synchronous mode")
    for name in TIMES:
        value, may_be_0 = getattr(options, name), name not in NOT_ZERO
        if value is not None and not (LEAST <= value <= MOST or (value == 0 and may_be_0)):
            zero = "0, or " if may_be_0 else ""
            raise InputError(f"--{name.replace('_', '-')} is {value:g}: give {zero}a number from {LEAST:g} to {MOST:g}")
    given = [options.fixed_ms, options.per_response_ms, options.train_s]
    if options.device is None and None in given:
        raise InputError(
            "there are no speeds: give --device, or all of --fixed-ms, --per-response-ms and --train-s from a run"
        )
    tensor = config.rollout.tensor_parallel_size
    if options.devices < tensor:
        raise InputError(
            f"--devices is {options.devices}, but one engine takes rollout.tensor_parallel_size={tensor}: give more"
        )


def lengths_of(options: argparse.Namespace, config: RunConfig) -> Lengths:
    text, longest, seed = options.lengths, config.data.max_response_length, abs(options.seed)
    kind, *parts = text.split(":")
    wrong = f"--lengths is {shown(text)}: write constant:TOKENS or lognormal:MEDIAN:SIGMA with numbers above 0"
    if kind in ("constant", "lognormal"):
        try:
            values = [float(part) for part in parts]
        except ValueError:
            raise InputError(wrong) from None
        if len(values) != (1 if kind == "constant" else 2) or not all(0 < v < 1e9 for v in values):
            raise InputError(wrong)
        if kind == "constant":
            return length_forms.Constant(max(1, min(longest, round(values[0]))))
        return length_forms.LogNormal(max(1.0, values[0]), values[1], longest, seed)
    groups = tuple(tuple(group) for group in length_forms.read(Path(text)))
    return length_forms.Recorded(groups, longest, seed)


class Costs(NamedTuple):
    """Seconds of the parts of a run; the trainer's are those of one device."""

    fixed_s: float
    per_response_s: float
    train_device_s: float  # of a step
    train_token_device_s: float


def costs_of(options: argparse.Namespace, config: RunConfig, lengths: Lengths) -> Costs:
    """What was measured counts more than what the data sheet says."""
    fixed, response, train = options.fixed_ms, options.per_response_ms, options.train_s
    token = 0.0
    if options.device is not None:
        validate(config, has_files=False)
        mean = float(lengths(0, config.data.train_batch_size, config.rollout.n).mean())
        found = speeds(config, trained_shape(config), DEVICES[options.device], mean)
        fixed = found.fixed_s * 1e3 if fixed is None else fixed
        response = found.per_response_s * 1e3 if response is None else response
        token = found.train_token_device_s if train is None else 0.0
    if fixed + response == 0:
        raise InputError("--fixed-ms and --per-response-ms are both 0: an engine takes time, so give at least one")
    devices = options.trainer_devices or options.devices
    return Costs(fixed / 1e3, response / 1e3, (train or 0.0) * devices, token)


def settings_of(options: argparse.Namespace, config: RunConfig, costs: Costs) -> list[SimulatedSetting]:
    tensor, parallel = config.rollout.tensor_parallel_size, config.parallel
    slots = int(config.rollout.vllm.get("max_num_seqs", NUM_SEQUENCES))
    prefill = NEVER if config.rollout.kv_on_update == "keep" else Cluster.prefill_tokens_per_s

    def cluster(devices: int, trainer_devices: int) -> Cluster:
        return Cluster(
            engines=devices // tensor,
            slots=slots,
            fixed_s=costs.fixed_s,
            per_response_s=costs.per_response_s,
            train_s=costs.train_device_s / trainer_devices,
            train_token_s=costs.train_token_device_s / trainer_devices,
            load_s=options.load_s,
            prefill_tokens_per_s=prefill,
            hours_between_deaths=options.hours_between_deaths or NEVER,
            restart_s=options.restart_s,
        )

    colocated = cluster(options.devices, options.devices)
    if options.colocated_train_s is not None:
        colocated = replace(colocated, train_s=options.colocated_train_s, train_token_s=0.0)
    if options.colocated_load_s is not None:
        colocated = replace(colocated, load_s=options.colocated_load_s)
    multiple = parallel.tensor * parallel.pipeline * parallel.context
    chosen = [options.trainer_devices] if options.trainer_devices else splits(options.devices, tensor, multiple)
    found = [SimulatedSetting("synchronous", 0, options.devices, colocated)]
    for trainer in chosen:
        if options.devices - trainer < tensor:
            raise InputError(
                f"--trainer-devices is {trainer} of {options.devices}: leave at least the {tensor} of one engine "
                "(rollout.tensor_parallel_size)"
            )
        for mode in ("pinned", "in_flight"):
            if mode in options.modes:
                fleet = cluster(options.devices - trainer, trainer)
                found += [SimulatedSetting(mode, eta, trainer, fleet) for eta in sorted(set(options.eta))]
    return found


def table_of(trials: Sequence[Trial], best: Trial) -> Table:
    synchronous = trials[0].outcome.step_s
    table = Table()
    for column in (
        "mode",
        "trainer",
        "engines",
        "s a step",
        "against",
        "trainer",
        "engines",
        "staleness",
        "",
        "tokens",
    ):
        table.add_column(column, justify="left" if column == "mode" else "right")
    table.add_row("", "devices", "", "", "synchronous", "idle", "busy", "mean", "most", "a second", style="dim")
    for trial in trials:
        setting, outcome = trial.setting, trial.outcome
        table.add_row(
            setting.label + (" *" if trial is best else ""),
            f"{setting.trainer_devices:,}",
            f"{setting.cluster.engines:,}",
            f"{outcome.step_s:,.1f}",
            f"{synchronous / outcome.step_s:.2f}x",
            f"{outcome.trainer_idle:.0%}",
            f"{outcome.engine_busy:.0%}",
            f"{outcome.mean_staleness:.2f}",
            str(outcome.max_staleness),
            f"{outcome.tokens_per_s:,.0f}",
        )
    return table


def sentence(trials: Sequence[Trial], best: Trial) -> str:
    setting, gain = best.setting, trials[0].outcome.step_s / best.outcome.step_s
    if setting.mode == "synchronous":
        return (
            f"recommended: synchronous, engines on the trainer's {setting.trainer_devices:,} devices; nothing is faster"
        )
    return (
        f"recommended: pinned, eta={setting.eta}, {setting.trainer_devices:,} devices train beside "
        f"{setting.cluster.engines:,} engines: {best.outcome.step_s:,.1f} s a step, {gain:.2f}x of synchronous"
    )


def drawn(options: argparse.Namespace, trials: Sequence[Trial], best: Trial) -> SimulatedSetting:
    """The run that --trace and --picture show."""
    if options.draw is None:
        return best.setting
    mode, _, eta = options.draw.partition(":")
    for trial in trials:
        if trial.setting.mode == mode and str(trial.setting.eta) == (eta or "0"):
            return trial.setting
    choices = sorted({f"{trial.setting.mode}:{trial.setting.eta}" for trial in trials})
    raise InputError(f"--draw is {shown(options.draw)}: choose one of {', '.join(choices)}")


def write_files(options: argparse.Namespace, setting: SimulatedSetting, batch: SimulatedBatch) -> None:
    """Simulate one setting once more, with every activity kept."""
    outcome = simulate(setting, batch, options.steps, abs(options.seed), records=True).outcome
    try:
        for path in (options.trace, options.picture):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if options.trace:
            write_trace(options.trace, outcome.activities)
        if options.picture:
            draw(options.picture, setting.label, outcome.activities)
    except OSError as error:
        raise InputError(f"the timeline cannot be written ({error}): name files that can be") from error


def as_json(trials: Sequence[Trial], best: Trial) -> dict[str, Any]:
    def one(trial: Trial) -> dict[str, Any]:
        outcome = {key: value for key, value in asdict(trial.outcome).items() if key != "activities"}
        cluster = {key: value for key, value in asdict(trial.setting.cluster).items() if value != NEVER}
        setting = {
            "mode": trial.setting.mode,
            "eta": trial.setting.eta,
            "trainer_devices": trial.setting.trainer_devices,
        }
        return {**setting, "cluster": cluster, **outcome}

    return {"recommended": one(best), "sentence": sentence(trials, best), "trials": [one(trial) for trial in trials]}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    config = load_config(options.config, options.overrides)
    check(options, config)
    lengths = lengths_of(options, config)
    batch = SimulatedBatch(config.data.train_batch_size, config.rollout.n, lengths)
    settings = settings_of(options, config, costs_of(options, config, lengths))
    trials = simulate_all(settings, batch, options.steps, abs(options.seed))
    best = recommended(trials)
    if options.trace or options.picture:
        write_files(options, drawn(options, trials, best), batch)
    if options.json:
        print(json.dumps(as_json(trials, best), indent=2))
        return 0
    of_step = lengths(0, batch.num_groups, batch.group_size)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(
        f"{batch.num_groups:,} x {batch.group_size} responses a step, mean {of_step.mean():,.0f} tokens, longest "
        f"{of_step.max():,}; {options.steps} steps simulated of each run",
        highlight=False,
    )
    console.print(table_of(trials, best), highlight=False)
    console.print(sentence(trials, best), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
