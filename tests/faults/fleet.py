"""Engines, trainers and helpers of an asynchronous run that are killed and stopped at random moments.

    python -m tests.faults.fleet [--engines pretended|vllm] [--kills N] [--stops N] [--trainers N] [--workers N]
        [--raylets N] [--rounds N] [--seed N] [--dir DIR] [--json F] [--num-engines N] [--quick]

Runs of ``tools/train.py`` with a tiny model, ``rollout.mode: pinned`` and engines that are processes of Ray, which take
their weights from the store. With ``pretended`` they have no vLLM: a token is a hash of its response's seed, its place
and all bytes of the weights that the engine holds, so whatever goes wrong shows in the tokens; a step of such an engine
sleeps 20 ms. Signals come from another process, at moments, in an order and at engines that a seed draws: SIGKILL and
SIGSTOP of an engine while another one serves, SIGKILL of the trainer, of a reward worker and of Ray's raylet after a
step, of a worker after one that it was there for, so that it has loaded its rewards. A run that ends is started again
with the same command. The faults are dealt to rounds, each a run of its own.

Every round is compared with an undisturbed run, whose engines are in the trainer's process (with vllm: with one engine
that nobody strikes): rows of the records by step, prompt and sample (lost, doubled, with other tokens), and all metrics
but times. Seconds: *noticed*, from the signal until the scheduler ended the engine, or until the trainer's process was
gone; *back*, from the signal until the next life held its weights, or until the next step was sampled, beside how long
such a start took by itself. *Idle*: engines that serve and have nothing to do while responses wait.
Exit status 1 if anything was lost, doubled or different.
"""

from __future__ import annotations

import argparse
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from benchmarks.report import publish
from tests.distributed.conftest import write_world
from tests.faults.fleet_findings import (
    RAYLET,
    SIGNALS,
    TRAINER,
    WORKER,
    Play,
    Strike,
    compared,
    first_starts,
    recoveries,
    summary,
    unasked,
)
from tests.launching.launch import MARK, REPO, alive, free_port, marked
from tests.pretended.struck_fleet import LOG, Told

SCRIPT = "tests/distributed/fleet/run_struck_fleet.py"
LIMIT_S = 1800.0  # without any word of a run
GRACE_S = 20.0
SETTINGS = (
    "data={val_files: [], train_batch_size: 8}",
    "validation={test_freq: -1, val_before_train: false}",
    "aqn.enabled=false",
    "parallel={tensor: 1, sequence: false}",
    "checkpoint={export_hf: false, save_freq: 1, keep_checkpoints: 2}",
    "logging={tensorboard: false, dump_rollouts: -1, progress: false, num_text_samples: 0}",
)
OF_KIND: dict[
    str, tuple[str, int, int, int, str]
] = {  # gates, engines, seconds without a step, tokens of a response, rest of the engine's settings
    "pretended": ("[engine]", 3, 20, 64, "vllm: {max_num_seqs: 4}"),
    "calm": ("[engine]", 1, 20, 64, "vllm: {max_num_seqs: 4}"),
    "vllm": ("[]", 2, 60, 400, "ignore_eos: true, kv_cache_bytes: 16777216, vllm: {max_num_seqs: 4}"),
}


