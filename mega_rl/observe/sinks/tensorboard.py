"""TensorBoard: tags in the order of the sections, a page of charts that is laid out, tables and histograms."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter, summary

from mega_rl.observe.metrics.declared import CONSOLE_METRICS, SECTIONS, Section, laid_out, match
from mega_rl.observe.sinks.sinks import SAMPLE_COLUMNS, ShownSample, Sink, cells

PAGE = "#custom_scalars"  # of TensorBoard's address: the page of the layout
MAX_CELL_CHARACTERS = 4000  # of a text in a table; the middle of a longer one is left out
NUM_BINS = 30
MAX_QUEUE = 1000  # events that wait to be written, a few for each step; a step waits for the file if there are more
_NUMBER = {section.key: number for number, section in enumerate(SECTIONS, start=1)}
_SHOWN_ON_PAGE_OF_RUNS = {spec.name for spec in CONSOLE_METRICS}


def heading(section: Section) -> str:
    """A section as TensorBoard names it: its pages sort what they show, so the number makes it the reading order."""
    return f"{_NUMBER[section.key]} {section.title}"


def tag(name: str) -> str:
    """The tag of a metric, ``1 learning/reward/mean``: what stands before the first slash is a heading of its page."""
    return f"{_HEADING[match(name)[0].section]}/{name}"


_HEADING = {section.key: heading(section) for section in SECTIONS}


def layout(names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """The page of charts: heading -> title of a chart -> its kind and the patterns of its tags."""
    return {
        heading(section): {
            title: ["Multiline", [f"{re.escape(tag(name))}$" for name in metrics]] for title, metrics in charts.items()
        }
        for section, charts in laid_out(names)
    }


class TensorBoardSink(Sink):
    """Event files: one event holds all metrics of a step, and the layout follows the metrics that have been logged."""

    def __init__(self, directory: Path, first_step: int, settings: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            first_step: what an earlier run wrote at this step or later is hidden, for it is about to be repeated.
            settings: the configuration of the run, nested.
        """
        self._settings = flattened(settings or {})
        # Its thread writes while the step goes on, within two seconds.
        self._events = FileWriter(str(directory), max_queue=MAX_QUEUE, flush_secs=2)
        # What TensorBoard takes for a restart: it drops what other files of the directory hold from this step on.
        self._events.add_event(Event(step=first_step, file_version="brain.Event:2"))
        self._events.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        self._step = first_step  # of the newest event
        self._tags: dict[str, str] = {}  # metric -> its tag, of all that were logged
        if self._settings:
            rows = [(key, str(value)) for key, value in self._settings.items()]
            self._add(first_step, summary.text("configuration", markdown_table(("key", "value"), rows)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not metrics.keys() <= self._tags.keys():
            self._arrange(step, metrics)
        values = [Summary.Value(tag=self._tags[name], simple_value=value) for name, value in metrics.items()]
        self._add(step, Summary(value=values))

    def _arrange(self, step: int, metrics: Mapping[str, float]) -> None:
        """Lay the page out anew, for TensorBoard takes the newest layout; the first metrics also name its columns."""
        if not self._tags and self._settings:
            shown = {tag(name): 0.0 for name in metrics if match(name)[0].name in _SHOWN_ON_PAGE_OF_RUNS}
            for part in summary.hparams(_plain(self._settings), shown)[:2]:
                self._add(step, part)
        self._tags |= {name: tag(name) for name in metrics}
        self._add(step, summary.custom_scalars(layout(list(self._tags))))

    def text(self, step: int, tag: str, text: str) -> None:
        # Indented lines are code to Markdown, whatever stands in them.
        self._add(step, summary.text(tag, "\n".join(f"    {line}" for line in text.splitlines())))

    def samples(self, step: int, tag: str, samples: Sequence[ShownSample]) -> None:
        rows = [cells(sample) for sample in samples]
        self._add(step, summary.text(f"samples/{tag}", markdown_table(SAMPLE_COLUMNS, rows)))
        for number, sample in enumerate(samples, start=1):
            if pictures := sample.pictures():
                self._add(step, _pictures(f"samples/{tag}/{number}", sample, pictures))

    def distribution(self, step: int, name: str, values: Sequence[float]) -> None:
        self._add(step, summary.histogram(tag(name), np.asarray(values, np.float64), NUM_BINS))

    def close(self) -> None:
        self._events.close()

    def _add(self, step: int, part: Any) -> None:
        if step > self._step:  # what came before has long been written, and a killed run loses none of it
            self._events.flush()
            self._step = step
        self._events.add_summary(part, step)


def _pictures(tag: str, sample: ShownSample, pictures: Sequence[bytes]) -> Summary:
    """The pictures of one answer, side by side, with the answer under them."""
    opened = [Image.open(io.BytesIO(picture)) for picture in pictures]
    strip = Image.new("RGB", (sum(one.width for one in opened), max(one.height for one in opened)), "white")
    for place, one in zip(accumulate((one.width for one in opened), initial=0), opened, strict=False):
        strip.paste(one, (place, 0))
    encoded = io.BytesIO()
    strip.save(encoded, "PNG")
    size = {"width": strip.width, "height": strip.height, "colorspace": 3}
    told = markdown_table(SAMPLE_COLUMNS, [cells(sample)])
    value = Summary.Value(tag=tag, image=Summary.Image(encoded_image_string=encoded.getvalue(), **size))
    value.metadata.summary_description = told
    return Summary(value=[value])


def flattened(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; what is no mapping stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flattened(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat


def _plain(settings: Mapping[str, Any]) -> dict[str, float | str]:
    """Numbers as they are, all else as text; what TensorBoard's page of runs can sort and filter by."""
    return {
        key: value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
        for key, value in settings.items()
    }


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells show their text as it is: nothing in it is Markdown or HTML, or can load anything."""
    lines = [columns, ["---"] * len(columns), *([_inert(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _inert(text: str) -> str:
    """The text as HTML in which only letters, digits and harmless marks stand for themselves."""
    if len(text) > MAX_CELL_CHARACTERS:
        half, left_out = MAX_CELL_CHARACTERS // 2, len(text) - MAX_CELL_CHARACTERS
        text = f"{text[:half]} ... ({left_out} characters left out) ... {text[-half:]}"
    return re.sub(r"[^\w\s.,;()+/=%?'-]|_", lambda found: f"&#{ord(found[0])};", text).replace("\n", "<br>")
