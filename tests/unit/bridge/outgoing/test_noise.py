"""The draw and its application to tensors: golden values, independence, rounding, no accumulation."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy
import pytest
import torch

from mega_rl.bridge.outgoing import noise as noise_module
from mega_rl.bridge.outgoing.noise import AqnNoise, NoiseFigures, Records, draw
from mega_rl.bridge.slices import Box
from mega_rl.config.schema.sampling import AqnConfig
from tests.pretended.trainer.ranks import PretendedRanks

NAME = "model.layers.0.input_layernorm.weight"
WIDTH = 1536
WHOLE = ((0, WIDTH),)


def make(**keys: Any) -> AqnNoise:
    return AqnNoise(AqnConfig(enabled=True, **keys), total_steps=100)


def weight(seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(width, generator=torch.Generator().manual_seed(seed))


def apply(
    noise: AqnNoise,
    clean: torch.Tensor,
    version: int,
    sigma: float,
    dtype: torch.dtype,
    shape: tuple[int, ...] = (WIDTH,),
    box: Box = WHOLE,
) -> torch.Tensor:
    return noise.for_sync(version, sigma).apply(NAME, clean, shape, box, dtype)


def test_golden_values() -> None:
    first = draw(1234, 7, NAME, (WIDTH,))[:4]
    assert first.dtype == numpy.float32
    assert first.tolist() == numpy.array([0.6480309, 1.1867009, 0.90700245, -1.1560171], numpy.float32).tolist()


def test_global_generators_neither_matter_nor_move() -> None:
    noise, clean = make(rounding="stochastic"), weight()
    outcomes = []
    for seed in (0, 1):
        random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
        before: Any = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        outcomes.append(apply(noise, clean, 3, 0.01, torch.bfloat16))
        assert random.getstate() == before[0]
        assert repr(numpy.random.get_state()) == repr(before[1])
        assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.equal(*outcomes)


def test_draws_are_standard_normal_and_independent_over_layers_versions_and_seeds() -> None:
    keys = itertools.product((1, 2), (0, 1), ("model.layers.0.x", "model.layers.1.x", "model.layers.10.x"))
    draws = numpy.stack([draw(seed, version, name, (20_000,)) for seed, version, name in keys])
    # Five standard errors of the mean (0.0071), the standard deviation (0.005) and a correlation (0.0071).
    assert abs(draws.mean(axis=1)).max() < 0.036
    assert abs(draws.std(axis=1) - 1).max() < 0.025
    correlations = numpy.corrcoef(draws) - numpy.eye(len(draws))
    assert abs(correlations).max() < 0.036


def test_a_target_differs_by_exactly_the_noise_and_its_source_not_at_all() -> None:
    clean = weight()
    kept = clean.clone()
    noisy = apply(make(), clean, 7, 0.05, torch.float32)
    expected = kept + torch.from_numpy(draw(1234, 7, NAME, (WIDTH,)) * numpy.float32(0.05))
    assert torch.equal(noisy, expected)
    assert torch.equal(clean, kept)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "fp32"])
def test_a_slice_of_the_weights_gets_the_slice_of_the_noise(rounding: str) -> None:
    noise, clean = make(rounding=rounding), weight().reshape(48, 32)
    whole = apply(noise, clean, 7, 0.01, torch.bfloat16, (48, 32), ((0, 48), (0, 32)))
    part = apply(noise, clean[12:24, 8:32], 7, 0.01, torch.bfloat16, (48, 32), ((12, 24), (8, 32)))
    assert torch.equal(part, whole[12:24, 8:32])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigma_zero_is_the_plain_cast_and_a_new_tensor(rounding: str, dtype: torch.dtype) -> None:
    clean = weight()
    sync = make(rounding=rounding).for_sync(7, 0.0)
    got = sync.apply(NAME, clean, (WIDTH,), WHOLE, dtype)
    assert got.dtype == (torch.float32 if rounding == "fp32" else dtype)
    assert torch.equal(got.to(dtype), clean.to(dtype)) and torch.equal(got.float(), clean.to(dtype).float())
    assert got.data_ptr() != clean.data_ptr()
    assert NoiseFigures([NAME]).of_sync(sync.records) == {
        "aqn/effective_sigma": 0.0,
        "aqn/changed_fraction": 0.0,
        "aqn/num_tensors": 1.0,
        "aqn/noise_hash": 0.0,
    }


def test_a_hundred_syncs_at_constant_sigma_do_not_accumulate() -> None:
    noise, clean, sigma = make(), weight(), 0.02
    kept, chained, spreads = clean.clone(), clean.clone(), []
    for version in range(100):
        noisy = apply(noise, clean, version, sigma, torch.float32)
        chained = apply(noise, chained, version, sigma, torch.float32)
        spreads.append((noisy - clean).std().item())
    assert torch.equal(clean, kept)
    # The standard error of one spread is sigma / sqrt(2 * 1536), 1.8 % of sigma.
    assert max(abs(spread / sigma - 1) for spread in spreads) < 0.09
    assert (chained - kept).std().item() > 9 * sigma, "this is what an implementation that accumulates would look like"


@pytest.mark.parametrize(("sigma", "factor"), [(1e-2, 1.0), (1e-3, 0.63), (5e-4, 0.06), (1e-4, 0.0)])
def test_effective_sigma_of_nearest_rounding_in_bfloat16(sigma: float, factor: float) -> None:
    sync = make().for_sync(0, sigma)
    sync.apply(NAME, torch.ones(100_000), (100_000,), ((0, 100_000),), torch.bfloat16)
    assert NoiseFigures([NAME]).of_sync(sync.records)["aqn/effective_sigma"] / sigma == pytest.approx(
        factor, rel=0.05, abs=0.02
    )


def test_stochastic_rounding_keeps_small_noise_in_the_mean() -> None:
    sigma, width = 1e-4, 200_000
    clean = torch.ones(width)
    sync = make(rounding="stochastic").for_sync(0, sigma)
    noisy = sync.apply(NAME, clean, (width,), ((0, width),), torch.bfloat16)
    assert noisy.dtype == torch.bfloat16
    noise = torch.from_numpy(draw(1234, 0, NAME, (width,))) * sigma
    change = noisy.float() - 1
    # Unbiased: the slope of change on noise is 1. Its standard error: sqrt(E|Z| * spacing) / (sigma * sqrt(width)).
    slope = (change * noise).sum() / noise.square().sum()
    assert slope.item() == pytest.approx(1.0, abs=0.06)
    assert 0 < NoiseFigures([NAME]).of_sync(sync.records)["aqn/changed_fraction"] < 0.05
    plain = apply(make(), clean, 0, sigma, torch.bfloat16, (width,), ((0, width),))
    assert torch.equal(plain, clean.bfloat16()), "rounding to nearest loses all of it"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_rounding_takes_one_of_the_two_neighbours(sign: float) -> None:
    values = sign * weight()
    low = (values.view(torch.int32) & -65536).view(torch.float32)
    got = apply(make(rounding="stochastic"), values, 0, 1e-12, torch.bfloat16).float()
    spacing = torch.where(low.abs() >= 1, 2.0**-7, torch.where(low.abs() >= 0.5, 2.0**-8, 2.0**-9))
    steps = (got - low).abs() / spacing
    assert set(steps.tolist()) == {0.0, 1.0}


def of_ranks(patch: pytest.MonkeyPatch, records: list[Records], targets: list[str]) -> dict[str, float]:
    """The figures of two syncs in a row, which every rank finds alike."""
    ranks = PretendedRanks(len(records))
    ranks.take_the_place_of_the_group(patch)
    patch.setattr(noise_module, "is_any", ranks.is_any)
    patch.setattr(noise_module, "reduced", ranks.numbers)

    def twice(rank: int) -> list[dict[str, float]]:
        figures = NoiseFigures(targets)
        return [figures.of_sync(records[rank]) for _ in range(2)]

    found = [metrics for of_rank in ranks.run(twice) for metrics in of_rank]
    assert all(metrics == found[0] for metrics in found)
    return found[0]


def test_metrics_count_a_tensor_once_and_do_not_depend_on_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, names = make(), [f"model.layers.{i}.input_layernorm.weight" for i in range(4)]

    def records(layers: list[int], box: tuple[tuple[int, int], ...] = WHOLE) -> Any:
        sync = noise.for_sync(7, 0.01)
        for i in layers:
            sync.apply(names[i], weight(i)[box[0][0] : box[0][1]], (WIDTH,), box, torch.bfloat16)
        return sync.records

    alone = NoiseFigures(names).of_sync(records([0, 1, 2, 3]))
    assert alone["aqn/num_tensors"] == 4
    assert alone["aqn/effective_sigma"] == pytest.approx(0.01, rel=0.05)
    assert alone["aqn/changed_fraction"] > 0.7
    assert 0 < alone["aqn/noise_hash"] < 2**48 and alone["aqn/noise_hash"] == int(alone["aqn/noise_hash"])
    assert of_ranks(monkeypatch, [records([2, 3]), records([0, 1]), records([0, 1])], names) == alone
    halves = [records([0, 1, 2, 3], ((0, 512),)), records([0, 1, 2, 3], ((512, WIDTH),))]
    assert of_ranks(monkeypatch, halves, names) == pytest.approx(alone, rel=1e-6)
    monkeypatch.undo()
    assert NoiseFigures(names[:3]).of_sync(records([0, 1, 2]))["aqn/noise_hash"] != alone["aqn/noise_hash"]


def test_what_is_counted_follows_the_boxes_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that reads other boxes than in the sync before has all ranks agree anew."""
    noise, ranks = make(), PretendedRanks(2)
    ranks.take_the_place_of_the_group(monkeypatch)
    monkeypatch.setattr(noise_module, "is_any", ranks.is_any)
    monkeypatch.setattr(noise_module, "reduced", ranks.numbers)

    def records(box: Box) -> Records:
        sync = noise.for_sync(7, 0.01)
        sync.apply(NAME, weight()[box[0][0] : box[0][1]], (WIDTH,), box, torch.float32)
        return sync.records

    def syncs(rank: int) -> list[dict[str, float]]:
        figures = NoiseFigures([NAME])
        return [figures.of_sync(records(box)) for box in (WHOLE, ((0, 512),) if rank else ((512, WIDTH),), WHOLE)]

    for found in ranks.run(syncs):
        assert found[1] == pytest.approx(found[0], rel=1e-6) and found[2] == found[0]


