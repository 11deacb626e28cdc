"""Copies to a device by way of pinned memory, with a device that is only pretended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.platform.transfers import NUM_SLOTS, HostCopies


class PretendedEvent:
    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number

    def synchronize(self) -> None:
        self._log.append(f"waited for {self._number}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a device that behaves like one is asked for; its memory is the host's, and nothing is pinned."""
    found: list[str] = []
    empty = torch.empty

    def record_event() -> PretendedEvent:
        found.append("queued")
        return PretendedEvent(found, found.count("queued"))

    def unpinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        assert pin_memory, "else a copy would hold the host up"
        return empty(*sizes, **options)

    module = SimpleNamespace(current_stream=lambda: SimpleNamespace(record_event=record_event))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "empty", unpinned)
    return found


def test_a_piece_is_filled_anew_only_when_the_device_has_copied_it(log: list[str]) -> None:
    source, into = torch.randn(7, 5).to(torch.bfloat16), torch.zeros(7, 5, dtype=torch.bfloat16)
    copies = HostCopies(torch.device("meta"), num_bytes=20)  # ten elements, so 35 of them are four pieces
    copies.copy(into, source)
    assert into.equal(source)
    assert log == [*["queued"] * NUM_SLOTS, "waited for 1", "queued", "waited for 2", "queued"]
    copies.finish()
    assert log[-2:] == ["waited for 3", "waited for 4"]


def test_what_is_not_in_one_piece_goes_by_itself(log: list[str]) -> None:
    source, into = torch.randn(4, 3), torch.zeros(4, 6)
    HostCopies(torch.device("meta"), num_bytes=64).copy(into[:, :3], source)
    assert into[:, :3].equal(source) and not into[:, 3:].any() and not log


def test_on_a_host_copies_are_plain() -> None:
    source, into = torch.randn(9), torch.zeros(9)
    copies = HostCopies(torch.device("cpu"))
    copies.copy(into, source)
    copies.finish()
    assert into.equal(source)
