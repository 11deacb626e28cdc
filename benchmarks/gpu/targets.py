"""What ``run.py`` is to reach, one line each, beside what was measured. Needs no torch."""

from collections.abc import Callable, Iterable
from typing import Any

DENSE = ("mfu:7B", "mfu:8B")
Rows = dict[str, list[dict[str, Any]]]  # by slice


def _mfu(rows: Rows, names: Iterable[str], lengths: Iterable[int], recompute: str) -> float | None:
    """The least of what is known."""
    found = [one for name in names for one in rows[name] if one["length"] in lengths and one["recompute"] == recompute]
    return min((one["mfu"] for one in found if one.get("mfu") is not None), default=None)


def _worst(values: Iterable[float | None], choose: Callable[..., float] = min) -> float | None:
    return choose((value for value in values if value is not None), default=None)


def _unless_zero(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def measured_targets(slices: dict[str, Any]) -> list[list[Any]]:
    """Every target of the trainer on one device: what it is, how much, what was found. "-": not measured."""
    rows: Rows = {name: slices.get(name, {}).get("rows", []) for name in (*DENSE, "mfu:mixture", *OTHERS)}
    eight, long = (64, 32, 8192), (32768,)  # the short ones are of --quick
    plans = [_unless_zero(one["planned_bytes"], one["peak_bytes"]) for one in rows["memory"]]
    off = _worst((None if plan is None else abs(plan - 1) for plan in plans), max)
    steps = {one["against"].rpartition(" ")[2]: one["speedup"] for one in rows["cpu_step"]}
    found: list[tuple[str, str, float | None]] = [
        ("MFU, 7B and 8B, 8k tokens", ">= 45 %", _mfu(rows, DENSE, eight, "none")),
        ("the same, selective recompute", ">= 42 %", _mfu(rows, DENSE, eight, "selective")),
        ("MFU, mixture of experts, 8k tokens", ">= 35 %", _mfu(rows, ["mfu:mixture"], eight, "none")),
        ("MFU, 7B and 8B, 32k tokens", ">= 45 %", _mfu(rows, DENSE, long, "none")),
        (
            "log-probabilities, forward pass, of the matrix product's time",
            "<= 1.15",
            _worst((one["seconds"] / one["products_s"] for one in rows["logprob"] if one["pass"] == "forward"), max),
        ),
        ("sync, of the device's copy rate", ">= 50 %", _worst(one["sync"] / one["copy"] for one in rows["sync"])),
        ("plan against measured peak", "<= 10 %", off),
        ("CPU step against transformers, unpadded", ">= 1.0", steps.get("one")),
        ("CPU step against transformers, padded", ">= 2", steps.get("padded")),
    ]
    return [[name, target, "-" if value is None else _shown(target, value)] for name, target, value in found]


OTHERS = ("logprob", "sync", "memory", "cpu_step")


def _shown(target: str, value: float) -> str:
    return f"{value:.1%}" if target.endswith("%") else f"{value:.3g}"
