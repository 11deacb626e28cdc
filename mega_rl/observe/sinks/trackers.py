"""Weights & Biases and SwanLab: the same names as everywhere, each behind the section that it belongs to."""

from __future__ import annotations

import importlib
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_rl.errors import InputError
from mega_rl.observe.metrics.declared import match
from mega_rl.observe.sinks.sinks import SAMPLE_COLUMNS, ShownSample, Sink, cells, replace_file


def key(name: str) -> str:
    """The name of a metric there, ``learning/reward/mean``: both group by what stands before the first slash."""
    return f"{match(name)[0].section}/{name}"


class WandbSink(Sink):
    """Weights & Biases; a resumed run goes on under the same id."""

    def __init__(
        self, project: str, output_dir: Path, first_step: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        """
        Raises:
            InputError: the package is not installed.
        """
        self._wandb = _module("wandb", "logging.wandb_project", project)
        id_file = output_dir / "wandb_run_id.txt"
        self._run = self._wandb.init(
            project=project,
            name=output_dir.name,
            dir=str(output_dir),
            config=dict(settings or {}),
            id=_earlier_id(id_file, first_step),
            resume="allow",
        )
        replace_file(id_file, f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key(name): value for name, value in metrics.items()}, step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        self._run.log({f"text/{tag}": text}, step=step)

    def samples(self, step: int, tag: str, samples: Sequence[ShownSample]) -> None:
        table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=[list(cells(sample)) for sample in samples])
        self._run.log({f"samples/{tag}": table}, step=step)

    def distribution(self, step: int, name: str, values: Sequence[float]) -> None:
        self._run.log({key(name): self._wandb.Histogram(list(values))}, step=step)

    def close(self) -> None:
        self._run.finish()


class SwanlabSink(Sink):
    """SwanLab, which has no histograms and takes no value that is not finite; a resumed run keeps its id."""

    def __init__(
        self, project: str, output_dir: Path, first_step: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        """
        Raises:
            InputError: the package is not installed.
        """
        self._swanlab = _module("swanlab", "logging.swanlab_project", project)
        id_file = output_dir / "swanlab_run_id.txt"
        own = _earlier_id(id_file, first_step) or secrets.token_hex(11)[:21]  # SwanLab asks for 21 characters
        self._swanlab.init(
            project=project,
            experiment_name=output_dir.name,
            logdir=str(output_dir / "swanlog"),
            config=dict(settings or {}),
            id=own,
            resume="allow",
        )
        replace_file(id_file, f"{own}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {key(name): value for name, value in metrics.items() if math.isfinite(value)}
        self._swanlab.log(finite, step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        self._swanlab.log({f"text/{tag}": self._swanlab.Text(text)}, step=step)

    def samples(self, step: int, tag: str, samples: Sequence[ShownSample]) -> None:
        rows = (zip(SAMPLE_COLUMNS, cells(sample), strict=True) for sample in samples)
        texts = [self._swanlab.Text("\n".join(f"{column}: {cell}" for column, cell in row)) for row in rows]
        self._swanlab.log({f"samples/{tag}": texts}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


def _module(name: str, field: str, project: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        fix = f"pip install {name}, or set {field} to null"
        raise InputError(f"{field} is {project!r}, but {name} is not installed: {fix}") from error


def _earlier_id(id_file: Path, first_step: int) -> str | None:
    """The id of the run that this one goes on with; None for a run that begins anew."""
    return id_file.read_text(encoding="utf-8").strip() if first_step > 0 and id_file.exists() else None
