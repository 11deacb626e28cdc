"""Simulated 4-bit weights: blocks computed by hand, a slow reference, and the same bits at every layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy
import pytest
import torch

from mega_rl.bridge.outgoing import quantize
from mega_rl.bridge.outgoing.quantize import FORMATS, SimulatedQuantization, quantize_dequantize
from mega_rl.bridge.slices import Box, Slice, indices, take_columns
from mega_rl.errors import InputError

# Magnitudes of E2M1 in the order of their codes: the lowest bit of the code is the mantissa, so even codes win ties.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAME = "model.layers.0.mlp.down_proj.weight"


def nearest_element(value: float) -> float:
    """By search, independent of any arithmetic on exponents."""
    code = min(range(8), key=lambda c: (abs(E2M1[c] - abs(value)), c % 2))
    return math.copysign(E2M1[code], value)


def slow_mxfp4(block: list[float]) -> list[float]:
    largest = max(abs(v) for v in block)
    if largest == 0:
        return [0.0] * len(block)
    scale = 2.0 ** max(-127, math.floor(math.log2(largest)) - 2)
    return [nearest_element(v / scale) * scale for v in block]


def slow_nvfp4(block: list[float], tensor_amax: float) -> list[float]:
    single = numpy.float32
    tensor_scale = single(tensor_amax) / single(6 * 448)
    wanted = single(max(abs(v) for v in block)) / single(6) / tensor_scale
    stored = torch.tensor(float(wanted)).to(torch.float8_e4m3fn)  # torch's own cast: nearest, ties to even
    scale = single(float(stored)) * tensor_scale
    return [nearest_element(float(single(v) / scale)) * float(scale) if scale else 0.0 for v in block]


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different magnitudes, float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-5, 1, rows)[:, None]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Largest 7: exponent 2 - 2, scale 1. 7 saturates; 5, 2.5, 3.5, 0.25, 0.75, 1.25, 1.75 are ties.
        ([7, -5, 2.5, 3.5, 0.25, 0.75, 1.25, 1.75, -0.3], [6, -4, 2, 4, 0, 1, 1, 2, -0.5]),
        # Largest 0.4: exponent -2 - 2, scale 1/16: 6.4, 1.6, -4.8, 0.16 sixteenths.
        ([0.4, 0.1, -0.3, 0.01], [6 / 16, 1.5 / 16, -4 / 16, 0]),
        # A power of two is 4 scales: 2^-10 has scale 2^-12.
        ([2**-10, 2**-12, -(2**-13), 2**-15], [2**-10, 2**-12, -(2**-13), 0]),
    ],
)
def test_mxfp4_blocks_by_hand(values: list[float], expected: list[float]) -> None:
    block = torch.tensor(values + [0.0] * (32 - len(values)))[None]
    assert quantize_dequantize(block, "mxfp4", math.nan)[0, : len(values)].tolist() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # The tensor's largest magnitude is 6 x 448, so the tensor's scale is 1 and block scales are largest / 6.
        ([6, 5, -2.4, 0.26], [6, 4, -2, 0.5]),
        ([7.5, 5, -1.3], [7.5, 5, -1.25]),  # scale 1.25, an E4M3 number: 6, 4, -1.04 of them
        ([6.3, 3.1], [6, 3]),  # wanted 1.05, of 1 and 1.125 the nearer one is 1
        ([2688, -400], [2688, -448]),  # scale 448: 6 and -0.89
        ([0.015, -0.003], [6 * 2**-9, -1.5 * 2**-9]),  # wanted 0.0025, stored as the smallest scale, 2^-9
        ([0.001], [0]),  # wanted 1/6000 is below half of the smallest E4M3 number, 2^-9
    ],
)
def test_nvfp4_blocks_by_hand(values: list[float], expected: list[float]) -> None:
    block = torch.tensor(values + [0.0] * (16 - len(values)))[None]
    assert quantize_dequantize(block, "nvfp4", 2688.0)[0, : len(values)].tolist() == expected


@pytest.mark.parametrize("columns", [64, 56])  # 56: the last block of a row is a short one
def test_both_formats_equal_the_slow_reference(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "MAX_ELEMENTS_AT_A_TIME", 5 * columns)  # 24 rows are no multiple of 5
    weight = weights(24, columns)
    amax = float(weight.abs().max())
    for name, (size, _) in FORMATS.items():
        got = quantize_dequantize(weight, name, amax)
        for row, first in itertools.product(range(24), range(0, columns, size)):
            block = weight[row, first : first + size].tolist()
            expected = slow_nvfp4(block, amax) if name == "nvfp4" else slow_mxfp4(block)
            part = got[row, first : first + size]
            assert torch.equal(part, torch.tensor(expected)), (name, row, first, block, part, expected)


def test_the_far_ends_of_float32() -> None:
    for size in (1e38, 2.0**-120, 2.0**-149, 0.0):
        weight = torch.full((1, 32), size)
        assert torch.isfinite(quantize_dequantize(weight, "mxfp4", size)).all()
        assert torch.isfinite(quantize_dequantize(weight, "nvfp4", size)).all()
    assert quantize_dequantize(torch.full((1, 32), 2.0**100), "mxfp4", 0)[0, 0] == 2.0**100
    assert torch.equal(quantize_dequantize(torch.zeros(2, 32), "nvfp4", 0.0), torch.zeros(2, 32))


def test_quantising_twice_is_quantising_once() -> None:
    weight = weights(8, 64)
    once = quantize_dequantize(weight, "mxfp4", 0)
    assert torch.equal(quantize_dequantize(once, "mxfp4", 0), once)
    assert 0 < ((once - weight).norm() / weight.norm()).item() < 0.2


def column_shards(rows: int, columns: int, count: int) -> list[list[Slice]]:
    width = columns // count
    return [[take_columns("w", NAME, rows, r * width, (r + 1) * width)] for r in range(count)]


def reader_of(weight: torch.Tensor, first_column: int, asked: list[Box]) -> Callable[..., torch.Tensor]:
    """A rank's own reader: its local parameter holds the columns from ``first_column`` on."""

    def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
        asked.append(hf_box)
        assert all(a - first_column == b for a, b in zip(hf_box[1], local_box[1], strict=True)) and local_box[1][0] >= 0
        return weight[indices(hf_box)]

    return read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(FORMATS))
