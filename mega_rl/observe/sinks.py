"""Where metrics are kept: TensorBoard, JSONL, Weights & Biases. The console has its own file."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from mega_rl.errors import InputError


class Sink(Protocol):
    """Everything that an observer writes to; what a sink has no place for it leaves out."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def text(self, step: int, tag: str, text: str) -> None: ...

    def message(self, message: str) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Scalars and texts as TensorBoard event files."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """``first_step``: what an earlier run wrote at this step or later is hidden, for it is about to be repeated."""
        self._writer = SummaryWriter(log_dir=str(directory), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, step: int, tag: str, text: str) -> None:
        self._writer.add_text(tag, f"```\n{text}\n```", step)  # a code block: TensorBoard renders Markdown
        self._writer.flush()

    def message(self, message: str) -> None:
        """Messages are for the console."""

    def close(self) -> None:
        self._writer.close()


class JsonlSink:
    """One JSON object per logged step: ``{"step": 3, "metrics": {...}, "nonfinite": ["actor/kl"]}``.

    JSON has no NaN: such values are null, and ``nonfinite`` names them (the key is absent if there are none).
    A line is in the file once its ``log`` returned, so that a killed process loses no step.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        """Keeps the rows of an earlier run before ``first_step``, and appends to them.

        Raises:
            InputError: the earlier file is damaged elsewhere than in its last line.
        """
        self.last_step: int | None = None  # of the rows that were kept
        if path.exists():
            rows = [row for row in read_jsonl(path) if row["step"] < first_step]
            _replace(path, "".join(_line(row) for row in rows))
            self.last_step = max((row["step"] for row in rows), default=None)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        nonfinite = [name for name, value in metrics.items() if not math.isfinite(value)]
        row: dict[str, Any] = {"step": step, "metrics": {n: None if n in nonfinite else v for n, v in metrics.items()}}
        if nonfinite:
            row["nonfinite"] = nonfinite
        self._file.write(_line(row))

    def text(self, step: int, tag: str, text: str) -> None:
        """The file holds numbers only."""

    def message(self, message: str) -> None:
        """Messages are for the console."""

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``JsonlSink``; a last line that a killed process tore is left out.

    Raises:
        InputError: another line is damaged.
    """
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break is empty or torn
        try:
            row = json.loads(line)
            good = isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("metrics"), dict)
        except ValueError:
            good = False
        if not good:
            raise InputError(f"{path} is damaged at line {number}: move the file away, or remove that line")
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class WandbSink:
    """Scalars and texts to Weights & Biases; a resumed run goes on under the same id."""

    def __init__(self, project: str, output_dir: Path, first_step: int) -> None:
        """
        Raises:
            InputError: the package is not installed.
        """
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            fix = "pip install wandb, or set logging.wandb_project to null"
            raise InputError(f"logging.wandb_project is {project!r}, but wandb is not installed: {fix}") from error
        id_file = output_dir / "wandb_run_id.txt"
        earlier = id_file.read_text(encoding="utf-8").strip() if first_step > 0 and id_file.exists() else None
        self._run = wandb.init(project=project, name=output_dir.name, dir=str(output_dir), id=earlier, resume="allow")
        _replace(id_file, f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        self._run.log({tag: text}, step=step)

    def message(self, message: str) -> None:
        """Messages are for the console."""

    def close(self) -> None:
        self._run.finish()
