"""The figures of an evaluation, per data source and over all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mega_rl.evaluation.grading import Grading, ProblemOutcome
from mega_rl.evaluation.statistics import interval_of_mean, maj_at_k, pass_at_k
from mega_rl.rollout.episodes.episode_metrics import outcome_metrics

ALL = "all"  # the row over all data sources, where there are several


@dataclass(frozen=True)
class Bootstrap:
    """How confidence intervals are drawn."""

    seed: int = 0
    num_resamples: int = 1000


def default_ks(n: int) -> list[int]:
    """1, 2, 4, ... and ``n``; nothing without samples."""
    return sorted({k for power in range(n.bit_length()) if (k := 1 << power) <= n} | ({n} if n else set()))


def summarise(
    found: Sequence[ProblemOutcome], ks: Sequence[int], grading: Grading, bootstrap: Bootstrap
) -> dict[str, Any]:
    """Everything that is printed and drawn, as JSON has it; depends on nothing but its arguments."""
    by_source: dict[str, list[ProblemOutcome]] = defaultdict(list)
    for outcome in found:
        by_source[outcome.data_source].append(outcome)
    groups = dict(sorted(by_source.items())) | ({ALL: list(found)} if len(by_source) > 1 else {})
    gradings = {name: grading.of_source(name) for name in sorted(by_source)}
    voteless = {name: of_source.reward for name, of_source in gradings.items() if of_source.extract is None}
    notes = []
    if ks and voteless:
        rewards = ", ".join(dict.fromkeys(voteless.values()))
        notes.append(f"maj@k is left out: no answer can be read out of a response to the reward {rewards}")
    return {
        "right": {
            "reward": ", ".join(dict.fromkeys(one.reward for one in gradings.values())),
            "at_least": grading.right_at,
        },
        "bootstrap": {"seed": bootstrap.seed, "num_resamples": bootstrap.num_resamples},
        "notes": notes,
        "sources": {
            name: _of_source(group, ks, all(o.data_source not in voteless for o in group), bootstrap)
            for name, group in groups.items()
        },
    }


def _of_source(
    found: Sequence[ProblemOutcome], ks: Sequence[int], has_votes: bool, bootstrap: Bootstrap
) -> dict[str, Any]:
    metrics: dict[str, Any] = {}

    def add(name: str, values: list[float]) -> None:
        if values:
            low, high = interval_of_mean(values, bootstrap.seed, bootstrap.num_resamples)
            mean = sum(values) / len(values)
            metrics[name] = {"value": mean, "low": low, "high": high, "num_problems": len(values)}

    add("greedy", [float(outcome.greedy) for outcome in found if outcome.greedy is not None])
    for name, of_problem in (("pass", _pass), ("maj", _majority)):
        for k in ks if name == "pass" or has_votes else ():
            add(f"{name}@{k}", [of_problem(outcome, k) for outcome in found if len(outcome.sampled) >= k])
    lengths = [length for outcome in found for length in outcome.lengths]
    num_responses = sum(outcome.num_responses for outcome in found)
    episodes = [episode for outcome in found for episode in outcome.episodes]
    of_episodes = outcome_metrics([outcome for outcome, _ in episodes], [number for _, number in episodes])
    return {
        "num_problems": len(found),
        "num_responses": num_responses,
        "num_unknown": sum(outcome.num_unknown for outcome in found),
        "response_length_mean": sum(lengths) / len(lengths),
        "cut_fraction": sum(outcome.num_cut for outcome in found) / num_responses,
        "metrics": metrics,
        **({"episodes": of_episodes} if of_episodes else {}),
    }


def _pass(outcome: ProblemOutcome, k: int) -> float:
    return pass_at_k(len(outcome.sampled), sum(outcome.sampled), k)


def _majority(outcome: ProblemOutcome, k: int) -> float:
    counts = Counter(outcome.votes)
    num_blank = counts.pop(None, 0)
    right: Counter[str | None] = Counter()
    for answer, is_right in zip(outcome.votes, outcome.sampled, strict=True):
        right[answer] += is_right
    return maj_at_k([(count, right[answer] / count) for answer, count in counts.items()], num_blank, k)


Table = list[tuple[str, ...]]


def table(summary: dict[str, Any]) -> Table:
    """A header and one row per figure, with one column per data source."""
    sources = summary["sources"]
    names = list(dict.fromkeys(name for source in sources.values() for name in source["metrics"]))
    rows: Table = [("", *sources)]
    plain: list[tuple[str, str, Callable[[Any], str]]] = [
        ("problems", "num_problems", str),
        ("responses", "num_responses", str),
        ("unknown rewards", "num_unknown", str),
        ("mean tokens", "response_length_mean", lambda value: f"{value:.1f}"),
        ("ended by the limit", "cut_fraction", lambda value: f"{value:.1%}"),
    ]
    rows += [(title, *(show(source[key]) for source in sources.values())) for title, key, show in plain[:2]]
    rows += [(name, *(_with_interval(source["metrics"].get(name)) for source in sources.values())) for name in names]
    rows += [(title, *(show(source[key]) for source in sources.values())) for title, key, show in plain[2:]]
    names = list(dict.fromkeys(name for source in sources.values() for name in source.get("episodes", {})))
    rows += [(name, *(_plainly(source.get("episodes", {}).get(name)) for source in sources.values())) for name in names]
    return rows


def _plainly(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _with_interval(metric: dict[str, float] | None) -> str:
    return "" if metric is None else f"{metric['value']:.4f}  [{metric['low']:.4f}, {metric['high']:.4f}]"
