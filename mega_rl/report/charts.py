"""Curves as inline SVG and bars as HTML, drawn here so that they are there without any script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mega_rl.report.read import Point

WIDTH, HEIGHT = 360, 200  # of the drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 10, 24  # margins
MAX_POINTS = 300  # of a curve
MAX_SERIES = 12  # of a chart
FEW_POINTS = 40  # up to so many are marked by dots


@dataclass(frozen=True)
class Curve:
    """One curve."""

    label: str
    points: Sequence[Point]


def thinned(points: Sequence[Point], max_points: int = MAX_POINTS) -> list[Point]:
    """At most so many points: the first, the last, and of every stretch between its smallest and largest, in order.

    So no spike is lost; values that are not finite stay if their stretch has no others.
    """
    if len(points) <= max_points:
        return list(points)
    first, *points, last = points
    kept = [first]
    num_stretches = max_points // 2 - 1
    for stretch in range(num_stretches):
        part = points[stretch * len(points) // num_stretches : (stretch + 1) * len(points) // num_stretches]
        finite = [(value, index) for index, (_, value) in enumerate(part) if value is not None]
        chosen = sorted({min(finite)[1], max(finite)[1]}) if finite else [0]
        kept += [part[index] for index in chosen]
    return [*kept, last]


def short(value: float) -> str:
    """A number in few characters: 0.0123, 1.5k, 3e-07."""
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / (1e3 if sign == 'k' else size):.3g}{sign}"
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Round numbers between two others, about so many."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((power * factor for factor in (1, 2, 5) if power * factor >= raw), 10 * power)
    if whole:
        step = max(1.0, step)
    first = math.ceil(low / step)
    return [number * step for number in range(first, first + 2 * count + 2) if number * step <= high + 1e-9 * step]


@dataclass(frozen=True)
class _Frame:
    """Where values lie in the drawing."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    @classmethod
    def around(cls, series: Sequence[Curve]) -> _Frame | None:
        steps = [float(step) for one in series for step, _ in one.points]
        values = [value for one in series for _, value in one.points if value is not None]
        if not values:
            return None
        low, high = min(values), max(values)
        margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        return cls(min(steps), max(max(steps), min(steps) + 1), low - margin, high + margin)

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.low_x) / (self.high_x - self.low_x)

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high_y - value) / (self.high_y - self.low_y)


def chart(title: str, unit: str, meaning: str, series: Sequence[Curve], max_points: int = MAX_POINTS) -> str:
    """A figure with its curves and their legend; in one colour each, by their order."""
    left_out = len(series) - MAX_SERIES
    drawn = [Curve(one.label, thinned(one.points, max_points)) for one in series[:MAX_SERIES]]
    frame = _Frame.around(drawn)
    note = f'<p class="note">and {left_out} more</p>' if left_out > 0 else ""
    if frame is None:
        body = '<p class="note">no finite value</p>'
    else:
        lines = "".join(_curve(one, index, frame) for index, one in enumerate(drawn))
        body = (
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
            f'data-x0="{LEFT}" data-x1="{WIDTH - RIGHT}" data-s0="{frame.low_x:g}" data-s1="{frame.high_x:.17g}">'
            f"{_axes(frame)}{lines}"
            f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
        )
    legend = "".join(
        f'<li><i class="c{index % 8}"></i>{escape(one.label)} <b></b></li>' for index, one in enumerate(drawn)
    )
    caption = f'{escape(title)} <span class="unit">{escape(unit)}</span>'
    return (
        f'<figure title="{escape(meaning)}"><figcaption>{caption}</figcaption>{body}'
        f'<ul class="legend">{legend}</ul>{note}</figure>'
    )


def _axes(frame: _Frame) -> str:
    parts = []
    for value in ticks(frame.low_y, frame.high_y, 5):
        y = f"{frame.y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y}" dy="4" text-anchor="end">{short(value)}</text>')
    for step in ticks(frame.low_x, frame.high_x, 5, whole=True):
        parts.append(f'<text x="{frame.x(step):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{short(step)}</text>')
    return "".join(parts)


def _curve(series: Curve, index: int, frame: _Frame) -> str:
    """A path with a gap, and a mark at the top, wherever a value is not finite; and the values for the script."""
    path, dots, pen_is_down = [], [], False
    finite = [(step, value) for step, value in series.points if value is not None]
    for step, value in series.points:
        x = f"{frame.x(step):.1f}"
        if value is None:
            dots.append(f'<path class="lost" d="M{x} {TOP}l-4 -8h8z"><title>step {step}: not finite</title></path>')
            pen_is_down = False
            continue
        y = f"{frame.y(value):.1f}"
        path.append(f"{'L' if pen_is_down else 'M'}{x} {y}")
        pen_is_down = True
        if len(finite) <= FEW_POINTS:
            dots.append(f'<circle cx="{x}" cy="{y}" r="2"/>')
    steps, values = ",".join(str(s) for s, _ in finite), ",".join(f"{v:.5g}" for _, v in finite)
    return (
        f'<g class="curve c{index % 8}" data-steps="{steps}" data-values="{values}">'
        f'<path d="{"".join(path)}"/>{"".join(dots)}</g>'
    )


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """A bar for each (label, size, words beside it), the largest over the whole width."""
    largest = max((size for _, size, _ in rows), default=0.0) or 1.0
    items = "".join(
        f'<tr><th>{escape(label)}</th><td class="bar"><i style="width:{100 * size / largest:.1f}%"></i></td>'
        f"<td>{escape(words)}</td></tr>"
        for label, size, words in rows
    )
    return f'<div class="scroll"><table class="bars"><caption>{escape(title)}</caption>{items}</table></div>'


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; the first column names the row."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
