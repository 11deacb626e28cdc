"""The one object that a stage reports to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from mega_rl.observe.metrics.declared import DISTRIBUTION, is_declared, match
from mega_rl.observe.sinks.console import ConsoleSink
from mega_rl.observe.sinks.sinks import JsonlSink, ShownSample, Sink
from mega_rl.observe.sinks.tensorboard import TensorBoardSink
from mega_rl.observe.sinks.trackers import SwanlabSink, WandbSink

TENSORBOARD_DIR = "tensorboard"
JSONL_FILE = "metrics.jsonl"


class LoggingOptions(Protocol):
    """What is read of the ``logging`` section."""

    @property
    def progress(self) -> bool: ...

    @property
    def tensorboard(self) -> bool: ...

    @property
    def jsonl(self) -> bool: ...

    @property
    def wandb_project(self) -> str | None: ...

    @property
    def swanlab_project(self) -> str | None: ...


class Observer:
    """Hands metrics, texts and messages to every sink; without sinks it does nothing.

    Example::

        with Observer.create(config.logging, output_dir, is_main=rank == 0, resume_step=0, total_steps=60) as observer:
            observer.log(1, {"reward/mean": 0.43, "actor/loss": -0.012})
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    @classmethod
    def create(
        cls,
        logging: LoggingOptions,
        output_dir: Path,
        is_main: bool,
        resume_step: int,
        total_steps: int,
        settings: Mapping[str, Any] | None = None,
    ) -> Observer:
        """The sinks that the ``logging`` section asks for.

        Args:
            logging: the section.
            output_dir: of the run; gets ``metrics.jsonl`` and ``tensorboard/``.
            is_main: false on all ranks but one: their observer does nothing.
            resume_step: the first step that this run will log; what an earlier run logged from there on is dropped
                (0: everything).
            total_steps: of the whole run.
            settings: the configuration of the run, nested, for dashboards.

        Raises:
            InputError: a sink cannot start: wandb or SwanLab is missing, or the metrics of the earlier run are damaged.
        """
        if not is_main:
            return cls(())
        output_dir.mkdir(parents=True, exist_ok=True)
        sinks: list[Sink] = []
        if logging.jsonl:
            sinks.append(JsonlSink(output_dir / JSONL_FILE, resume_step))
        if logging.wandb_project is not None:
            sinks.append(WandbSink(logging.wandb_project, output_dir, resume_step, settings))
        if logging.swanlab_project is not None:
            sinks.append(SwanlabSink(logging.swanlab_project, output_dir, resume_step, settings))
        if logging.tensorboard:
            sinks.append(TensorBoardSink(output_dir / TENSORBOARD_DIR, resume_step, settings))
        # last: nothing after it can fail and leave a bar on the terminal
        sinks.append(ConsoleSink(total_steps, logging.progress, first_step=max(resume_step - 1, 0)))
        return cls(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step; several calls for one step add up.

        Raises:
            KeyError: a metric is not declared in ``observe/metrics/declared.py``; nothing is written then.
        """
        if not self._sinks:
            return
        for name in metrics:
            assert match(name)[0].reduction != DISTRIBUTION, f"{name} is a distribution"
        values = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.log(step, values)

    def log_if_missing(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a step of an earlier run, unless its metrics are in ``metrics.jsonl``, which is written first.

        Metrics that this version does not declare are left out.
        """
        last_steps = [sink.last_step for sink in self._sinks if isinstance(sink, JsonlSink)]
        if last_steps and (last_steps[0] is None or last_steps[0] < step):
            self.log(step, {name: value for name, value in metrics.items() if is_declared(name)})

    def text(self, step: int, tag: str, text: str) -> None:
        """Shows a longer text as it is."""
        for sink in self._sinks:
            sink.text(step, tag, text)

    def samples(self, step: int, tag: str, samples: Sequence[ShownSample]) -> None:
        """Shows a few answers; ``tag`` says whose they are."""
        if samples:
            for sink in self._sinks:
                sink.samples(step, tag, samples)

    def distribution(self, step: int, name: str, values: Sequence[float]) -> None:
        """Shows all values of a step; those that are not finite are left out.

        Raises:
            KeyError: no such metric is declared.
        """
        assert match(name)[0].reduction == DISTRIBUTION, f"{name} is no distribution"
        if self._sinks and (finite := [value for value in values if math.isfinite(value)]):
            for sink in self._sinks:
                sink.distribution(step, name, finite)

    def message(self, message: str) -> None:
        """One line to the reader of the console."""
        for sink in self._sinks:
            sink.message(message)

    def close(self) -> None:
        """Closes every sink, the others too when one fails; a second call does nothing."""
        sinks, self._sinks = self._sinks, ()
        with ExitStack() as stack:
            for sink in sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
