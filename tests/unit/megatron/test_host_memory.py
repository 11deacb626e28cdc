"""Memory on the host for what leaves the device, in pieces that torch does not round up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from mega_rl.megatron.offload import SMALLEST_PIECE, HostMemory, HostStorages, piece_sizes


@given(st.integers(0, 1 << 44))
@settings(deadline=None)
def test_pieces_are_powers_of_two_and_lose_less_than_the_smallest(num_bytes: int) -> None:
    sizes = piece_sizes(num_bytes)
    assert all(size & (size - 1) == 0 and size >= SMALLEST_PIECE for size in sizes)
    assert num_bytes <= sum(sizes) < num_bytes + SMALLEST_PIECE
    assert len(set(sizes)) == len(sizes)


def test_a_range_goes_across_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned, which needs a device, is replaced by plain memory here."""
    monkeypatch.setattr("mega_rl.megatron.offload.SMALLEST_PIECE", 8)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **rest: empty(*size, **rest))
    memory = HostMemory(56, is_pinned=True)  # 32 + 16 + 8
    values = torch.arange(50, dtype=torch.uint8)
    parts = list(memory.parts(3, 50))
    assert [(place.start, place.stop) for place, _ in parts] == [(0, 29), (29, 45), (45, 50)]
    for place, part in parts:
        part.copy_(values[place])
    assert torch.equal(torch.cat([part for _, part in memory.parts(3, 50)]), values)
    assert list(memory.parts(3, 0)) == []


def test_storages_come_back_bit_for_bit_and_keep_their_memory() -> None:
    storages = HostStorages()
    tensors = [torch.randn(n) for n in (7, 1, 0, 130)]
    kept = [tensor.clone() for tensor in tensors]
    for _ in range(2):
        storages.to_host([*tensors, tensors[0][2:]])
        assert storages.is_away and all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        memory = storages._memory
        storages.to_device()
        assert not storages.is_away and storages._memory is memory
        assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