class Trainer:
    """A process of a run: a copy of this one, which has imported all, so that a start takes seconds."""

    def __init__(self, argv: Sequence[str], variables: dict[str, str], output: Path) -> None:
        self.status: int | None = None
        self._token = uuid.uuid4().hex
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(argv, {**variables, MARK: self._token}, output)

    def _become(self, argv: Sequence[str], variables: dict[str, str], output: Path) -> NoReturn:
        os.setsid()
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=path, **variables)
        sys.argv[:] = argv
        status = 1
        try:
            runpy.run_path(argv[0], run_name="__main__")
            status = 0
        except BaseException:  # noqa: BLE001 - nothing of this program may go on in the copy
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def has_ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def clear_up(self) -> int:
        """End what is left of it; returns the number of processes that were there after ``GRACE_S``."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
        until = time.monotonic() + GRACE_S
        while (left := [process for process in marked(self._token) if alive(process.pid)]) and time.monotonic() < until:
            time.sleep(0.2)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return len(left)


def command(kind: str, config: Path, run: Path, steps: int, engines: int) -> tuple[str, ...]:
    gates, _, timeout_s, tokens, rest = OF_KIND[kind]
    fleet = f"num_engines: {engines}, engine_timeout_s: {timeout_s}, engine_restarts: 100000"
    own = (
        f"trainer={{total_steps: {steps}, gates: {{disabled: {gates}}}, output_dir: {run}}}",
        f"data.max_response_length={tokens}",
        "rollout={placement: separate, mode: pinned, max_staleness: 1, n: 4, tensor_parallel_size: 1, "
        f"{fleet}, {rest}}}",
    )
    return (str(REPO / SCRIPT), kind, "--config", str(config), *SETTINGS, *own)


def play(argv: Sequence[str], folder: Path, todo: list[str], chance: random.Random, gap_s: float) -> Play:
    """Run a script until it ends well; faults are taken from ``todo`` as they are done.

    Raises:
        SystemExit: the run fails without a fault, or says nothing for ``LIMIT_S``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = Play(Told(folder / "told.jsonl"), folder)
    while True:
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        found.starts.append(time.monotonic())
        found.told.alive.clear()
        num_before, output = len(found.strikes), folder / f"output{len(found.starts)}.txt"
        trainer = Trainer(argv, {**variables, **address, LOG: str(folder / "told.jsonl")}, output)
        try:
            during(trainer, found, todo, chance, gap_s)
        finally:
            found.ends.append(time.monotonic())
            found.num_left += trainer.clear_up()
        found.told.read()
        if trainer.status == 0:
            return found
        if not any(strike.what in (TRAINER, RAYLET) for strike in found.strikes[num_before:]):
            raise SystemExit(f"the run ended with {trainer.status} by itself: see {output}")


def during(running: Trainer, found: Play, todo: list[str], chance: random.Random, gap_s: float) -> None:
    """Strike a run until its process ends."""
    heard_at = time.monotonic()
    next_at = heard_at + chance.uniform(0, 2 * gap_s)
    has_step, before, loaded = False, set[int](), set[int]()  # reward workers: of the last step, and of the one before
    while not running.has_ended():
        new = found.told.read()
        if any(line["what"] == "Deliver" for line in new):
            there = set(others(WORKER, running.pid))
            loaded, before = there & before if has_step else there, there  # the first have loaded before a step begins
            has_step = True
        heard_at = time.monotonic() if new else heard_at
        if time.monotonic() - heard_at > LIMIT_S:
            raise SystemExit(f"the run has said nothing for {LIMIT_S:g} s: see {found.folder}")
        if todo and time.monotonic() >= next_at:
            strike = struck(todo[0], running.pid, found, has_step, loaded, chance)
            if strike is not None:
                found.strikes.append(strike)
                todo.pop(0)
                next_at = strike.at + chance.uniform(0, 2 * gap_s)
        time.sleep(0.02)


def struck(
    what: str, trainer: int, found: Play, has_step: bool, loaded: set[int], chance: random.Random
) -> Strike | None:
    """Do it if it can be done now; ``loaded``: reward workers that one may strike."""
    if what in SIGNALS:
        known = {(s.trainer, s.engine, s.life) for s in found.strikes}
        well = {e: one for e, one in found.told.alive.items() if (trainer, e, one["life"]) not in known}
        can = [e for e, one in sorted(well.items()) if one["processes"]]
        can = [e for e in can if any(other["serves"] for name, other in well.items() if name != e)]
        if not can:
            return None
        engine = chance.choice(can)
        processes, strike = well[engine]["processes"], Strike(what, 0.0, trainer, engine, well[engine]["life"])
    else:
        processes, strike = others(what, trainer), Strike(what, 0.0, trainer)
        if what == WORKER:
            processes = [process for process in processes if process in loaded]
        if not has_step or not processes:
            return None
    strike.at = time.monotonic()
    try:
        os.kill(processes[0], SIGNALS.get(what, signal.SIGKILL))
    except ProcessLookupError:
        return None
    return strike


