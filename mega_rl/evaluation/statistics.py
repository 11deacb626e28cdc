"""Statistics of graded answers: pass@k, maj@k, confidence intervals and tests of a difference. Numbers in, numbers out.

A *bootstrap* draws the problems anew, with replacement, many times, and looks at how far the mean moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95  # of every confidence interval
BLOCK = 1 << 22  # numbers that one block of a bootstrap may hold

Floats = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """Where the mean lies with a confidence of ``LEVEL``."""

    low: float
    high: float


class Shift(NamedTuple):
    """The mean of paired differences."""

    mean: float
    interval: Interval
    p_value: float  # of a mean that differs from 0, two-sided


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """The probability that at least one of ``k`` answers is right, drawn from ``num_answers`` without replacement.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1): 1 - C(n - c, k) / C(n, k).
    """
    assert 0 <= num_right <= num_answers and 1 <= k <= num_answers, (num_answers, num_right, k)
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def maj_at_k(votes: Sequence[tuple[int, float]], num_blank: int, k: int) -> float:
    """The probability that the most frequent of ``k`` answers is right, drawn without replacement.

    A tie is broken by lot. Without any vote among the k there is no answer, which is wrong. The expectation is exact:
    maj@k as in Wang et al. 2022 (arXiv 2203.11171), over all subsets of k instead of one.

    Args:
        votes: of every distinct answer, how many gave it (>= 1) and whether it is right, 0 to 1.
        num_blank: samples from which no answer could be read; they are drawn too, and do not vote.
    """
    counts = tuple(sorted(votes))
    num_samples = num_blank + sum(count for count, _ in counts)
    assert num_blank >= 0 and all(count >= 1 for count, _ in counts) and 1 <= k <= num_samples, (votes, num_blank, k)
    if k == num_samples:
        most = max((count for count, _ in counts), default=0)
        tied = [right for count, right in counts if count == most]
        return sum(tied) / len(tied) if tied else 0.0
    return _expected_majority(counts, num_blank, k)


@lru_cache(maxsize=1 << 14)
def _expected_majority(votes: tuple[tuple[int, float], ...], num_blank: int, k: int) -> float:
    """Sums over the number t of votes for the winners and the number of answers that share it.

    How often each answer is drawn follows a multivariate hypergeometric distribution: binomial ones of the probability
    k / n, on condition that all add up to k. Binomials stay within the range of numbers, where C(n, k) would not.
    """
    num_samples = num_blank + sum(count for count, _ in votes)
    share = k / num_samples
    drawn = [_binomial(count, share, k) for count, _ in votes]
    blank, all_drawn = _binomial(num_blank, share, k), _binomial(num_samples, share, k)[k]
    total = 0.0
    for most in range(1, min(k, max((count for count, _ in votes), default=0)) + 1):
        # [number of answers with ``most`` votes, samples drawn]: its probability, and that times what is right of them
        chance = np.zeros((k // most + 1, k + 1))
        value = np.zeros_like(chance)
        chance[0, : len(blank)] = blank
        for (count, right), mass in zip(votes, drawn, strict=True):
            fewer = mass[:most]
            next_chance, next_value = (_convolved(rows, fewer, k) for rows in (chance, value))
            if count >= most:
                next_chance[1:, most:] += mass[most] * chance[:-1, : k + 1 - most]
                next_value[1:, most:] += mass[most] * (value + right * chance)[:-1, : k + 1 - most]
            chance, value = next_chance, next_value
        total += float(sum(value[tied, k] / tied for tied in range(1, len(value))))
    return min(1.0, total / all_drawn)


def _binomial(count: int, share: float, most: int) -> Floats:
    """The probabilities of 0 to min(count, most) successes."""
    log_share, log_rest = math.log(share), math.log1p(-share)
    whole = math.lgamma(count + 1)
    return np.array(
        [
            math.exp(whole - math.lgamma(x + 1) - math.lgamma(count - x + 1) + x * log_share + (count - x) * log_rest)
            for x in range(min(count, most) + 1)
        ]
    )


def _convolved(rows: Floats, mass: Floats, k: int) -> Floats:
    return np.stack([np.convolve(row, mass)[: k + 1] for row in rows])


def resampled_means(values: Sequence[float], seed: int, num_resamples: int) -> Floats:
    """[num_resamples]: means of as many values as there are, drawn with replacement; the same for the same seed."""
    assert len(values) > 0 and num_resamples > 0
    array, generator = np.asarray(values, np.float64), np.random.default_rng(seed)
    rows = max(1, BLOCK // len(array))
    blocks = []
    for begin in range(0, num_resamples, rows):
        size = (min(rows, num_resamples - begin), len(array))
        blocks.append(array[generator.integers(0, len(array), size)].mean(axis=1))
    return np.concatenate(blocks)


def interval_of_mean(values: Sequence[float], seed: int, num_resamples: int) -> Interval:
    """The percentile bootstrap interval (Efron 1979) of the mean of one value per problem."""
    return _interval(resampled_means(values, seed, num_resamples))


def _interval(means: Floats) -> Interval:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def paired_shift(differences: Sequence[float], seed: int, num_resamples: int) -> Shift:
    """The mean difference of two runs on the same problems, and a paired bootstrap of it.

    The p-value is twice the smaller share of resampled means on one side of 0, those at 0 counting for both; one is
    added to both numbers, so that it is never 0.
    """
    means = resampled_means(differences, seed, num_resamples)
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p_value = min(1.0, 2 * (tail + 1) / (num_resamples + 1))
    return Shift(float(np.mean(differences)), _interval(means), p_value)


def mcnemar(only_first: int, only_second: int) -> float:
    """The p-value of McNemar's exact test, two-sided: are the two kinds of discordant pairs equally likely?

    Args:
        only_first: problems that only the first run has right.
        only_second: problems that only the second run has right.
    """
    assert only_first >= 0 and only_second >= 0
    num_discordant = only_first + only_second
    tail = sum(math.comb(num_discordant, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**num_discordant)
