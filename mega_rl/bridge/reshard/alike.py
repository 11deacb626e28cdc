"""Tensors that the same ranks hold and want in the same pieces, found without looking at them one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mega_rl.bridge.series import Number, Series

Holder = tuple[int, Series]  # a rank and what it holds or wants


class TensorGroup(NamedTuple):
    """Tensors of one kind with their holders; each series holds all tensors of the group, and perhaps others."""

    numbers: tuple[Number, ...]
    sources: tuple[Holder, ...]
    destinations: tuple[Holder, ...]


def group_tensors(sources: Iterable[Holder], destinations: Iterable[Holder]) -> Iterator[TensorGroup]:
    """Every tensor that somebody wants in one group, kinds in the order in which destinations name them."""
    wanted, held = _by_kind(destinations), _by_kind(sources)
    for kind, users in wanted.items():
        owners = held.get(kind, [])
        for numbers, present in _alike([*owners, *users]):
            first_user = next((i for i, p in enumerate(present) if p >= len(owners)), len(present))
            if first_user < len(present):
                group_sources = tuple(owners[p] for p in present[:first_user])
                yield TensorGroup(numbers, group_sources, tuple(users[p - len(owners)] for p in present[first_user:]))


def _by_kind(holders: Iterable[Holder]) -> dict[str, list[Holder]]:
    found: dict[str, list[Holder]] = defaultdict(list)
    for holder in holders:
        found[holder[1].hf_name].append(holder)
    return found


def _alike(holders: list[Holder]) -> Iterator[tuple[tuple[Number, ...], list[int]]]:
    """Groups of tensors, each with the positions of the holders that have them; sets of holders are bits of integers.

    A series is of all pairs of its layers and its experts, so that layers and experts are sorted apart.
    """
    by_layers = _same_bits((series.layers for _, series in holders))
    by_experts = _same_bits((series.experts for _, series in holders))
    for layer_bits, layers in by_layers.items():
        for expert_bits, experts in by_experts.items():
            present = _positions(layer_bits & expert_bits)
            if present:
                yield tuple((layer, expert) for layer in layers for expert in experts), present


def _same_bits(number_sets: Iterable[Iterable[int]]) -> dict[int, list[int]]:
    """Numbers that lie in the same sets, by those sets: bit i is the i-th."""
    sets: dict[tuple[int, ...], int] = defaultdict(int)
    for i, numbers in enumerate(number_sets):
        sets[tuple(numbers)] |= 1 << i
    bits_of: dict[int, int] = defaultdict(int)
    for members, bits in sets.items():
        for number in members:
            bits_of[number] |= bits
    alike: dict[int, list[int]] = defaultdict(list)
    for number in sorted(bits_of):
        alike[bits_of[number]].append(number)
    return alike


def _positions(bits: int) -> list[int]:
    """The positions of the bits that are 1, in ascending order."""
    return [i for i, digit in enumerate(reversed(bin(bits))) if digit == "1"]