def test_replicas_that_drew_differently_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    for version in (7, 8):
        sync = make().for_sync(version, 0.01)
        sync.apply(NAME, weight(), (WIDTH,), WHOLE, torch.bfloat16)
        ranks.append(sync.records)
    with pytest.raises(RuntimeError, match=f"different AQN noise for {NAME}"):
        of_ranks(monkeypatch, ranks, [NAME])


def test_a_target_without_noise_is_found() -> None:
    sync = make().for_sync(7, 0.01)
    sync.apply(NAME, weight(), (WIDTH,), WHOLE, torch.bfloat16)
    with pytest.raises(RuntimeError, match="1 tensors of 2 targets"):
        NoiseFigures([NAME, "another"]).of_sync(sync.records)


def test_a_tensor_is_drawn_once_per_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(noise_module, "draw", lambda *key: drawn.append(key) or draw(*key))
    sync = make().for_sync(7, 0.01)
    pieces = [sync.apply(NAME, weight()[a : a + 512], (WIDTH,), ((a, a + 512),), torch.float32) for a in (0, 512, 1024)]
    assert torch.equal(torch.cat(pieces), apply(make(), weight(), 7, 0.01, torch.float32))
    assert drawn == [(1234, 7, NAME, (WIDTH,))] * 2  # one of each sync
