"""What asynchronous training would bring a cluster of 1,024 engines, simulated, against what was wanted of it.

    python -m benchmarks.asynchronous.fleet_goals [--engines N] [--steps N] [--json F]

The scheduler of a run under a clock of its own, in three worlds: a published one (verl on 128 cards, a 7B model on
mathematics; 356 s a step synchronous and 151 s asynchronous, 2.36x), long reasoning, and an extreme tail (p99 ten times
the median). Lengths are log-normal; speeds of decoding are assumed. Prompts and engines of each are scaled to the given
number of engines. Deaths: one of each engine in 100 hours, and 120 s until it is back; the share is that of the time
without deaths. See docs/simulate.md for what is not counted.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import publish, table
from mega_rl.simulation.choice import SimulatedBatch, SimulatedSetting, simulate_all
from mega_rl.simulation.cluster import Cluster
from mega_rl.simulation.lengths import LogNormal

MORTAL_HOURS = 100.0  # between two deaths of an engine


@dataclass(frozen=True)
class World:
    name: str
    engines: int  # beside the trainer
    colocated: int
    groups: int
    group_size: int
    lengths: LogNormal
    cluster: Cluster  # with engines beside the trainer; its number of engines is ``engines``
    colocated_train_s: float
    trials: tuple[tuple[str, int, float], ...]  # mode, eta, how many times as fast as synchronous it is to be


def fast(slots: int, fixed_s: float, per_response_s: float, train_s: float) -> Cluster:
    return Cluster(1, slots, fixed_s, per_response_s, train_s, load_s=5.0)


WORLDS = (
    World(
        "a published run, 7B mathematics",
        *(16, 32, 128, 16),
        LogNormal(750, 1.0, 28_000),
        fast(512, 0.0058, 0.00006, 113.0),
        168.0,
        (("pinned", 2, 2.8),),
    ),
    World(
        "long reasoning",
        *(24, 32, 128, 16),
        LogNormal(5000, 0.9, 32_000),
        fast(256, 0.010, 0.00008, 120.0),
        90.0,
        (("pinned", 8, 4.0), ("in_flight", 8, 4.0)),
    ),
    World(
        "extreme tail",
        *(16, 32, 128, 8),
        LogNormal(2500, 1.0, 65_000),
        fast(256, 0.010, 0.00008, 60.0),
        80.0,
        (("pinned", 8, 5.5), ("in_flight", 8, 5.5)),
    ),
)


def settings_of(world: World, engines: int) -> list[SimulatedSetting]:
    """The synchronous one first, then the others, and then these with deaths."""
    separate = replace(world.cluster, engines=engines)
    colocated = replace(
        world.cluster,
        engines=engines * world.colocated // world.engines,
        train_s=world.colocated_train_s,
        load_s=10.0,
    )
    others = [SimulatedSetting(mode, eta, 1, separate) for mode, eta, _ in world.trials]
    mortal = [replace(one, cluster=replace(separate, hours_between_deaths=MORTAL_HOURS)) for one in others]
    return [SimulatedSetting("synchronous", 0, 1, colocated), *others, *mortal]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1024, help="at least 16 (default: 1024)")
    parser.add_argument("--steps", type=int, default=24, help="of each run, the first half not counted (default: 24)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.engines < 16 or options.steps < 4:
        parser.error("give at least 16 engines and 4 steps")
    rows, found = [], []
    for world in WORLDS:
        groups = world.groups * options.engines // world.engines
        batch = SimulatedBatch(groups, world.group_size, world.lengths)
        synchronous, *others = simulate_all(settings_of(world, options.engines), batch, options.steps)
        others, mortal = others[: len(world.trials)], others[len(world.trials) :]
        for trial, (mode, eta, goal) in zip(others, world.trials, strict=True):
            gain = synchronous.outcome.step_s / trial.outcome.step_s
            rows.append((f"{world.name}: {mode} eta={eta}, times synchronous", goal, f"{gain:.2f}"))
            found.append({"world": world.name, "mode": mode, "eta": eta, "goal": goal, "found": gain})
        for trial, dying in zip(others, mortal, strict=True):
            share, deaths, label = trial.outcome.step_s / dying.outcome.step_s, dying.outcome.num_deaths, dying.setting
            rows.append((f"the same with {deaths} deaths, {label.label}", 0.99, f"{share:.3f}"))
            found.append({"world": world.name, "mode": label.mode, "goal": 0.99, "found": share, "deaths": deaths})
    text = table([f"{options.engines:,} engines beside the trainer", "goal, at least", "simulated"], rows)
    publish("Goals of the fleet, simulated", text, "no device", {"rows": found}, options.json)


if __name__ == "__main__":
    main()
