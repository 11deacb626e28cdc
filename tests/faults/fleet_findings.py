"""What became of a run whose processes were struck: rows and metrics beside an undisturbed run's, and recoveries."""

from __future__ import annotations

import json
import signal
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import table
from tests.launching.training import CLOCKS, metrics_of
from tests.pretended.struck_fleet import Told

SIGNALS = {"SIGKILL of an engine": signal.SIGKILL, "SIGSTOP of an engine": signal.SIGSTOP}
TRAINER, WORKER, RAYLET = "SIGKILL of the trainer", "SIGKILL of a reward worker", "SIGKILL of the raylet"


@dataclass
class Strike:
    """One fault, as it was done."""

    what: str
    at: float = 0.0
    trainer: int = 0  # process
    engine: int = -1
    life: int = -1


@dataclass
class Play:
    """One run, with all of its restarts."""

    told: Told
    folder: Path
    strikes: list[Strike] = field(default_factory=list)  # those that were done
    starts: list[float] = field(default_factory=list)  # of the trainer's processes
    ends: list[float] = field(default_factory=list)
    num_left: int = 0  # processes that were there still when a trainer's process had been gone for GRACE_S


def rows_of(run: Path) -> list[tuple[tuple[Any, ...], Any]]:
    """Who each row of the records is, and what it says that does not depend on an engine's arithmetic."""
    lines = [line for path in sorted((run / "rollouts").glob("*.jsonl")) for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    return [
        (
            (row["step"], row["prompt"]["index"], row["sample_index"]),
            (row["outcome"], row["token_ids"], row["weight_version"], row["score"]),
        )
        for row in rows
    ]


def learnt(run: Path) -> dict[int, dict[str, float]]:
    return {step: {k: v for k, v in row.items() if not k.startswith(CLOCKS)} for step, row in metrics_of(run).items()}


def compared(run: Path, reference: Path) -> dict[str, Any]:
    """What a round lost, doubled and has differently."""
    found, expected = rows_of(run), dict(rows_of(reference))
    numbers = Counter(who for who, _ in found)
    return {
        "rows": len(expected),
        "lost": len(expected.keys() - numbers.keys()),
        "doubled": sum(numbers.values()) - len(numbers.keys() & expected.keys()),
        "different": sum(who in expected and what != expected[who] for who, what in found),
        "learnt": sum(what[0] == "learnt" for _, what in found),
        "metrics_equal": learnt(run) == learnt(reference),
    }


def recoveries(found: Play) -> list[dict[str, Any]]:
    """One row per strike: when it was noticed and what it struck was back; None: never, or something came between."""
    rows = []
    for strike in found.strikes:
        row: dict[str, Any] = {"what": strike.what, "noticed_s": None, "back_s": None, "start_s": None, "answers": None}
        rows.append(row)
        if strike.what in (TRAINER, RAYLET):
            again = [t for t in found.starts if t > strike.at]
            steps = [line["at"] for line in found.told.lines if line["what"] == "Deliver" and line["at"] > strike.at]
            steps = [at for at in steps if again and at > again[0]]
            row["noticed_s"] = min(at for at in found.ends if at > strike.at) - strike.at
            if steps:
                row["back_s"], row["start_s"] = steps[0] - strike.at, steps[0] - again[0]
        if strike.what not in SIGNALS:
            continue
        later = [line for line in found.told.lines if line["pid"] == strike.trainer and line["at"] > strike.at]
        own = [line for line in later if line.get("engine") == strike.engine]
        ended = [line["at"] for line in own if line["what"] == "Kill" and line["life"] == strike.life]
        life = strike.life + 1
        begun = [line["at"] for line in own if line["what"] == "Start" and line["life"] == life]
        held = [line["at"] for line in own if line["what"] == "Loaded" and line["life"] == life]
        row["noticed_s"] = ended[0] - strike.at if ended else None
        if held:
            row["back_s"], row["start_s"] = held[0] - strike.at, held[0] - begun[0]
            answers = [line for line in later if line["what"] == "Answered" and line["at"] < held[0]]
            row["answers"] = len(answers)
    return rows


def unasked(found: Play) -> int:
    """Engines that the scheduler ended although nobody had struck them."""
    known = {(s.trainer, s.engine, s.life) for s in found.strikes}
    ended = [line for line in found.told.lines if line["what"] == "Kill" and "run has ended" not in line["why"]]
    return sum((line["pid"], line["engine"], line["life"]) not in known for line in ended)


def first_starts(found: Play) -> dict[str, list[float]]:
    """Of what had nothing before it: seconds until an engine held weights, and until a run's first step was sampled."""
    begun: dict[tuple[int, int, int], float] = {}
    took, steps = [], []
    for line in found.told.lines:
        who = (line["pid"], line.get("engine", -1), line.get("life", -1))
        if line["what"] == "Start" and line["life"] == 0:
            begun[who] = line["at"]
        elif line["what"] == "Loaded" and who in begun:
            took.append(line["at"] - begun.pop(who))
        elif line["what"] == "Deliver" and line["step"] == 0 and not steps:
            steps.append(line["at"] - found.starts[0])
    return {"engine_s": took, "run_s": steps}


def median(values: Sequence[float | None]) -> float | str:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else "-"


def summary(rounds: Sequence[dict[str, Any]]) -> str:
    """Two tables: the faults, and what became of the work."""
    strikes = [row for one in rounds for row in one["strikes"]]
    faults = []
    for what in dict.fromkeys(row["what"] for row in strikes):
        of_kind = [row for row in strikes if row["what"] == what]
        back = [row for row in of_kind if row["back_s"] is not None]
        ratio = median([row["back_s"] / row["start_s"] for row in back])
        cells = [median([row[name] for row in of_kind]) for name in ("noticed_s", "back_s", "start_s")]
        faults.append([what, len(of_kind), len(back), *cells, ratio, median([row["answers"] for row in of_kind])])
    names = ("rows", "learnt", "lost", "doubled", "different")
    totals = [sum(one[name] for one in rounds) for name in names]
    idle = [seconds for one in rounds for seconds in one["idle_s"]]
    busy = sum(one["engine_s"] for one in rounds)
    equal = f"{sum(one['metrics_equal'] for one in rounds)} of {len(rounds)}"
    work = [
        *totals,
        equal,
        sum(one["unasked"] for one in rounds),
        f"{sum(idle):.1f} of {busy:.0f}",
        max(idle, default=0.0),
    ]
    header = [
        "fault",
        "number",
        "came back",
        "noticed s",
        "back s",
        "its start s",
        "back / its start",
        "answers of others",
    ]
    header2 = [
        *names,
        "rounds with equal metrics",
        "other deaths",
        "processes left",
        "idle s of engine s",
        "longest idle s",
    ]
    engine, run = (median([s for one in rounds for s in one["first"][name]]) for name in ("engine_s", "run_s"))
    alone = f"First engines, all at a time, took {engine:.1f} s to start, and runs {run:.1f} s to a step."
    return f"{table(header, faults)}\n\n{table(header2, [work])}\n\nMedians. {alone}"
