"""Which sequences go to which rank and micro-batch: lengths in, indices out, the same answer on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mega_rl.errors import InputError


def balance(
    lengths: Sequence[int],
    num_data_parallel: int,
    max_tokens: int,
    multiple: int = 1,
    attention_slope: float = 0.0,
) -> list[list[list[int]]]:
    """Sequences into micro-batches, so that data-parallel ranks work equally long and equally often.

    A sequence of n tokens costs ``n * (1 + attention_slope * n)``: its tokens pass every weight, and attend to each
    other. ``result[rank][k]`` lists the indices into ``lengths`` of the rank's k-th micro-batch, ascending. Always:
      - each index stands exactly once, and no micro-batch holds more than ``max_tokens``;
      - all ranks have the same number of micro-batches, at least 1: a collective in a forward pass finds its partners;
      - no micro-batch is empty unless its rank has fewer sequences than micro-batches; then some are the list ``[]``;
      - the costs of two ranks differ by at most that of the longest sequence;
      - a rank's micro-batches stand in descending order of tokens, so that those of one round are alike;
      - the number of micro-batches of a rank is a multiple of ``multiple``.
    Both the ranks and their micro-batches are filled by the longest-first rule (Graham 1969, LPT). The number of
    micro-batches is found in growing strides and then by bisection, O(n log^2 n) in all.

    Args:
        lengths: tokens of each sequence, all > 0; may be empty.
        num_data_parallel: ranks to share the work.
        max_tokens: tokens that fit into one micro-batch.
        multiple: an interleaved pipeline takes as many micro-batches as it has stages, or a multiple.
        attention_slope: 1 / the length at which attention costs as much as everything else (`models.flops`).

    Raises:
        InputError: a single sequence is longer than ``max_tokens``.
    """
    assert num_data_parallel >= 1 and multiple >= 1 and all(length > 0 for length in lengths), (
        num_data_parallel,
        lengths,
    )
    if max(lengths, default=0) > max_tokens:
        raise InputError(
            f"trainer.max_tokens_per_microbatch = {max_tokens} is less than one sequence of {max(lengths)} tokens; "
            "raise it, or lower data.max_prompt_length or data.max_response_length."
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    costs = [length * (1.0 + attention_slope * length) for length in lengths]
    shares = _longest_first(order, costs, num_data_parallel)
    rounds = 1
    for share in shares:
        rounds = _fewest_rounds(share, lengths, rounds, multiple, max_tokens)
    while True:  # the rule may find room in fewer micro-batches and not in more: ends at one sequence in each
        found = [_packed(share, lengths, rounds * multiple, max_tokens) for share in shares]
        packed = [bins for bins in found if bins is not None]
        if len(packed) == len(shares):
            return packed
        rounds += 1


def split_even(num_items: int, num_parts: int) -> list[range]:
    """``range(num_items)`` cut into consecutive parts whose sizes differ by at most 1, longer ones first."""
    assert num_items >= 0 and num_parts >= 1, (num_items, num_parts)
    size, num_longer = divmod(num_items, num_parts)
    starts = [part * size + min(part, num_longer) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def _fewest_rounds(share: list[int], lengths: Sequence[int], least: int, multiple: int, max_tokens: int) -> int:
    """Rounds of ``multiple`` micro-batches, ``least`` or more, in which the rule finds room, and not in one fewer."""
    tokens = sum(lengths[i] for i in share)
    num_large = sum(2 * lengths[i] > max_tokens for i in share)  # no two of them share a micro-batch
    least = max(least, -(-max(num_large, -(-tokens // max_tokens)) // multiple))
    full, enough, stride = least - 1, least, 1
    while _packed(share, lengths, enough * multiple, max_tokens) is None:
        full, enough, stride = enough, enough + stride, 2 * stride
    while enough - full > 1:
        middle = (full + enough) // 2
        if _packed(share, lengths, middle * multiple, max_tokens) is None:
            full = middle
        else:
            enough = middle
    return enough


def _longest_first(order: Sequence[int], costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Each index of ``order``, costliest first, into the bin that costs least so far; ties go to the lower bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, b) for b in range(num_bins)]
    for index in order:
        load, b = heap[0]
        bins[b].append(index)
        heapq.heapreplace(heap, (load + costs[index], b))
    return bins


def _packed(share: Sequence[int], lengths: Sequence[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """One rank's micro-batches, fullest first, each with its indices ascending; None if one would be too full."""
    bins = _longest_first(share, lengths, num_bins)
    loads = [sum(lengths[i] for i in indices) for indices in bins]
    if max(loads) > max_tokens:
        return None
    return [sorted(bins[b]) for b in sorted(range(num_bins), key=lambda b: (-loads[b], b))]
