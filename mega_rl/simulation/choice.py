"""Many simulated runs side by side, and which of their settings to take."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from mega_rl.fleet.tickets import Rules
from mega_rl.simulation.cluster import Cluster, SimulatedRun, Simulation
from mega_rl.simulation.lengths import Lengths

MARGIN = 1.05  # slower than the fastest by no more than this counts as equally fast
SMALL = 300_000  # responses that one process simulates within seconds


@dataclass(frozen=True)
class SimulatedBatch:
    """What every step samples."""

    num_groups: int
    group_size: int
    lengths: Lengths


@dataclass(frozen=True)
class SimulatedSetting:
    """One run to simulate."""

    mode: str  # synchronous | pinned | in_flight
    eta: int
    trainer_devices: int
    cluster: Cluster

    @property
    def label(self) -> str:
        return self.mode if self.mode == "synchronous" else f"{self.mode} eta={self.eta}"


@dataclass(frozen=True)
class Trial:
    """A setting, and what came of it."""

    setting: SimulatedSetting
    outcome: SimulatedRun


def simulate(
    setting: SimulatedSetting, batch: SimulatedBatch, num_steps: int, seed: int = 0, records: bool = False
) -> Trial:
    """Simulate one run of so many steps; the first half of them fill the pipeline and are not counted."""
    parts = min(batch.group_size, -(-setting.cluster.engines // batch.num_groups))
    rules = Rules(
        batch.num_groups,
        batch.group_size,
        total_steps=num_steps + setting.eta + 1,
        eta=setting.eta,
        is_pinned=setting.mode != "in_flight",
        num_parts=parts,
    )
    simulation = Simulation(setting.cluster, rules, batch.lengths, num_steps, seed=seed, records=records)
    return Trial(setting, simulation.run())


def simulate_all(
    settings: Sequence[SimulatedSetting], batch: SimulatedBatch, num_steps: int, seed: int = 0
) -> list[Trial]:
    """Simulate every setting, large ones on all cores."""
    number = len(settings) * num_steps * batch.num_groups * batch.group_size
    workers = min(len(settings), os.cpu_count() or 1)
    if number <= SMALL or workers == 1:
        return [simulate(setting, batch, num_steps, seed) for setting in settings]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        runs = [pool.submit(simulate, setting, batch, num_steps, seed) for setting in settings]
        return [run.result() for run in runs]


def recommended(trials: Sequence[Trial]) -> Trial:
    """The freshest of the repeatable settings that are as fast as the fastest of them, and of those the fastest."""
    repeatable = [trial for trial in trials if trial.setting.mode != "in_flight"]
    fastest = min(trial.outcome.step_s for trial in repeatable)
    enough = [trial for trial in repeatable if trial.outcome.step_s <= MARGIN * fastest]
    return min(enough, key=lambda trial: (trial.setting.eta, trial.outcome.step_s))


def splits(devices: int, engine_devices: int, trainer_multiple: int, num_wanted: int = 7) -> list[int]:
    """Numbers of trainer devices, at most so many, that leave the others to whole engines."""
    fitting = [
        trainer
        for trainer in range(trainer_multiple, devices, trainer_multiple)
        if (devices - trainer) % engine_devices == 0
    ]
    if len(fitting) <= num_wanted:
        return fitting
    wanted = [devices * (i + 1) / (num_wanted + 1) for i in range(num_wanted)]
    return sorted({min(fitting, key=lambda trainer: abs(trainer - share)) for share in wanted})
