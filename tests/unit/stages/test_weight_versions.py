"""A sync out of turn stops before anything is moved, and the ledgers of all ranks become the metrics of the sync."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mega_rl.bridge.reshard.execute import Ledger
from mega_rl.observe.metrics import match
from mega_rl.stages.parts.weight_sync import WeightSync, ledger_metrics


def sync_after(version: int, is_training: bool, held: int) -> WeightSync:
    sync = WeightSync.__new__(WeightSync)
    sync.rollout, sync._pushed = SimpleNamespace(weight_version=held), (version, is_training)
    return sync


def test_versions_go_forward_and_validation_comes_before_training() -> None:
    sync_after(3, False, held=3)._check_version(3, is_validation=False)
    sync_after(3, True, held=3)._check_version(4, is_validation=True)
    for is_training, version, is_validation in ((True, 3, False), (True, 3, True), (False, 3, True), (True, 2, False)):
        with pytest.raises(RuntimeError, match=f"weight version {version} for .*holds version 3"):
            sync_after(3, is_training, held=3)._check_version(version, is_validation)


def test_an_engine_that_somebody_else_updated_is_refused() -> None:
    with pytest.raises(RuntimeError, match="holds weight version 2, but the last sync pushed 3"):
        sync_after(3, True, held=2)._check_version(4, is_validation=False)


def test_ledgers_become_declared_metrics() -> None:
    parts = [
        Ledger(10, sent, 30, 30, seconds, 2, pack_s=seconds / 4, transfer_s=0.1, write_s=0.2)
        for sent, seconds in ((20, 1.0), (40, 2.0))
    ]
    metrics = ledger_metrics(parts)
    assert all(match(name) for name in metrics)
    assert (metrics["bridge/bytes_local"], metrics["bridge/bytes_sent"], metrics["bridge/bytes_minimum"]) == (
        20,
        60,
        60,
    )
    assert metrics["bridge/largest_sender"] == pytest.approx(40 / 30)
    assert (metrics["bridge/seconds"], metrics["bridge/pack_s"]) == (2.0, 0.5)
    assert metrics["bridge/gb_per_s"] == pytest.approx(80e-9 / 2)
