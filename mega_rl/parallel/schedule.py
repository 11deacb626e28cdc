"""Which sequences go to which rank and micro-batch: lengths in, indices out, the same answer on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mega_rl.errors import InputError


def balance(
    lengths: Sequence[int], num_data_parallel: int, max_tokens: int, multiple: int = 1
) -> list[list[list[int]]]:
    """Sequences into micro-batches, so that data-parallel ranks work equally long and equally often.

    ``result[rank][k]`` lists the indices into ``lengths`` of the rank's k-th micro-batch, ascending. Always:
      - each index stands exactly once, and no micro-batch holds more than ``max_tokens``;
      - all ranks have the same number of micro-batches, at least 1: a collective in a forward pass finds its partners;
      - no micro-batch is empty unless there are fewer sequences than micro-batches; then some are the list ``[]``;
      - the tokens of two ranks differ by at most the longest sequence;
      - the number of micro-batches of a rank is a multiple of ``multiple``.
    It is the fewest for which the longest-first rule (Graham 1969, LPT) finds room.

    Args:
        lengths: tokens of each sequence, all > 0; may be empty.
        num_data_parallel: ranks to share the work.
        max_tokens: tokens that fit into one micro-batch.
        multiple: an interleaved pipeline takes as many micro-batches as it has stages, or a multiple.

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
    rounds = max(1, -(-sum(lengths) // (num_data_parallel * max_tokens * multiple)))
    while True:  # ends at the latest when every sequence has a micro-batch to itself
        bins = _longest_first(lengths, num_data_parallel * rounds * multiple)
        loads = [sum(lengths[i] for i in indices) for indices in bins]
        if max(loads) <= max_tokens:
            return _deal(bins, loads, num_data_parallel)
        rounds += 1


def split_even(num_items: int, num_parts: int) -> list[range]:
    """``range(num_items)`` cut into consecutive parts whose sizes differ by at most 1, longer ones first."""
    assert num_items >= 0 and num_parts >= 1, (num_items, num_parts)
    size, num_longer = divmod(num_items, num_parts)
    starts = [part * size + min(part, num_longer) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def _longest_first(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Each sequence, longest first, into the least loaded bin; ties go to the lower index."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, b = heap[0]
        bins[b].append(index)
        heapq.heapreplace(heap, (load + lengths[index], b))
    return [sorted(indices) for indices in bins]


def _deal(bins: list[list[int]], loads: list[int], num_ranks: int) -> list[list[list[int]]]:
    """Bins to ranks in rounds of similar load; in each round the rank with least so far takes the fullest bin.

    Pairing the least loaded rank with the fullest bin never lets two ranks drift apart by more than two bins differ.
    """
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    dealt: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda r: (totals[r], r))
        for rank, b in zip(ranks, order[start : start + num_ranks], strict=True):
            dealt[rank].append(bins[b])
            totals[rank] += loads[b]
    return dealt
