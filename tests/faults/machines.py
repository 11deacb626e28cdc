"""Whole runs on several machines, of which some are lost.

    python -m tests.faults.machines [--engines vllm|pretended|both] [--modes MODE ...] [--dir DIR] [--json F]

The machines are namespaces of this host (``tests/launching/machines.py``): addresses, host names, processes and disks
of their own, and one directory that all of them see, as a network file system. Machine 0 has the head of a Ray cluster
and the trainer's rank 0, machine 1 has rank 1, and every further machine is a node of the cluster with room for one
engine. A machine that is lost loses its link first and then its processes: none of them says a last word.

Every run is compared with the same run on one machine without namespaces: rows of the records by step, prompt and
sample (lost, doubled, with other tokens), and with ``pinned`` all metrics but times, bit for bit. Engines are vLLM on
the CPU, which samples one response at a time and keeps no prefix, so that what it answers does not depend on what else
it was asked for; ``--engines pretended`` takes engines without vLLM, as ``tests/faults/fleet.py`` does.
Exit status 1 if anything was lost, doubled or different, 2 with the reason where this host cannot have machines.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import publish, table
from tests.distributed.conftest import write_world
from tests.faults.fleet_findings import compared
from tests.launching.launch import LIMIT_S, Running, ranks
from tests.launching.machines import Machines, machines, obstacle
from tests.launching.training import STRUCK_FLEET, sampled, train
from tests.pretended.engine_process import PAUSE
from tests.pretended.struck_fleet import LOG, Told, go

HEAD, OTHER_RANK, FIRST, SECOND = range(4)  # machines: two with a rank of the trainer, two with an engine
TRAINERS = (HEAD, OTHER_RANK)
STEPS, SAMPLES = 5, 4
RAY = str(Path(sys.executable).with_name("ray"))
QUIET = ("--block", "--disable-usage-stats", "--object-store-memory", str(80 << 20))
# A node that does not answer five times is lost: until then Ray takes it for alive, by itself for half a minute.
LOOKS = (
    '{"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 1000, '
    '"health_check_failure_threshold": 5}'
)
SAY_NODES = """
import ray
ray.init(address="auto")
print([(node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"]])
"""
PORTS = {"ray": "6379", "torchrun": "29400"}
SETTINGS = (
    "data={val_files: [], train_batch_size: 4, max_response_length: 48}",
    "validation={test_freq: -1, val_before_train: false}",
    "aqn.enabled=false",
    "parallel={tensor: 1, sequence: false}",
    "platform.num_threads=1",  # the machines share the host's processors
    "checkpoint={export_hf: false, save_freq: 1, keep_checkpoints: 0}",
    "logging={tensorboard: false, dump_rollouts: -1, progress: false, num_text_samples: 0}",
)
GATES = {"vllm": "[]", "pretended": "[engine]"}


def settings(kind: str, mode: str, run: Path, engines: int) -> tuple[str, ...]:
    """Of a run with these engines (vllm or pretended)."""
    alone = "vllm: {max_num_seqs: 1, enable_prefix_caching: false}"
    return (
        *SETTINGS,
        f"trainer={{total_steps: {STEPS}, gates: {{disabled: {GATES[kind]}}}, output_dir: {run}}}",
        f"rollout={{placement: separate, mode: {mode}, max_staleness: 1, n: {SAMPLES}, tensor_parallel_size: 1, "
        f"num_engines: {engines}, engine_timeout_s: 20, ignore_eos: true, kv_cache_bytes: 16777216, {alone}}}",
    )


def on_one_machine(kind: str, config: Path, run: Path) -> None:
    """The run that nothing happens to: ``pinned``, two ranks and two engines of this machine."""
    given = settings(kind, "pinned", run, engines=2)
    if kind == "vllm":
        train(config, run, *given).check()
    else:
        log = run.with_suffix(".told")
        ranks(STRUCK_FLEET, "calm", "--config", config, *given, nproc=2, env={LOG: str(log)}).check()


class Cluster:
    """Ray on the machines: its head on the first one, and nodes with room for one engine."""

    def __init__(self, hosts: Machines, stack: ExitStack) -> None:
        self.hosts, self._stack = hosts, stack
        self._ray(HEAD, "--head", "--port", PORTS["ray"], "--include-dashboard", "false", "--system-config", LOOKS)

    def join(self, *numbers: int) -> None:
        """Have machines join, all at a time."""
        for running in [self._ray(number, wait=False) for number in numbers]:
            running.wait_for("Ray runtime started", LIMIT_S)

    def node_of(self, number: int) -> str:
        """In Ray's words."""
        say = (
            "import ray; ray.init(address='auto'); print([(n['NodeManagerAddress'], n['NodeID']) for n in ray.nodes()])"
        )
        said = self.hosts.run(HEAD, (sys.executable, "-c", say)).check().stdout
        return dict(re.findall(r"\('([\d.]+)', '(\w+)'\)", said))[self.hosts.address(number)]

    def _ray(self, number: int, *words: str, wait: bool = True) -> Running:
        place = words or ("--address", f"{self.hosts.name(HEAD)}:{PORTS['ray']}")
        room = "0" if words else "1"
        command = (RAY, "start", *place, "--node-ip-address", self.hosts.address(number), "--num-cpus", room, *QUIET)
        running = self._stack.enter_context(self.hosts.started(number, command))
        if wait:
            running.wait_for("Ray runtime started", LIMIT_S)
        return running


@dataclass
class Run:
    """One run on the cluster, with its restarts."""

    cluster: Cluster
    kind: str
    mode: str
    config: Path
    output: Path
    engines: int = 2
    where: tuple[int, ...] = TRAINERS
    running: list[Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = self.output.with_suffix(".told")
        self.told = Told(self.log)

    @contextmanager
    def started(self, held: Sequence[int] = ()) -> Iterator[None]:
        """A torchrun on each machine of the trainer; the loop waits before these steps until it is let go."""
        kind = ",".join([self.kind, *map(str, held)])
        arguments = (kind, "--config", self.config, *settings(self.kind, self.mode, self.output, self.engines))
        meeting = ("--rdzv-backend", "c10d", "--rdzv-id", self.output.name)
        meeting += ("--rdzv-endpoint", f"{self.cluster.hosts.name(HEAD)}:{PORTS['torchrun']}")
        launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting)
        env = {"RAY_ADDRESS": "auto", LOG: str(self.log)}
        self.told.alive.clear()
        with ExitStack() as stack:
            command = (*launcher, STRUCK_FLEET, *map(str, arguments))
            self.running = [
                stack.enter_context(self.cluster.hosts.started(number, command, env=env)) for number in self.where
            ]
            yield

    def wait(self, is_so: Callable[[], bool]) -> None:
        self.told.wait_for(is_so, self.running[0], LIMIT_S)

    def is_held_with_all(self, step: int) -> bool:
        """Whether the loop waits before a step, and every engine serves."""
        served = [engine["serves"] for engine in self.told.alive.values()]
        return self.told.has("Held", step=step) and len(served) == self.engines and all(served)

    def in_hand(self, engine: int) -> int:
        """Responses that an engine was given in its first life and has not ended."""
        lines = [line for line in self.told.lines if line.get("engine") == engine and line.get("life") == 0]
        words = [line["what"] for line in lines]
        return SAMPLES * words.count("Issue") - words.count("Answered")

    def kill(self) -> None:
        """Kill the trainer on all of its machines: its launchers, with which the ranks end."""
        for number in self.where:
            for process in self.cluster.hosts.processes(number):
                if "torch.distributed.run" in " ".join(command_of(process)):
                    process.kill()
        for running in self.running:
            running.wait(LIMIT_S)

    def finish(self) -> str:
        """Wait for the end of a run that nothing happens to any more; returns what rank 0 said."""
        for running in self.running:
            status = running.wait(LIMIT_S)
            assert status == 0, running.output()[-8000:]
        return self.running[0].output()


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def lost_and_resumed(cluster: Cluster, kind: str, mode: str, config: Path, output: Path) -> dict[str, Any]:
    """An engine's machine is lost while the engine has responses in hand; two steps later the trainer is killed, and
    the same run goes on with the engine that is left.
    """
    run = Run(cluster, kind, mode, config, output)
    pause = Path(f"{run.log}{PAUSE}")
    with run.started(held=(1, 3)):
        run.wait(lambda: run.is_held_with_all(1))
        node = cluster.node_of(SECOND)
        (victim,) = (engine for engine, found in run.told.alive.items() if found["node"] == node)
        pause.touch()  # pretended engines make no step
        go(run.log, 1)
        run.wait(lambda: run.told.has("Issue", engine=victim, step=2))
        cluster.hosts.lose(SECOND)
        in_hand, begin = run.in_hand(victim), time.monotonic()
        pause.unlink()
        run.wait(lambda: run.told.has("Kill", engine=victim))
        noticed_s = time.monotonic() - begin
        run.wait(lambda: run.told.has("Held", step=3))
        run.kill()
    run.engines = 1  # there is no room for two
    with run.started():
        said = run.finish()
    (resumed,) = re.findall(r"^resuming after step (\d+)", said, re.MULTILINE)
    kept = re.findall(r"^attached to (\d+) rollout engines", said, re.MULTILINE)
    return {
        "in_hand": in_hand,
        "noticed_s": noticed_s,
        "resumed_after": int(resumed),
        "engines_kept": sum(map(int, kept)),
    }


def oldest(run: Path) -> int:
    """Staleness of the oldest token that a run learned from; step k (from 1) trains version k - 1."""
    ages = [0]
    for row in sampled(run):
        spans = row.get("spans", [{"version": row["weight_version"]}])
        ages += [row["step"] - 1 - span["version"] for span in spans]  # type: ignore[operator, attr-defined]
    return max(ages)


def scene(cluster: Cluster, kind: str, mode: str, config: Path, output: Path, reference: Path) -> dict[str, Any]:
    """``lost_and_resumed`` beside the run on one machine, which had the same prompts."""
    if SECOND not in cluster.hosts:  # it was lost in the scene before
        cluster.hosts.add(SECOND)
        cluster.join(SECOND)
    found = lost_and_resumed(cluster, kind, mode, config, output)
    compare = compared(output, reference)
    if mode == "in_flight":  # tokens depend on the clock: only that each response is there once
        del compare["different"], compare["metrics_equal"]
    return {"engines": kind, "mode": mode, **found, **compare, "oldest": oldest(output)}


def is_well(found: dict[str, Any]) -> bool:
    is_same = not found.get("different") and found.get("metrics_equal", True)
    return is_same and not found["lost"] and not found["doubled"] and found["oldest"] <= 1


@contextmanager
def cluster_of(number: int, *shared: Path) -> Iterator[Cluster]:
    """Machines that share these directories, and Ray on all but the one that has rank 1 only."""
    with machines(number, shared) as hosts, ExitStack() as stack:
        cluster = Cluster(hosts, stack)
        cluster.join(*range(FIRST, number))
        yield cluster


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", choices=[*GATES, "both"], default="both")
    parser.add_argument("--modes", nargs="+", choices=["pinned", "in_flight"], default=["pinned", "in_flight"])
    parser.add_argument("--dir", type=Path, help="of all runs, kept; default: a temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (reason := obstacle()) is not None:
        print(f"error: this host cannot have machines: {reason}", file=sys.stderr)
        return 2
    kinds = list(GATES) if options.engines == "both" else [options.engines]
    rows = []
    with tempfile.TemporaryDirectory(prefix="machines_") as scratch:
        folder = options.dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write_world(folder)
        for kind in kinds:
            on_one_machine(kind, folder / "rl.yaml", folder / f"{kind}_alone")
        with cluster_of(4, folder) as cluster:
            for kind in kinds:
                for mode in options.modes:
                    alone, output = folder / f"{kind}_alone", folder / f"{kind}_{mode}"
                    rows.append(scene(cluster, kind, mode, folder / "rl.yaml", output, alone))
                    names = list(dict.fromkeys(name for row in rows for name in row))
                    text = table(names, [[row.get(name, "-") for name in names] for row in rows])
                    publish("Runs on several machines", text, "cpu", {"runs": rows}, options.json)
    return 0 if all(map(is_well, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
