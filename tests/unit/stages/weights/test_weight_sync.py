"""The sync's order and its versions, what it folds for training and for validation, and its metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.bridge.outgoing.transform import Changed
from mega_rl.bridge.reshard.execute import Read, TransferCount
from mega_rl.bridge.slices import Box
from mega_rl.config.schema.sampling import AqnConfig
from mega_rl.observe.metrics.declared import match
from mega_rl.stages.weights.weight_sync import Pushed, RecordedSync, WeightSync, transfer_metrics

BOX = ((0, 2),)
COUNT = TransferCount(10, 20, 30, 30, 1.0, 2)


class Sink:
    """Reads one weight at every update and keeps it."""

    inspect = None

    def __init__(self, done: list[Any], keeps_versions: bool = False) -> None:
        self.done, self.keeps_versions = done, keeps_versions
        self.weight_version = 0
        self.held = torch.zeros(2)

    def layout(self) -> list[list[Any]]:
        return [[]]

    def connect(self, sources: Any) -> None:
        self.done.append(("connect", sources))

    def update(self, read: Read, version: int, is_validation: bool = False) -> TransferCount:
        self.done.append(("update", version, is_validation))
        self.held, self.weight_version = read("local", "hf", BOX, BOX), version
        return COUNT

    def begin_sampling(self) -> None:
        self.done.append("begin sampling")

    def make_room(self) -> None:
        self.done.append("make room")


class Trainer:
    """Ones, in float32."""

    def __init__(self, done: list[Any]) -> None:
        self.policy = SimpleNamespace(
            refuse_replaced=lambda what: done.append(("refuse", what)),
            local=lambda local_name, local_box: torch.ones(2),
        )
        self.offload = SimpleNamespace(
            to_host=lambda *parts: done.append(("to host", *parts)), to_device=lambda: done.append("to device")
        )


class Times:
    """Multiplies by its factor and the version."""

    def __init__(self, factor: float, done: list[Any]) -> None:
        self.factor, self.done = factor, done

    def for_sync(self, read: Read, version: int) -> Changed:
        self.done.append(("transform", version))

        def product(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
            return read(local_name, hf_name, hf_box, local_box) * self.factor * version

        return Changed(product, sigma=0.5, metrics=lambda: {"aqn/num_tensors": float(version)})


def new_sync(done: list[Any], keeps_versions: bool = False) -> tuple[WeightSync, Sink]:
    sink, trainer = Sink(done, keeps_versions), Trainer(done)
    transforms = [Times(3.0, done)]
    return WeightSync(trainer, [["held"]], sink, transforms, torch.bfloat16, proof=None), sink  # type: ignore[arg-type, list-item]


def test_parts_take_the_device_in_turn() -> None:
    """Transforms read masters before they leave the device; the optimizer is gone before an engine's weights wake up,
    and the trainer's weights before its cache does."""
    done: list[Any] = []
    sync, _ = new_sync(done)
    assert done == [("connect", [["held"]])]
    sync.push(version=2)
    update = [("to host", "gradients", "optimizer"), ("update", 2, False), ("to host", "weights"), "begin sampling"]
    assert done[1:] == [("refuse", "a push"), ("transform", 2), *update]
    sync.end_sampling()
    assert done[-2:] == ["make room", "to device"]


def test_training_samples_from_changed_weights_and_validation_from_exact_ones() -> None:
    sync, sink = new_sync([])
    pushed = sync.push(version=2, is_validation=True)
    assert (pushed.version, pushed.sigma) == (2, 0.0) and not [name for name in pushed.metrics if "aqn" in name]
    assert sink.held.tolist() == [1.0, 1.0] and sink.held.dtype == torch.bfloat16
    pushed = sync.push(version=2)
    assert (pushed.version, pushed.sigma, pushed.metrics["aqn/num_tensors"]) == (2, 0.5, 2.0)
    assert sink.held.tolist() == [6.0, 6.0]
    assert pushed.metrics["bridge/bytes_sent"] == 20 and pushed.metrics["bridge/plan_s"] >= 0


def test_versions_go_forward_and_validation_comes_before_training() -> None:
    sync, sink = new_sync([])
    sync.push(3, is_validation=True)
    for version, is_validation in ((3, True), (2, False)):
        refuses(sync, version, is_validation)
    sync.push(3)
    for version, is_validation in ((3, False), (3, True), (2, False)):
        refuses(sync, version, is_validation)
    assert sink.weight_version == 3
    assert sync.push(4, is_validation=True).version == 4


def refuses(sync: WeightSync, version: int, is_validation: bool) -> None:
    with pytest.raises(RuntimeError, match=f"weight version {version} for .*holds version 3"):
        sync.push(version, is_validation)


def test_a_kept_version_is_written_once_for_training_and_its_exact_weights_besides() -> None:
    done: list[Any] = []
    sync, _ = new_sync(done, keeps_versions=True)
    for version in (2, 3):
        assert sync.push(version, is_validation=True).sigma == 0.0
        pushed = sync.push(version)
        num_done = len(done)
        assert sync.push(version) is pushed and pushed.sigma == 0.5 and len(done) == num_done, "nothing is done again"
    updates = [one for one in done if one[0] == "update"]
    assert updates == [("update", version, exact) for version in (2, 3) for exact in (True, False)]
    for version, is_validation in ((3, True), (2, False)):
        refuses(sync, version, is_validation)


def test_an_engine_that_somebody_else_updated_is_refused() -> None:
    sync, sink = new_sync([])
    sync.push(3)
    sink.weight_version = 2
    with pytest.raises(RuntimeError, match="holds weight version 2, but the last sync pushed 3"):
        sync.push(4)


def test_records_carry_the_version_and_the_noise_of_the_schedule() -> None:
    turned: list[int] = []
    records: Any = SimpleNamespace(turn_to=turned.append)
    config = AqnConfig(enabled=True, schedule="constant", sigma_start=0.25)
    sync = RecordedSync(records, AqnNoise(config, total_steps=4))
    assert sync.push(version=3) == Pushed(3, 0.25) and turned == [3]
    of_fleet = RecordedSync(None, AqnNoise(config, total_steps=4))
    assert of_fleet.push(version=2) == Pushed(2, 0.25) and turned == [3]


def test_transfer_counts_become_declared_metrics() -> None:
    parts = [
        TransferCount(10, sent, 30, 30, seconds, 2, pack_s=seconds / 4, transfer_s=0.1, write_s=0.2)
        for sent, seconds in ((20, 1.0), (40, 2.0))
    ]
    metrics = transfer_metrics(parts)
    assert all(match(name) for name in metrics)
    assert (metrics["bridge/bytes_local"], metrics["bridge/bytes_sent"], metrics["bridge/bytes_minimum"]) == (
        20,
        60,
        60,
    )
    assert metrics["bridge/largest_sender"] == pytest.approx(40 / 30)
    assert (metrics["bridge/seconds"], metrics["bridge/pack_s"]) == (2.0, 0.5)
    assert metrics["bridge/gb_per_s"] == pytest.approx(80e-9 / 2)
