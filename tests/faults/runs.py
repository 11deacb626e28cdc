"""What becomes of a run to which something bad happens: how it ends or goes on, what is lost, what is left behind.

    python -m tests.faults.runs [--quick] [--only WORDS ...] [--list] [--json PATH]
    python -m tests.faults.runs --rows [WORDS ...] [--json PATH]

Small runs on two processes of a CPU, supervised where the engine is not what is hit. Each fault has a run of its own, a
temporary folder and a shared-memory file system of its own (in namespaces of this program, where the system has them).
Afterwards the run is resumed, and compared with one that nothing happened to: all metrics but times and memory, and the
bytes of the exported weights. Columns:

    outcome       ended: exit status of torchrun; went on: the run came to its end by itself
    seconds       from the fault until torchrun had ended, or until the next step was logged
    all gone      from the end of torchrun until no process of the run was there, in seconds
    steps lost    finished steps that the resumed run made again
    left          processes after 20 s, shared-memory files, entries of the temporary folder: before / after the
                  resume
    equal         whether metrics and weights are those of the run that nothing happened to

``--rows`` runs the tests that docs/reliability.md names beside a fault and prints what they took: see rows.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from benchmarks.report import publish, table
from tests.distributed import conftest
from tests.faults.rows import publish_rows
from tests.launching import training
from tests.launching.launch import ENGINE, TRAINER, Running, ranks, started, torchrun_command

MOMENT = "MEGA_RL_STRUCK"  # as ``struck.py`` has it
INSIDE = "MEGA_RL_FAULTS_INSIDE"  # set in the namespaces
SHM = Path("/dev/shm")
STRUCK = Path(__file__).with_name("struck.py")
LIMIT_S = 600.0  # of one run: on a machine that does much else, a start alone takes minutes
STALL_S = 8
SETTINGS = {
    "sft": ("trainer.total_steps=6", "checkpoint.save_freq=2", "validation.test_freq=4"),
    "rl": ("trainer.total_steps=4", "checkpoint.save_freq=2", "validation.test_freq=2", "aqn.num_stages=2"),
}
KINDS_OF_FILES = (
    "megatron/__0_0.distcp",
    "megatron/__1_0.distcp",
    "megatron/.metadata",
    "megatron/common.pt",
    "megatron/metadata.json",
    "generators.pt",
    "progress.json",
    "manifest.json",
)


@dataclass(frozen=True)
class Fault:
    """What happens, at which place of which step of which stage (see ``struck.py``), to a run with some settings."""

    name: str
    stage: str
    place: str
    step: int
    act: str
    settings: tuple[str, ...] = ()
    is_quick: bool = False
    disk: str = ""  # options of a file system for the output directory


@dataclass
class Outcome:
    """The figures of one fault."""

    name: str
    outcome: str = ""
    seconds: float | None = None
    gone_s: float | None = None
    steps_lost: int | None = None
    left: str = ""
    equal: str = ""
    entries: list[str] = field(default_factory=list)  # of the temporary folder at the end
    said: list[str] = field(default_factory=list)

    def row(self) -> list[Any]:
        def shown(value: Any) -> Any:
            return "" if value is None else round(value, 1) if isinstance(value, float) else value

        return [
            self.name,
            self.outcome,
            *map(shown, (self.seconds, self.gone_s, self.steps_lost)),
            self.left,
            self.equal,
        ]


def faults() -> list[Fault]:
    """Every fault that happens to a running run."""
    found = []
    phases = [("sft", "start", 0), ("sft", "update", 3), ("sft", "save", 4), ("sft", "validate", 4)]
    phases += [("rl", "sync", 3), ("rl", "generate", 3), ("rl", "validate", 2)]
    for stage, place, step in phases:
        for whom in ("rank 0", "rank 1", "torchrun"):
            is_quick = (place, whom) in (("update", "rank 1"), ("generate", "torchrun"))
            found.append(Fault(f"kill -9 of {whom} in {place}", stage, place, step, f"kill {whom}", (), is_quick))
    stall = (f"trainer.stall_timeout_s={STALL_S}",)
    kill, stop = "kill -9 of", "SIGSTOP of"
    found += [
        Fault(f"{kill} a reward worker in generate", "rl", "generate", 3, "kill worker", (), True),
        Fault(f"{kill} a reward worker in update", "rl", "update", 3, "kill worker"),
        Fault(f"{kill} a reward worker in validate", "rl", "validate", 2, "kill worker"),
        Fault(f"{kill} all reward workers in generate", "rl", "generate", 3, "kill workers"),
        Fault(f"{kill} the checkpoint writers of all ranks", "sft", "writer", 4, "kill writer", stall, True),
        Fault(f"{kill} them, asynchronous", "sft", "writer", 4, "kill writer", (*stall, "checkpoint.async_save=true")),
        Fault(f"{stop} rank 1 in update", "sft", "update", 3, "stop rank 1", stall),
        Fault(f"{stop} rank 1 in save", "sft", "save", 4, "stop rank 1", stall),
        Fault(f"{stop} rank 0 in generate", "rl", "generate", 3, "stop rank 0", stall),
        Fault(f"{stop} rank 1 in generate", "rl", "generate", 3, "stop rank 1", stall),
        Fault(f"{stop} a reward worker", "rl", "generate", 3, "stop worker", ("reward_workers.timeout_s=3",)),
        Fault("no more memory for rank 1", "sft", "update", 3, "no_memory rank 1"),
        Fault("full disk in save", "sft", "save", 4, "full_disk rank 0", (), False, "size=64m"),
        Fault("read-only disk from the start", "sft", "start", 0, "", (), False, "size=64m,ro"),
        Fault("slow disk: 2 s for each sync of a file", "sft", "update", 1, "slow_storage", stall),
        Fault("the wall's clock jumps by a day each second, rank 0", "sft", "update", 2, "wrong_clock rank 0", stall),
    ]
    return found


class Place:
    """Where the runs of this program are."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._number = 0

    @cached_property
    def world(self) -> training.TinyWorld:
        return conftest.write_world(_made(self.root / "world"))

    def command(self, stage: str, output_dir: Path, *settings: str) -> list[str]:
        config = str(getattr(self.world, stage))
        return ["--config", config, f"trainer.output_dir={output_dir}", *SETTINGS[stage], *settings]

    def new(self, options: str) -> tuple[Path, Path]:
        """An output directory, on a file system of its own if options are given, and a temporary folder."""
        self._number += 1
        output_dir, scratch = self.root / f"run{self._number}", _made(self.root / f"t{self._number}")
        if options:
            mounted = ("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(_made(output_dir)))
            subprocess.run(mounted, check=True)
        return output_dir, scratch

    @cache  # noqa: B019 - as long as the program
    def reference(self, stage: str) -> Path:
        """A run that nothing happens to."""
        output_dir = self.root / f"reference_{stage}"
        resumed(self, stage, output_dir)
        return output_dir


def resumed(place: Place, stage: str, output_dir: Path, *settings: str) -> str:
    """Run to the end, from the newest checkpoint if there is one; returns what was said."""
    modules = ENGINE if stage == "rl" else TRAINER
    arguments = ("never", 0, "nothing", *place.command(stage, output_dir, *settings))
    launched = ranks(STRUCK, *arguments, timeout=LIMIT_S, modules=modules)
    return launched.check().stdout


def differences(place: Place, stage: str, output_dir: Path) -> str:
    """In what a run differs from the one that nothing happened to."""
    expected, found = training.metrics_of(place.reference(stage)), training.metrics_of(output_dir)
    parts = []
    if list(expected) != list(found):
        parts.append(f"steps {sorted(set(expected) ^ set(found))}")
    names = [
        f"{name} of {step}"
        for step in expected.keys() & found.keys()
        for name, value in training.computed(expected[step]).items()
        if training.computed(found[step]).get(name) != value
    ]
    parts += names[:3]
    weights = [training.digests(d / "huggingface") for d in (place.reference(stage), output_dir)]
    return ", ".join(parts + ["weights"] * (weights[0] != weights[1])) or "yes"


def left_behind(token: str, scratch: Path, shm: set[str]) -> str:
    processes = len(training.executors(token))
    return f"{processes}, {len(set(os.listdir(SHM)) - shm)}, {len(os.listdir(scratch))}"


def steps_logged(output_dir: Path) -> list[int]:
    file = output_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    with contextlib.suppress(ValueError):  # a line that is being written
        return [json.loads(line)["step"] for line in lines]
    return []


def watch(running: Running, output_dir: Path, moment: Path) -> tuple[int, float | None, float | None, int]:
    """Exit status; seconds from the fault to the end, and to the next logged step; finished steps at the fault."""
    at = next_step_s = None
    before = 0
    deadline = time.monotonic() + LIMIT_S
    while running.process.poll() is None:
        assert time.monotonic() < deadline, f"not at its end after {LIMIT_S:.0f} s:\n{running.output()[-3000:]}"
        if at is None and moment.exists() and (text := moment.read_text()):
            at, before = float(text), len(steps_logged(output_dir))
        elif at is not None and next_step_s is None and len(steps_logged(output_dir)) > before:
            next_step_s = time.monotonic() - at
        time.sleep(0.02)
    status, end = running.process.returncode, time.monotonic()
    if at is None and moment.exists():
        at = float(moment.read_text())
    return status, None if at is None else end - at, next_step_s, max(steps_logged(output_dir), default=0)


def inject(place: Place, fault: Fault) -> Outcome:
    """The run of a fault, and the one that goes on from it."""
    output_dir, scratch = place.new(fault.disk)
    moment, token, shm = scratch.parent / f"{scratch.name}.moment", uuid.uuid4().hex, set(os.listdir(SHM))
    arguments = place.command(fault.stage, output_dir, *fault.settings)
    if not fault.act:  # it is there from the start
        moment.write_text(str(time.monotonic()))
    environment = {training.RUN_MARK: token, "TMPDIR": str(scratch), MOMENT: str(moment)}
    found = Outcome(fault.name)
    with started(torchrun_command(STRUCK, fault.place, fault.step, fault.act, *arguments), env=environment) as running:
        status, seconds, next_step_s, reached = watch(running, output_dir, moment)
        end = time.monotonic()
        while training.executors(token) and time.monotonic() < end + 20.0:
            time.sleep(0.02)
        found.gone_s, found.left = time.monotonic() - end, left_behind(token, scratch, shm)
        reached = max(steps_logged(output_dir), default=reached)
        found.said = [line for line in running.output().splitlines() if "error: " in line or "warning: " in line][:4]
        log = running.output()
    goes_on = status == 0
    found.outcome = "went on" if goes_on else f"ended, {status}"
    found.seconds = next_step_s if goes_on else seconds
    if seconds is None:
        found.outcome, found.said = f"the fault did not happen ({status})", log.splitlines()[-20:]
        return found
    if not goes_on:
        if fault.disk:
            subprocess.run(("umount", str(output_dir)) if "ro" in fault.disk else ("rm", str(output_dir / "filler")))
        with other_folder(scratch):
            said = resumed(place, fault.stage, output_dir)
        start = said.partition("resuming after step ")[2].split()
        found.steps_lost = max(0, reached - (int(start[0]) if start else 0))
        found.left += f" / {left_behind(token, scratch, shm)}"
    found.entries = sorted(os.listdir(scratch))
    found.equal = differences(place, fault.stage, output_dir)
    return found


@contextlib.contextmanager
def other_folder(scratch: Path) -> Iterator[None]:
    """The temporary folder of what is started in this block."""
    before = os.environ["TMPDIR"]
    os.environ["TMPDIR"] = str(scratch)
    try:
        yield
    finally:
        os.environ["TMPDIR"] = before


def with_six_steps(place: Place) -> Path:
    """A copy of a supervised run that was ended after its checkpoint of step 4."""
    output_dir, _ = place.new("")
    shutil.copytree(place.reference("sft"), output_dir)
    shutil.rmtree(training.checkpoint(output_dir, 6))
    shutil.rmtree(output_dir / "huggingface")
    return output_dir


def damaged(place: Place, name: str, change: Callable[[Path], None]) -> Outcome:
    """A file of the newest checkpoint is changed, and the run resumed."""
    output_dir = with_six_steps(place)
    change(training.checkpoint(output_dir, 4))
    begin = time.monotonic()
    said = resumed(place, "sft", output_dir)
    seconds, found = time.monotonic() - begin, Outcome(name, "passed over, went on")
    if "passing over damaged checkpoint" not in said or "resuming after step 2" not in said:
        found.outcome = "NOT NOTICED"
    found.seconds, found.steps_lost, found.equal = seconds, 2, differences(place, "sft", output_dir)
    found.said = [line for line in said.splitlines() if "passing over" in line]
    return found


def flip(name: str) -> Callable[[Path], None]:
    """One bit in the middle of a file."""

    def change(checkpoint: Path) -> None:
        content = bytearray((checkpoint / name).read_bytes())
        content[len(content) // 2] ^= 1
        (checkpoint / name).write_bytes(content)

    return change


def two_runs(place: Place) -> Outcome:
    """A second run is started with the output directory of one that has begun."""
    output_dir, scratch = place.new("")
    token, shm = uuid.uuid4().hex, set(os.listdir(SHM))
    command = place.command("sft", output_dir)
    environment = {training.RUN_MARK: token, "TMPDIR": str(scratch), MOMENT: str(scratch.parent / "two.moment")}
    found = Outcome("two runs in one directory: the second one")
    with started(torchrun_command(STRUCK, "update", 2, "slow_storage", *command), env=environment) as first:
        while not steps_logged(output_dir):
            assert first.process.poll() is None, first.output()
            time.sleep(0.05)
        begin = time.monotonic()
        with started(torchrun_command(training.TRAIN, *command), env=environment) as second:
            status = second.wait(LIMIT_S)
            found.seconds = time.monotonic() - begin
            found.said = [line for line in second.output().splitlines() if line.startswith("error: ")]
        found.outcome = f"ended, {status}; the first {'went on' if first.wait(LIMIT_S) == 0 else 'ENDED'}"
    found.left = left_behind(token, scratch, shm)
    found.equal = differences(place, "sft", output_dir)
    return found


def storage_faults(place: Place) -> dict[str, Callable[[], Outcome]]:
    """What is done to files between two runs, and two runs at once."""
    found: dict[str, Callable[[], Outcome]] = {}
    for file in KINDS_OF_FILES:
        name = f"a bit of {file} flipped"
        found[name] = lambda name=name, file=file: damaged(place, name, flip(file))  # type: ignore[misc]
    name = "a shard is missing"
    found[name] = lambda: damaged(place, "a shard is missing", lambda c: (c / "megatron/__1_0.distcp").unlink())
    found["two runs in one directory: the second one"] = lambda: two_runs(place)
    return found


def run(arguments: argparse.Namespace, root: Path) -> None:
    place = Place(root)
    cases: dict[str, Callable[[], Outcome]] = {
        fault.name: lambda fault=fault: inject(place, fault)  # type: ignore[misc]
        for fault in faults()
        if fault.is_quick or not arguments.quick
    }
    cases |= {} if arguments.quick else storage_faults(place)
    if arguments.only:
        cases = {name: cases[name] for words in arguments.only for name in cases if words in name}
    if arguments.list:
        print("\n".join(cases))
        return
    outcomes, load = [], os.getloadavg()[0]
    for name, case in cases.items():
        begin = time.monotonic()
        try:
            outcome = case()
        except AssertionError as error:
            outcome = Outcome(name, "FAILED", said=str(error).splitlines()[-20:])
        outcomes.append(outcome)
        print(json.dumps({**vars(outcome), "took_s": time.monotonic() - begin}), file=sys.stderr, flush=True)
    header = ["fault", "outcome", "seconds", "all gone", "steps lost", "left", "equal"]
    text = table(header, [outcome.row() for outcome in outcomes])
    text += f"\n\nLoad of the machine: {load:.0f} before, {os.getloadavg()[0]:.0f} after."
    publish("Faults", text, "cpu", {"faults": [vars(outcome) for outcome in outcomes]}, arguments.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a handful of them")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="those whose names have these words in them")
    parser.add_argument("--list", action="store_true", help="their names only")
    parser.add_argument(
        "--rows", nargs="*", metavar="WORDS", help="the faults of docs/reliability.md that tests inject"
    )
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser.parse_args()


def enter_namespaces() -> None:
    """Start this program again where file systems can be mounted, and where shared memory is its own."""
    mount = f'mount -t tmpfs tmpfs {SHM} && exec "$@"'
    command = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    if subprocess.run((*command, "true"), capture_output=True, check=False).returncode != 0:
        sys.exit("error: this system allows no user namespaces, in which disks can be made full: allow them")
    os.environ[INSIDE] = "1"
    os.execvp(command[0], (*command, sys.executable, "-m", "tests.faults.runs", *sys.argv[1:]))


def main() -> None:
    arguments = parse()
    if arguments.rows is not None:
        sys.exit(publish_rows(arguments.rows, arguments.json))
    if not arguments.list and INSIDE not in os.environ:
        enter_namespaces()
    with tempfile.TemporaryDirectory(prefix="faults_") as root:
        os.environ["TMPDIR"] = str(_made(Path(root) / "t0"))
        run(arguments, Path(root))


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


if __name__ == "__main__":
    main()
