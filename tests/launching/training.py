"""Runs of ``tools/train.py``, and what is read of what they leave behind."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.launching.launch import LIMIT_S, REPO, TRAINER, Launched, alive, ranks, started, torchrun_command

TRAIN = REPO / "tools" / "train.py"
COUNTED = REPO / "tests" / "launching" / "counted_collectives.py"
HELD = REPO / "tests" / "distributed" / "stages" / "run" / "run_held.py"
STRUCK = REPO / "tests" / "distributed" / "stages" / "run" / "run_struck_stage.py"
# What differs between two runs of the same computation.
CLOCKS = (
    "time/",
    "throughput/",
    "memory/",
    "device/",
    "fleet/",
    "bridge/seconds",
    "bridge/gb_per_s",
    "bridge/plan_s",
    "bridge/pack_s",
    "bridge/transfer_s",
    "bridge/write_s",
    "bridge/verify_s",
    "rollout/tokens_per_s",
)
RUN_MARK = "MEGA_RL_TEST_RUN"
STRUCK_FLEET = "tests/distributed/fleet/run_struck_fleet.py"
STRUCK_LOG = "MEGA_RL_STRUCK_FLEET"  # the file that such a run writes its lines to
# Over a world's RL: of runs whose engines are pretended.
VALIDATION_GATE = "gates/validation_"  # how names of metrics begin that depend on which engine answered
FLEET_SETTINGS = (
    "validation={test_freq: 2, val_before_train: true}",
    "rollout={placement: separate, n: 2, tensor_parallel_size: 1}",
    "algorithm={dynamic_sampling: {enabled: true, budget: 3}, minibatches_per_step: 2}",
    "aqn.enabled=false",
    "bridge.verify=off",
    "parallel={tensor: 1, sequence: false}",
    "trainer={total_steps: 4, gates: {disabled: [engine]}}",
    "checkpoint={export_hf: false, save_freq: 1, keep_checkpoints: 0}",
    "logging={tensorboard: false, dump_rollouts: -1, progress: false, num_text_samples: 0}",
)
PINNED_TWO = ("rollout.mode=pinned", "rollout.max_staleness=1", "rollout.num_engines=2")

RL = """
model: {{path: {model}, dtype: float32}}
data:
  train_files: [{train}]
  val_files: [{val}]
  train_batch_size: 4
  max_prompt_length: 8
  max_response_length: 5
rollout: {{tensor_parallel_size: 2, n: 4, kv_cache_bytes: 16777216}}
bridge: {{verify: all}}
aqn: {{enabled: true, sigma_start: 0.2, sigma_end: 0.05, num_stages: 3}}
rewards:
  - {{name: exact_match}}
  - {{name: '{reward}:digits', weight: 0.5}}
optimizer: {{lr: 3.0e-4}}
parallel: {{tensor: 2, sequence: true}}
trainer: {{total_steps: 6}}
checkpoint: {{save_freq: 2}}
validation: {{test_freq: 3, n: 2}}
logging: {{num_text_samples: 8}}
platform: {{name: cpu}}
"""
SFT = """
model: {{path: {model}, dtype: float32}}
data:
  train_files: [{sft}]
  val_files: [{sft_val}]
  train_batch_size: 16
  max_prompt_length: 8
  max_response_length: 5