def others(what: str, trainer: int) -> list[int]:
    """Processes that are no engines."""
    if what == TRAINER:
        return [trainer]
    try:
        children = psutil.Process(trainer).children()
        if what == RAYLET:
            return [child.pid for child in children if child.name() == "raylet"]
        return [child.pid for child in children if "mega_rl.rewards" in " ".join(child.cmdline())]
    except psutil.NoSuchProcess:
        return []


def dealt(counts: dict[str, int], rounds: int, chance: random.Random) -> list[list[str]]:
    """The faults of every round, in their order."""
    hands: list[list[str]] = [[] for _ in range(rounds)]
    for what, number in counts.items():
        for i in range(number):
            hands[i % rounds].append(what)
    for hand in hands:
        chance.shuffle(hand)
    return hands


def measured(folder: Path, options: argparse.Namespace) -> int:
    kind, chance = options.engines, random.Random(options.seed)
    config = folder / "world" / "rl.yaml"
    if not config.exists():
        (folder / "world").mkdir(parents=True, exist_ok=True)
        write_world(folder / "world")
    reference, engines = folder / "reference", options.num_engines or OF_KIND[kind][1]
    calm = "calm" if kind == "pretended" else kind
    if not (reference / "run" / "checkpoints" / f"step_{options.steps:08d}").exists():
        play(command(calm, config, reference / "run", options.steps, 1), reference, [], chance, 1.0)
    counts = dict(zip((*SIGNALS, TRAINER, WORKER, RAYLET), options.counts, strict=True))
    hands, rounds = dealt(counts, options.rounds, chance), list[dict[str, Any]]()
    for number, todo in enumerate(hands):
        place, load = folder / f"round{number}", os.getloadavg()[0]
        found = play(command(kind, config, place / "run", options.steps, engines), place, todo, chance, options.gap)
        if todo and number + 1 == len(hands) and len(hands) < 3 * options.rounds:
            hands.append([])
        if todo:  # the run came to its end before
            hands[number + 1].extend(todo)
        lines = found.told.lines
        rounds.append(
            {
                **compared(place / "run", reference / "run"),
                "strikes": recoveries(found),
                "first": first_starts(found),
                "unasked": unasked(found),
                "left": found.num_left,
                "idle_s": [line["seconds"] for line in lines if line["what"] == "idle"],
                "engine_s": engines * sum(e - s for s, e in zip(found.starts, found.ends, strict=True)),
                "load": load,
            }
        )
        loads = f"Load of the machine: {min(r['load'] for r in rounds):.0f} to {max(r['load'] for r in rounds):.0f}."
        results = {"rounds": rounds}
        publish("Faults of a fleet", f"{summary(rounds)} {loads}", "cpu", results, options.json)
        shutil.rmtree(place / "run" / "checkpoints", ignore_errors=True)
    is_well = all(not (r["lost"] or r["doubled"] or r["different"]) for r in rounds)
    return 0 if is_well and (kind == "vllm" or all(r["metrics_equal"] for r in rounds)) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", choices=["pretended", "vllm"], default="pretended")
    for name, what in (("kills", "SIGKILLs of engines"), ("stops", "SIGSTOPs of engines"), ("trainers", "trainers")):
        parser.add_argument(f"--{name}", type=int, help=f"number of {what}")
    parser.add_argument("--num-engines", type=int)
    parser.add_argument("--workers", type=int, help="number of reward workers")
    parser.add_argument("--raylets", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="of a round")
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="of all runs, kept; default: a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    numbers = {"kills": 100, "stops": 20, "trainers": 20, "workers": 20, "raylets": 5, "rounds": 10, "steps": 16}
    if options.engines == "vllm":
        numbers = {"kills": 5, "stops": 2, "trainers": 0, "workers": 0, "raylets": 0, "rounds": 1, "steps": 8}
    if options.quick:
        numbers = {name: min(number, 1) for name, number in numbers.items()} | {"steps": 4}
    for name, number in numbers.items():
        if getattr(options, name) is None:
            setattr(options, name, number)
    options.counts = [getattr(options, name) for name in ("kills", "stops", "trainers", "workers", "raylets")]
    with tempfile.TemporaryDirectory() as scratch:
        return measured(options.dir or Path(scratch), options)


if __name__ == "__main__":
    sys.exit(main())
