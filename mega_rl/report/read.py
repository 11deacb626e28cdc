"""What a run left in its output directory, as far as it can be read; what cannot is said in a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mega_rl.errors import InputError, shortened
from mega_rl.observe.observer import JSONL_FILE
from mega_rl.observe.run_log import FILE as LOG_FILE
from mega_rl.observe.sinks.sinks import read_rows
from mega_rl.observe.sinks.tensorboard import flattened

CONFIG_FILE, ENVIRONMENT_FILE, ROLLOUTS = "config.yaml", "environment.txt", "rollouts"
MAX_LOG_BYTES = 1 << 20  # of the end of run.log
MAX_ROLLOUT_BYTES = 256 << 20
MAX_STEP = 1 << 53
_PLACES = (JSONL_FILE, CONFIG_FILE, LOG_FILE, ROLLOUTS)

Point = tuple[int, float | None]  # step and value; None: not finite


@dataclass
class RunRecord:
    """One run, ready to be shown."""

    name: str
    path: Path
    series: dict[str, list[Point]] = field(default_factory=dict)  # metric -> its values, by ascending step
    settings: dict[str, str] = field(default_factory=dict)  # key of the configuration -> its value
    environment: str = ""
    log: list[tuple[str, str, str, str]] = field(default_factory=list)  # (time, rank, level, text), as written
    rollout_step: int | None = None  # the newest step whose rollouts are there
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # sentences on what could not be read

    def values(self, metric: str) -> list[float]:
        """The finite values of a metric, in the order of the steps."""
        return [value for _, value in self.series.get(metric, ()) if value is not None]


def read_run(path: Path, name: str) -> RunRecord:
    """Everything that the report shows of a run.

    Raises:
        InputError: there is no such directory, or nothing of a run is in it.
    """
    if not path.is_dir():
        raise InputError(f"{path} is no directory: name the output directory of a run (trainer.output_dir)")
    if not any((path / place).exists() for place in _PLACES):
        raise InputError(f"{path} holds none of {', '.join(_PLACES)}: name the output directory of a run")
    run = RunRecord(name, path)
    readers: Sequence[tuple[str, Callable[[RunRecord, Path], None], str]] = (
        (JSONL_FILE, _read_metrics, "so there are no curves; they need logging.jsonl=true"),
        (CONFIG_FILE, _read_settings, "so its configuration is not shown"),
        (ENVIRONMENT_FILE, _read_environment, "so its environment is not shown"),
        (LOG_FILE, _read_log, "so its warnings are not shown"),
        (ROLLOUTS, _read_rollouts, "so there are no samples; they need logging.dump_rollouts, such as 2"),
    )
    for place, read, so in readers:
        if not (path / place).exists():
            if place == ROLLOUTS and "response_length/mean" not in run.series:
                continue  # a run that samples nothing
            run.problems.append(f"there is no {place}, {so}")
            continue
        try:
            read(run, path / place)
        except Exception as error:  # noqa: BLE001 - whatever a file holds, the rest of the run is shown
            run.problems.append(f"{place} cannot be read ({type(error).__name__}: {shortened(str(error))})")
    return run


def _read_metrics(run: RunRecord, path: Path) -> None:
    rows, damaged = read_rows(path)
    if damaged:
        lines = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        run.problems.append(f"{JSONL_FILE} is damaged in {len(damaged)} of its lines, which are left out: {lines}")
    if not rows:
        run.problems.append(f"{JSONL_FILE} has no step yet, so there are no curves")
    by_step = {row["step"]: row["metrics"] for row in rows if abs(row["step"]) < MAX_STEP}
    for step in sorted(by_step):
        for name, value in by_step[step].items():
            run.series.setdefault(name, []).append((step, number(value)))


def number(value: object) -> float | None:
    """A finite number, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _read_settings(run: RunRecord, path: Path) -> None:
    read = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")), resolve=False)
    if not isinstance(read, Mapping):
        raise ValueError("it holds no sections")
    flat = flattened({str(key): value for key, value in read.items()})
    run.settings = {key: json.dumps(value, ensure_ascii=False, default=str) for key, value in flat.items()}


