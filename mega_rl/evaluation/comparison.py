"""Two evaluations on the same problems: which problems flipped, and whether the difference can be chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mega_rl.errors import InputError, shown
from mega_rl.evaluation.grading import ProblemOutcome
from mega_rl.evaluation.statistics import mcnemar, paired_shift
from mega_rl.evaluation.summary import Bootstrap

SIGNIFICANT = 0.05  # a p-value below is called significant
MOSTLY = 0.5  # a problem counts as solved by samples if at least this share of them is right


def compare(first: Sequence[ProblemOutcome], second: Sequence[ProblemOutcome], bootstrap: Bootstrap) -> dict[str, Any]:
    """What changed from the first to the second, as JSON has it.

    Raises:
        InputError: they have no problem in common, or a problem of one number has two ground truths.
    """
    ours, theirs = ({(o.data_source, o.problem): o for o in found} for found in (first, second))
    pairs = [(ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        raise InputError("the two evaluations have no problem in common: compare evaluations of the same data")
    for one, other in pairs:
        if one.ground_truth != other.ground_truth:
            raise InputError(
                f"problem {one.problem} of {one.data_source} has the ground truth {shown(one.ground_truth)} in the "
                f"first evaluation and {shown(other.ground_truth)} in the second: compare evaluations of the same data"
            )
    return {
        "num_problems": len(pairs),
        "num_only_in_first": len(ours) - len(pairs),
        "num_only_in_second": len(theirs) - len(pairs),
        "greedy": _greedy([(a, b) for a, b in pairs if a.greedy is not None and b.greedy is not None]),
        "sampled": _sampled([(a, b) for a, b in pairs if a.sampled and b.sampled], bootstrap),
    }


def _greedy(pairs: Sequence[tuple[ProblemOutcome, ProblemOutcome]]) -> dict[str, Any] | None:
    if not pairs:
        return None
    lost = [a for a, b in pairs if a.greedy and not b.greedy]
    won = [a for a, b in pairs if b.greedy and not a.greedy]
    p_value = mcnemar(len(lost), len(won))
    return {
        "num_problems": len(pairs),
        "first": sum(bool(a.greedy) for a, _ in pairs) / len(pairs),
        "second": sum(bool(b.greedy) for _, b in pairs) / len(pairs),
        "test": "McNemar, exact, two-sided",
        "p_value": p_value,
        "is_significant": p_value < SIGNIFICANT,
        "right_to_wrong": [_name(outcome) for outcome in lost],
        "wrong_to_right": [_name(outcome) for outcome in won],
    }


def _sampled(pairs: Sequence[tuple[ProblemOutcome, ProblemOutcome]], bootstrap: Bootstrap) -> dict[str, Any] | None:
    if not pairs:
        return None
    shares = [(a, a.share_right or 0.0, b.share_right or 0.0) for a, b in pairs]
    shift = paired_shift([after - before for _, before, after in shares], bootstrap.seed, bootstrap.num_resamples)
    return {
        "num_problems": len(pairs),
        "first": sum(before for _, before, _ in shares) / len(shares),
        "second": sum(after for _, _, after in shares) / len(shares),
        "difference": {"value": shift.mean, "low": shift.interval.low, "high": shift.interval.high},
        "test": f"paired bootstrap over problems, {bootstrap.num_resamples} resamples, seed {bootstrap.seed}",
        "p_value": shift.p_value,
        "is_significant": shift.p_value < SIGNIFICANT,
        "right_to_wrong": [_name(a, before, after) for a, before, after in shares if before >= MOSTLY > after],
        "wrong_to_right": [_name(a, before, after) for a, before, after in shares if after >= MOSTLY > before],
    }


def _name(outcome: ProblemOutcome, before: float | None = None, after: float | None = None) -> dict[str, Any]:
    shares = {} if before is None else {"first": before, "second": after}
    return {"data_source": outcome.data_source, "problem": outcome.problem} | shares
