"""The page: what all runs have, side by side, in the sections of every dashboard."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from mega_rl.observe.metrics.declared import MetricSpec, Section, laid_out, match
from mega_rl.observe.metrics.from_files import HELD_OUT, LOSSES
from mega_rl.report import charts
from mega_rl.report.charts import Curve, short
from mega_rl.report.read import RunRecord
from mega_rl.report.samples import Decode, Thumbnails, card, legend, spread

MAX_LOG_ROWS = 200  # of a run, the newest ones
MAX_CELL_CHARACTERS = 300  # of a configuration value
_SYNC = ("bytes_local", "bytes_sent", "bytes_received", "bytes_minimum", "verified_tensors", "seconds", "gb_per_s")


def page(
    runs: Sequence[RunRecord],
    decoders: Mapping[str, Decode],
    num_samples: int,
    pictures: Mapping[str, Thumbnails] | None = None,
) -> str:
    """The whole file.

    Args:
        decoders: name of a run -> what makes text of its tokens; the samples of a run without one have no colours.
        pictures: name of a run -> what finds the pictures of its prompts; None: no run has any.
        num_samples: of each run.
    """
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    parts = [("overview", "overview", _overview(runs)), *_sections(runs)]
    parts += [("samples", "samples", _samples(runs, decoders, num_samples, pictures or {}))]
    parts += [("configuration", "configuration", _configuration(runs)), ("warnings", "warnings", _warnings(runs))]
    parts += [("environment", "environment", _environment(runs))]
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in parts)
    body = "".join(f'<section id="{key}"><h2>{escape(title)}</h2>{content}</section>' for key, title, content in parts)
    title = escape(", ".join(run.name for run in runs))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} - mega_rl report</title><style>{style}</style></head>"
        f"<body><header class=top><h1>{title}</h1><nav>{links}</nav></header><main>{body}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def _name(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    """A heading above what belongs to one run, where there are several."""
    return f'<h3><i class="c{runs.index(run) % 8}"></i>{escape(run.name)}</h3>' if len(runs) > 1 else ""


def _overview(runs: Sequence[RunRecord]) -> str:
    rows = []
    for run in runs:
        steps = [points[-1][0] for points in run.series.values()]
        seconds = run.values("time/step_s")
        tokens = run.values("throughput/tokens_per_s")
        memory = [value for value in run.values("memory/peak_device_gib") if value] or run.values(
            "memory/peak_host_gib"
        )
        rows.append(
            [
                run.name,
                str(max(steps, default=0)),
                _first_to_last(run, ("reward/mean", "actor/loss", *LOSSES)),
                _first_to_last(run, [*(name for name in run.series if name.startswith("val-core/")), *HELD_OUT]),
                f"{sum(seconds) / 60:.1f} min" if seconds else "",
                f"{short(sorted(tokens)[len(tokens) // 2])} tokens/s" if tokens else "",
                f"{max(memory):.2f} GiB" if memory else "",
            ]
        )
    columns = ("run", "steps", "learning", "held-out", "time in steps", "median speed", "peak memory")
    problems = "".join(
        f"<li>{escape(f'{run.name}: {problem}' if len(runs) > 1 else problem)}</li>"
        for run in runs
        for problem in run.problems
    )
    return charts.table("", columns, rows) + (f'<ul class="problems">{problems}</ul>' if problems else "")


def _first_to_last(run: RunRecord, names: Sequence[str]) -> str:
    """How the first of these metrics that the run has went, in a few words."""
    for name in names:
        if values := run.values(name):
            return f"{name} {short(values[0])} → {short(values[-1])}"
    return ""


def _sections(runs: Sequence[RunRecord]) -> list[tuple[str, str, str]]:
    names = [name for run in runs for name in run.series]
    extras = {"speed": _phases(runs), "memory": _peaks(runs), "sync": _window(runs)}
    max_points = max(40, charts.MAX_POINTS * 3 // max(3, len(runs)))
    found = []
    for section, titled in laid_out(names):
        figures = "".join(
            figure for title, metrics in titled.items() for figure in _figures(runs, title, metrics, max_points)
        )
        found.append((section.key, section.title, _meaning(section) + extras.get(section.key, "") + _grid(figures)))
    return found


def _meaning(section: Section) -> str:
    return f'<p class="note">{escape(section.meaning)}</p>'


def _grid(figures: str) -> str:
    return f'<div class="grid">{figures}</div>'


def _figures(runs: Sequence[RunRecord], title: str, metrics: Sequence[str], max_points: int) -> list[str]:
    """One run: a chart with its metrics. Several: a chart for each metric, in which a colour is a run."""
    if len(runs) == 1:
        series = [Curve(name, runs[0].series[name]) for name in metrics]
        return [charts.chart(title, _unit(metrics[0]), _about(match(metrics[0])[0]), series, max_points)]
    drawn = []
    for name in metrics:
        series = [Curve(run.name, run.series.get(name, ())) for run in runs]
        drawn.append(charts.chart(name, _unit(name), _about(match(name)[0]), series, max_points))
    return drawn


def _unit(name: str) -> str:
    unit = match(name)[0].unit
    return "" if unit == "1" else unit


def _about(spec: MetricSpec) -> str:
    return f"{spec.name}: {spec.description}"


def _phases(runs: Sequence[RunRecord]) -> str:
    """Where the seconds of the whole run went."""
    shown = []
    for run in runs:
        phases = {
            n.removeprefix("time/").removesuffix("_s"): run.values(n) for n in run.series if n.startswith("time/")
        }
        whole = sum(sum(phases.get(name, ())) for name in ("step", "validate", "save")) or 1.0
        phases.pop("step", None)
        rows = [
            (name, sum(values), f"{short(sum(values))} s, {sum(values) / whole:.0%} of the time")
            for name, values in sorted(phases.items(), key=lambda item: -sum(item[1]))
            if values
        ]
        shown.append(
            _name(run, runs)
            + charts.bars("seconds of each phase, all steps together; some lie within or beside others", rows)
            if rows
            else ""
        )
    return "".join(shown)


def _peaks(runs: Sequence[RunRecord]) -> str:
    """The largest peak of each phase, device memory where there is some."""
    shown = []
    for run in runs:
        for place in ("device", "host"):
            prefix = f"memory/peak_{place}_gib/"
            peaks = {
                n.removeprefix(prefix): max(run.values(n), default=0.0) for n in run.series if n.startswith(prefix)
            }
            rows = [(name, peak, f"{peak:.3g} GiB") for name, peak in sorted(peaks.items(), key=lambda item: -item[1])]
            if rows:
                shown.append(_name(run, runs) + charts.bars(f"peak {place} memory of each phase, largest rank", rows))
    return "".join(shown)


def _window(runs: Sequence[RunRecord]) -> str:
    """What the weight syncs moved: of the newest one and all together."""
    rows = []
    for run in runs:
        for name in _SYNC:
            if values := run.values(f"bridge/{name}"):
                unit = match(f"bridge/{name}")[0].unit
                total = f"{short(sum(values))} {unit}" if unit in ("bytes", "s") else ""
                label = f"{run.name} {name}" if len(runs) > 1 else name
                rows.append([label, f"{short(values[-1])} {unit}", total])
    return (
        charts.table("transfers of the weight syncs, all ranks", ("", "newest sync", "all syncs"), rows) if rows else ""
    )


def _samples(
    runs: Sequence[RunRecord], decoders: Mapping[str, Decode], num_samples: int, pictures: Mapping[str, Thumbnails]
) -> str:
    shown = []
    for run in runs:
        if not run.rollouts:
            shown.append(_name(run, runs) + '<p class="note">no samples were kept</p>')
            continue
        chosen = spread(run.rollouts, num_samples)
        step = "" if run.rollout_step is None else f" of step {run.rollout_step}"
        decode = decoders.get(run.name)
        words = f"{len(chosen)} of the {len(run.rollouts)} samples{step}, low rewards and high ones alike"
        plain = "" if decode else "; no colours, since no tokenizer of the run was found"
        cards = "".join(card(row, decode, pictures.get(run.name)) for row in chosen)
        shown.append(f'{_name(run, runs)}<p class="note">{words}{plain}</p><div class="grid">{cards}</div>')
    return legend() + "".join(shown)


def _configuration(runs: Sequence[RunRecord]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    if not keys:
        return '<p class="note">no configuration was found</p>'
    values = {key: [_cut(run.settings.get(key, "not there")) for run in runs] for key in keys}
    different = [key for key in keys if len(set(values[key])) > 1]
    columns = ("key", *(run.name for run in runs))
    whole = charts.table("", columns, [[key, *values[key]] for key in keys])
    first = ""
    if len(runs) > 1 and different:
        rows = [[key, *values[key]] for key in different]
        first = charts.table(f"{len(different)} keys differ between the runs", columns, rows)
    elif len(runs) > 1:
        first = '<p class="note">the configurations are equal</p>'
    return f"{first}<details><summary>all {len(keys)} keys</summary>{whole}</details>"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARACTERS else f"{text[:MAX_CELL_CHARACTERS]} ..."


def _warnings(runs: Sequence[RunRecord]) -> str:
    shown = []
    for run in runs:
        told = [entry for entry in run.log if entry[2] not in ("MESSAGE", "START", "END")]
        alike = Counter((level, text) for _, _, level, text in told)
        ranks: dict[tuple[str, str], set[str]] = {}
        for _, rank, level, text in told:
            ranks.setdefault((level, text), set()).add(rank)
        rows = [
            [level, str(count), ", ".join(sorted(ranks[level, text], key=lambda rank: (len(rank), rank))[:8]), text]
            for (level, text), count in list(alike.items())[-MAX_LOG_ROWS:]
        ]
        table = charts.table("", ("level", "times", "ranks", "text"), rows) if rows else '<p class="note">none</p>'
        lines = "\n".join(f"{time} rank {rank} {level} {text}" for time, rank, level, text in run.log[-MAX_LOG_ROWS:])
        whole = f"<details><summary>the newest entries of run.log</summary><pre>{escape(lines)}</pre></details>"
        shown.append(_name(run, runs) + table + (whole if lines else ""))
    return "".join(shown)


def _environment(runs: Sequence[RunRecord]) -> str:
    return (
        "".join(f"{_name(run, runs)}<pre>{escape(run.environment)}</pre>" for run in runs if run.environment)
        or '<p class="note">nothing was found</p>'
    )