optimizer: {{lr: 3.0e-3, schedule: cosine, warmup_steps: 2}}
parallel: {{tensor: 2, sequence: true}}
trainer: {{stage: sft, total_steps: 8}}
checkpoint: {{save_freq: 2}}
validation: {{test_freq: 4}}
platform: {{name: cpu}}
"""
REWARD = '''
def digits(data_source, solution_str, ground_truth, extra_info):
    """The share of digits among five characters: random weights get some of it, so that samples differ."""
    return sum(character in "0123456789" for character in solution_str) / 5
'''


@dataclass(frozen=True)
class TinyWorld:
    """A small model with random weights, additions to learn, and configurations that name both."""

    model: Path  # Hugging Face directory
    sft_rows: Path  # JSONL
    prompts: Path  # JSONL
    rl: Path  # configuration file, as ``RL`` has it
    sft: Path  # configuration file, as ``SFT`` has it


def train(config: Path, output_dir: Path, *overrides: str, nproc: int = 2, timeout: float = LIMIT_S) -> Launched:
    """Run ``tools/train.py`` under torchrun, or as one plain process for ``nproc`` 0; nothing of it may outlive it."""
    arguments = ("--config", config, f"trainer.output_dir={output_dir}", *overrides)
    plain = (sys.executable, str(TRAIN), *map(str, arguments))
    command = torchrun_command(TRAIN, *arguments, nproc=nproc) if nproc else plain
    token, begin = uuid.uuid4().hex, time.monotonic()
    with started(command, env={RUN_MARK: token}) as running:
        returncode = running.wait(timeout)
        seconds = time.monotonic() - begin
        left = survivors(token)
        launched = Launched(running.args, returncode, running.output(), seconds)
    assert not left, f"still running after the end of {' '.join(command)}: {left}"
    return launched


def copies(
    config: Path,
    output_dir: Path,
    *overrides: str,
    nproc: int = 2,
    timeout: float = LIMIT_S,
    modules: tuple[str, ...] = TRAINER,
    struck_after: int | None = None,
    counted: Path | None = None,
) -> Launched:
    """``train`` in copies of a warm process (``ranks``); all of them are killed in the step after ``struck_after``.

    For every run that is not the first of its kind: what ``train`` shows of starts and ends is shown once.
    ``counted``: the log in which ``counted_collectives`` writes down what the ranks ask of each other.
    """
    script, first = (TRAIN, ()) if struck_after is None else (STRUCK, (struck_after,))
    if counted is not None:
        script, first = COUNTED, (counted,)
    arguments = (*first, "--config", config, f"trainer.output_dir={output_dir}", *overrides)
    return ranks(script, *arguments, nproc=nproc, timeout=timeout, modules=modules)


def survivors(token: str, grace_s: float = 20.0) -> list[str]:
    """Command lines of processes that still carry the token when the grace has passed."""
    deadline = time.monotonic() + grace_s
    while (found := executors(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [command_line(process) for process in found]


def executors(token: str) -> list[psutil.Process]:
    """The processes that carry the token and run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(RUN_MARK) == token and alive(process.pid):
                found.append(process)
    return found


def command_line(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"{process.pid}, which has ended meanwhile"


def metrics_of(output_dir: Path) -> dict[int, dict[str, float]]:
    """Logged step -> metrics; an assertion where a step stands twice, steps are out of order or a value not finite."""
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)), steps
    for row in rows:
        bad = [name for name, value in row["metrics"].items() if value is None or not math.isfinite(value)]
        assert not bad and "nonfinite" not in row, (row["step"], bad)
    return {row["step"]: row["metrics"] for row in rows}


def computed(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that the same computation gives again."""
    return {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}


def learnt(run: Path) -> dict[int, dict[str, float]]:
    """What depends on what was computed only, step by step."""
    return {step: computed(row) for step, row in metrics_of(run).items()}


def whoever_answers(run: Path) -> dict[int, dict[str, float]]:
    """``learnt``, without what is compared of engines that say who they are: those in this process do not."""
    return {
        step: {name: value for name, value in row.items() if not name.startswith(VALIDATION_GATE)}
        for step, row in learnt(run).items()
    }


def sampled(run: Path) -> list[dict[str, object]]:
    """The rows of a run's records."""
    paths = sorted((run / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def digests(directory: Path) -> dict[str, str]:
    """Every file under a directory and the hash of its bytes."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def steps_saved(output_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (output_dir / "checkpoints").glob("step_*"))


def checkpoint(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step_{step:08d}"


def truncate(path: Path) -> None:
    """Take the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1])


def error_lines(launched: Launched) -> list[str]:
    return [line for line in launched.stdout.splitlines() if line.startswith("error: ")]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