def test_every_piece_of_every_shard_is_that_of_the_whole(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weights(6, 128).to(dtype)
    amax = float(weight.float().abs().max())
    whole = quantize_dequantize(weight, name, amax).to(dtype)
    assert not torch.equal(whole, weight)
    sources = column_shards(6, 128, 2)
    monkeypatch.setattr(quantize.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(quantize.dist, "all_reduce", lambda tensor, op: tensor.fill_(amax))  # the other rank's part
    for rank in range(2):
        shapes, roles = {NAME: (6, 128), "n": (8,)}, {NAME: "linear", "n": "input_layernorm"}
        quantization = SimulatedQuantization(name, shapes, roles, sources[rank], torch.device("cpu"))
        read = quantization.for_sync(reader_of(weight, 64 * rank, []), 0).read
        ends = 64 * rank + 64
        pieces = [
            ((row, row + 1), (start, min(start + 7, ends))) for row in range(6) for start in range(ends - 64, ends, 7)
        ]
        for hf_box in pieces:  # that begin and end inside blocks
            local_box = (hf_box[0], (hf_box[1][0] - 64 * rank, hf_box[1][1] - 64 * rank))
            got = read("w", NAME, hf_box, local_box)
            assert got.dtype == dtype and torch.equal(got, whole[indices(hf_box)]), hf_box


def test_what_is_not_linear_passes_through() -> None:
    roles = {NAME: "linear", "norm": "input_layernorm", "e": "embedding", "h": "lm_head", "r": "router", "b": "bias"}
    shapes = {name: (4, 32) for name in roles}
    sources = [[take_columns(name, name, 4, 0, 32) for name in roles]]
    quantization = SimulatedQuantization("mxfp4", shapes, roles, sources[0], torch.device("cpu"))
    tensors = {name: weights(4, 32, seed) for seed, name in enumerate(roles)}
    clean = lambda local_name, hf_name, hf_box, local_box: tensors[hf_name][indices(hf_box)]  # noqa: E731
    read = quantization.for_sync(clean, 0).read
    box = ((0, 4), (0, 32))
    changed = {name for name in roles if not torch.equal(read(name, name, box, box), tensors[name])}
    assert changed == {NAME}


def test_a_shard_that_cuts_a_block_is_refused() -> None:
    shapes, roles = {NAME: (4, 96)}, {NAME: "linear"}
    for held, columns in zip(column_shards(4, 96, 2), ("0 to 48", "48 to 96"), strict=True):
        arguments = (shapes, roles, held, torch.device("cpu"))
        SimulatedQuantization("nvfp4", *arguments)  # 48 is three blocks of 16
        with pytest.raises(InputError, match=rf"mxfp4.*blocks of 32.*columns {columns} of model.*parallel\.tensor"):
            SimulatedQuantization("mxfp4", *arguments)