def _read_environment(run: RunRecord, path: Path) -> None:
    run.environment = path.read_text(encoding="utf-8", errors="replace")[:MAX_LOG_BYTES]


def _read_log(run: RunRecord, path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - MAX_LOG_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    if size > MAX_LOG_BYTES:
        run.problems.append(f"{LOG_FILE} is long: only its last MiB is shown")
        lines = lines[1:]
    for line in lines:
        if line.startswith("    ") and run.log:
            time, rank, level, text = run.log[-1]
            run.log[-1] = (time, rank, level, f"{text}\n{line[4:]}")
        elif len(parts := line.split(" ", 4)) == 5 and parts[1] == "rank":
            run.log.append((parts[0], parts[2], parts[3], parts[4]))


def _read_rollouts(run: RunRecord, path: Path) -> None:
    files = sorted(path.glob("step_*.jsonl"))
    if not files:
        run.problems.append(f"there is no step in {ROLLOUTS}, so there are no samples")
        return
    newest = files[-1]
    if newest.stat().st_size > MAX_ROLLOUT_BYTES:
        run.problems.append(f"{ROLLOUTS}/{newest.name} is too large to be shown, so there are no samples")
        return
    damaged = 0
    for line in newest.read_text(encoding="utf-8", errors="replace").split("\n"):
        if line:
            try:
                row = json.loads(line)
                run.rollouts.append(_checked(row))
            except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
                damaged += 1
    digits = newest.stem.removeprefix("step_")
    run.rollout_step = int(digits) if digits.isdecimal() else None
    if damaged:
        run.problems.append(f"{ROLLOUTS}/{newest.name} is damaged in {damaged} of its lines, which are left out")


def _checked(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a recorded rollout; raises where it is none."""
    ids, logprobs = row["token_ids"], [number(value) for value in row["logprobs"]]
    if not all(isinstance(token, int) for token in ids) or len(ids) != len(logprobs):
        raise ValueError("tokens and log-probabilities do not belong together")
    sampled = [bool(bit) for bit in row.get("loss_mask", [1] * len(ids))]
    if len(sampled) != len(ids):
        raise ValueError("tokens and loss_mask do not belong together")
    episode = row.get("episode")
    return {
        "prompt": str(row["prompt"]["text"]),
        "index": int(row["prompt"]["index"]),
        "pictures": [str(image["key"]).partition("-")[0] for image in row["prompt"].get("images", ())],
        "turns": _turns(row, len(ids)) if episode is not None else [],
        "stop": str(episode["stop"]) if episode is not None else "",
        "expected": str(row["prompt"]["ground_truth"]),
        "text": str(row["text"]),
        "finish_reason": str(row["finish_reason"]),
        "token_ids": ids,
        "logprobs": logprobs,
        "sampled": sampled,
        "reward": number(row["score"]["value"]),
        "parts": {str(name): number(value) for name, value in row["score"]["parts"].items()},
        "advantage": number(row.get("advantage")),
        "logprob_diff": number(row.get("logprob_diff")),
        "outcome": str(row.get("outcome", "")),
    }


def _turns(row: Mapping[str, Any], num_tokens: int) -> list[tuple[str, int, int]]:
    """Role, begin and end of every turn after the prompt, counted from its end; raises where they are none."""
    turns = [(str(turn["role"]), int(turn["start"]), int(turn["stop"])) for turn in row["turns"]]
    num_prompt = turns[0][2]
    found = [(role, start - num_prompt, stop - num_prompt) for role, start, stop in turns[1:]]
    if any(not 0 <= start <= stop <= num_tokens for _, start, stop in found):
        raise ValueError("turns and tokens do not belong together")
    return found
