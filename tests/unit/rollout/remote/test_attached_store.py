"""An engine whose weight store comes to be in another process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.reshard.deposit import summed
from mega_rl.bridge.reshard.proof import live_hashes
from mega_rl.bridge.series import Series
from mega_rl.rollout.remote import attached_store
from mega_rl.rollout.remote.engine_process import EngineProcess
from mega_rl.rollout.remote.weight_store import Store, StoredVersion, StoreForm

NORM = Series("model.norm.weight", ((0, 5),), "model.norm.weight", ((0, 5),))


def form(salt: int) -> StoreForm:
    return StoreForm(((NORM,),), torch.float32, num_slots=2, salt=salt)


def stored(store: Store, version: int, value: float) -> StoredVersion:
    """A version of these values, put into the store."""
    parameters, slices = store.parameters(0, version), store.form.slices[0]
    parameters["model.norm.weight"].fill_(value)
    hashes = live_hashes(parameters, slices, store.form.salt)
    return StoredVersion(version, [summed({(s.local_name, s.hf_name): h} for s, h in zip(slices, hashes, strict=True))])


@pytest.fixture
def engine() -> Any:
    """A worker's process, whose engine is its parameters alone."""
    live = {"model.norm.weight": torch.zeros(5)}
    found: Any = EngineProcess()
    found._engine = SimpleNamespace(live=live, exchange=lambda write, version: write(live))
    return found


@pytest.mark.parametrize("salt", [1, 2], ids=["of a helper that was started again", "of the next trainer"])
def test_an_engine_takes_weights_from_where_the_store_is_now(engine: Any, salt: int) -> None:
    first, second = Store(form(1)), Store(form(salt))
    engine.load(first.form, first.location, stored(first, 1, 1.0))
    first.close()
    engine.load(second.form, second.location, stored(second, 2, 2.0))
    assert engine.engine.live["model.norm.weight"].tolist() == [2.0] * 5
    second.close()


def test_the_memory_of_a_store_without_its_process_is_given_back(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_store, "WATCH_S", 1e6)  # the test looks by itself
    store, weights = Store(form(1)), engine._weights
    engine.load(store.form, store.location, stored(store, 1, 1.0))
    weights.look()
    assert weights._store is not None, "its process runs"
    monkeypatch.setattr(attached_store.psutil, "pid_exists", lambda process: process != store.location.process)
    with weights.at(store.form, store.location):
        weights.look()
        assert weights._store is not None, "somebody reads it"
    weights.look()
    assert weights._store is None
    store.close()
