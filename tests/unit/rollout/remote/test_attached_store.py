"""An engine whose weight store comes to be in another process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.series import Series
from mega_rl.rollout.remote import attached_store, engine_process
from mega_rl.rollout.remote.engine_process import EngineProcess, LoadResult
from mega_rl.rollout.remote.weight_store import Location, Store, WantedVersion
from mega_rl.rollout.store_form import Part, StoreForm
from tests.pretended.engine_process import sealed

OTHER = Series("lm_head.weight", ((0, 3),), "lm_head.weight", ((0, 3),))
NORM = Series("model.norm.weight", ((0, 5),), "model.norm.weight", ((0, 5),))


def form(salt: int) -> StoreForm:
    return StoreForm(((NORM,),), torch.float32, num_slots=2, salt=salt)


def stored(store: Store, version: int, value: float) -> tuple[Location, WantedVersion]:
    """A version of these values, put into the store: what an engine is told of it."""
    store.parameters(0, version)["model.norm.weight"].fill_(value)
    return store.location_of(version), sealed(store, version).of(0)


@pytest.fixture
def engine() -> Any:
    """A worker's process, whose engine is its parameters alone."""
    live = {"model.norm.weight": torch.zeros(5)}
    found: Any = EngineProcess()
    found._engine = SimpleNamespace(live=live, exchange=lambda write, version: write(live))
    found._sampler = SimpleNamespace(num_unfinished=1, numbered_step=list)
    return found


@pytest.mark.parametrize("salt", [1, 2], ids=["of a helper that was started again", "of the next trainer"])
def test_an_engine_takes_weights_from_where_the_store_is_now(engine: Any, salt: int) -> None:
    first, second = Store(form(1)), Store(form(salt))
    for store, version in ((first, 1), (second, 2)):
        engine.attach(store.form)
        assert engine.load(*stored(store, version, version)) is LoadResult.WHOLE
        store.close()
    assert engine.engine.live["model.norm.weight"].tolist() == [2.0] * 5


def test_the_memory_of_a_store_without_its_process_is_given_back(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_store, "WATCH_S", 1e6)  # the test looks by itself
    store, weights = Store(form(1)), engine._weights
    engine.attach(store.form)
    engine.load(*stored(store, 1, 1.0))
    weights.look()
    assert weights._store is not None, "its process runs"
    monkeypatch.setattr(attached_store.psutil, "pid_exists", lambda process: process != store.location.process)
    with weights.at(store.location):
        weights.look()
        assert weights._store is not None, "somebody reads it"
    weights.look()
    assert weights._store is None
    store.close()


def test_weights_that_are_gone_before_they_are_read_leave_the_engine_as_it_was(engine: Any) -> None:
    store = Store(form(1))
    engine.attach(store.form)
    assert engine.load(*stored(store, 1, 1.0)) is LoadResult.WHOLE
    gone = stored(store, 2, 2.0)
    stored(store, 4, 4.0)  # in the same slot
    assert engine.load(*gone) is LoadResult.MISSED
    assert engine.engine.live["model.norm.weight"].tolist() == [1.0] * 5
    engine.proceed(3)
    assert engine._num_steps == 3, "it goes on with what it has"
    store.close()


def test_weights_that_are_replaced_while_they_are_read_are_sampled_with_by_nobody(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the copy and its proof, as by a trainer that is faster than an engine's copy."""
    store = Store(form(1))
    engine.attach(store.form)
    old, hashes_of = stored(store, 1, 1.0), Part.hashes_of

    def overtaken(part: Part, live: Any, salt: int) -> Any:
        if not part.numbers:
            return hashes_of(part, live, salt)
        monkeypatch.undo()
        store.stamp(old[0].slot, 3)
        live["model.norm.weight"][3:] = 7.0  # what the copy would have had of the newer version
        return hashes_of(part, live, salt)

    monkeypatch.setattr(Part, "hashes_of", overtaken)
    assert engine.load(*old) is LoadResult.TORN
    monkeypatch.setattr(engine_process, "REST_S", 0.0)
    assert engine.proceed(3) == [] and engine._num_steps == 0, "no step with weights that no version has"
    assert engine.load(*old) is LoadResult.MISSED, "what it asked for is half written"
    engine.proceed(3)
    assert engine._num_steps == 0, "it is as torn as before"
    assert engine.load(*stored(store, 3, 3.0)) is LoadResult.WHOLE
    engine.proceed(3)
    assert engine._num_steps == 3 and engine.engine.live["model.norm.weight"].tolist() == [3.0] * 5
    store.close()


def test_weights_that_are_wrong_and_were_not_replaced_are_a_failure(engine: Any) -> None:
    store = Store(form(1))
    engine.attach(store.form)
    told = stored(store, 1, 1.0)
    store.parameters(0, 1)["model.norm.weight"][2] = 7.0
    with pytest.raises(RuntimeError, match=r"another model.norm.weight than version 1 .* \(1 tensors differ\)"):
        engine.load(*told)
    store.close()


def test_what_no_version_changes_is_copied_and_hashed_once(engine: Any) -> None:
    both = StoreForm(((NORM, OTHER),), torch.float32, 2, salt=1, changing=((OTHER,),))
    store, live = Store(both), engine.engine.live
    live["lm_head.weight"] = torch.zeros(3)
    engine.attach(both)
    copied = []
    for version in range(3):
        parameters = store.parameters(0, version)
        parameters["lm_head.weight"].fill_(version)
        if version == 0:
            parameters["model.norm.weight"].fill_(9.0)
        assert engine.load(store.location_of(version), sealed(store, version).of(0)) is LoadResult.WHOLE
        assert live["lm_head.weight"].tolist() == [version] * 3 and live["model.norm.weight"].tolist() == [9.0] * 5
        copied.append(engine._weights.num_bytes)
    assert copied == [32, 44, 56]
    engine.attach(both)  # of a next trainer
    engine.load(store.location_of(2), sealed(store, 2).of(0))
    assert engine._weights.num_bytes == 56 + 32
    store.close()
