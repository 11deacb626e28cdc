"""What episodes were like, as numbers by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mega_rl.types import Outcome, TrajectorySummary


def episode_metrics(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """What the episodes among these were like; empty without episodes."""
    found = [summary for summary in summaries if summary.episode is not None]
    replies = [summary.num_tokens - summary.num_prompt - summary.num_sampled for summary in found]
    return outcome_metrics([summary.episode for summary in found if summary.episode is not None], replies)


def outcome_metrics(episodes: Sequence[Outcome], reply_tokens: Sequence[int]) -> dict[str, float]:
    """The same of outcomes, and of how many tokens of replies stand in each episode.

    What an environment counts is given as a mean over its episodes, and what a tool counts, as a mean over its calls.
    """
    if not episodes:
        return {}
    sums: Counter[str] = Counter()
    for episode in episodes:
        sums.update(episode.metrics)
    count = len(episodes)
    metrics = {f"episode/{name}": value / count for name, value in sums.items() if "/" not in name}
    for name, value in sums.items():
        kind, _, of_tool = name.partition("/")
        if of_tool:
            calls = max(1, sums[f"tool_calls/{of_tool}"])
            metrics[f"episode/{name}"] = value / (count if kind == "tool_calls" else calls)
    stops = Counter(episode.stop for episode in episodes)
    return metrics | {
        "episode/turns": sum(episode.num_turns for episode in episodes) / count,
        "episode/reply_tokens": sum(reply_tokens) / count,
        "episode/failed_fraction": stops["failed"] / count,
        "episode/turns_limit_fraction": stops["turns"] / count,
        "episode/tokens_limit_fraction": stops["tokens"] / count,
    }
