"""A timeline as a picture: one row for each lane, one bar for each activity."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mega_rl.errors import InputError
from mega_rl.observe.timeline import Activity, lanes

MAX_LANES = 33  # the trainer and 32 engines
COLOURS = {
    "sampling": "#4c78a8",
    "training": "#54a24b",
    "loading weights": "#e45756",
    "waiting": "#d9d9d9",
    "starting": "#b279a2",
    "writing weights": "#f58518",
}
OTHER = "#8fbf8a"  # phases of the trainer that have no colour of their own


def draw(path: Path, title: str, activities: Sequence[Activity]) -> None:
    """Write the picture: the trainer above, then the engines. What takes no time is a line through all rows.

    Raises:
        InputError: matplotlib is missing, or does not know such a file.
        OSError: the file cannot be written.
    """
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise InputError("a picture needs matplotlib: pip install matplotlib, or ask for none") from None
    bars = [a for a in activities if a.end_s > a.begin_s]
    shown = lanes(bars)[:MAX_LANES]
    figure, axes = pyplot.subplots(figsize=(12, 1.5 + 0.24 * len(shown)))
    for row, lane in enumerate(shown):
        own = [a for a in bars if a.lane == lane]
        colours = [COLOURS.get(a.name, OTHER) for a in own]
        places = [(a.begin_s, a.end_s - a.begin_s) for a in own]
        axes.broken_barh(places, (row - 0.4, 0.8), facecolors=colours, edgecolor="white", lw=0.3)
        for a in own:
            if a.name in ("training", "update"):
                axes.text((a.begin_s + a.end_s) / 2, row, str(a.details["step"]), ha="center", va="center", fontsize=7)
    for a in activities:
        if a.end_s == a.begin_s:
            axes.axvline(a.begin_s, color="black", lw=0.6, ls=":")
            axes.text(a.begin_s, -0.6, a.name, rotation=30, ha="left", va="bottom", fontsize=6)
    axes.set_yticks(range(len(shown)), shown, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, pad=30 if len(bars) < len(activities) else None)
    names = {a.name for a in bars}
    legend = {name: colour for name, colour in COLOURS.items() if name in names}
    if names - COLOURS.keys():
        legend["other phases of the trainer"] = OTHER
    marks = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in legend.values()]
    below = (0.5, -0.6 / (1 + len(shown) / 4))
    axes.legend(marks, list(legend), ncols=4, loc="upper center", bbox_to_anchor=below)
    try:
        figure.savefig(path, dpi=110, bbox_inches="tight")
    except ValueError as error:  # matplotlib knows no such ending
        raise InputError(f"the timeline cannot be written ({error}): name a .png or .svg file") from error
    finally:
        pyplot.close(figure)
