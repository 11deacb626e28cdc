"""Adapters as outgoing transforms: merged before the cast and before what comes after, or sent with their scale."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mega_rl.bridge.lora import Factors
from mega_rl.bridge.mapping.tensors import full_series, hf_tensors, roles
from mega_rl.bridge.outgoing.merge import LoraMerge, ScaledAdapters
from mega_rl.bridge.outgoing.noise import AqnNoise, AqnTransform
from mega_rl.bridge.outgoing.quantize import SimulatedQuantization, quantize_dequantize
from mega_rl.bridge.outgoing.transform import fold
from mega_rl.bridge.reshard.execute import Read
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, indices, whole_box
from mega_rl.config.schema.sampling import AqnConfig
from tests.distributed.bridge.test_bridge_execute import SHAPE

UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"
SIZES = hf_tensors(SHAPE)


def model(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in SIZES.items()}


def factors(size: float = 0.1) -> Factors:
    rows, columns = SIZES[UP]
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(4, columns, generator=generator), size * torch.randn(rows, 4, generator=generator)
    return Factors(a, b, 0.5)


def reader(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> Read:
    def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
        return tensors[hf_name][indices(hf_box)].to(dtype or tensors[hf_name].dtype)

    return read


def whole(read: Read, name: str) -> Tensor:
    box = whole_box(SIZES[name])
    return read(name, name, box, box)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_rounded_once_and_nothing_is_written_to(dtype: torch.dtype) -> None:
    tensors, own = model(), factors()
    kept = tensors[UP].clone()
    merge = LoraMerge(lambda: {UP: own}, reader(tensors), dtype)
    outgoing = fold([merge], reader(tensors, dtype), 3)
    exact = tensors[UP] + 0.5 * (own.b @ own.a)
    assert torch.allclose(whole(outgoing.read, UP).float(), exact.to(dtype).float(), rtol=2**-7, atol=1e-6)
    assert whole(outgoing.read, UP).dtype == dtype and torch.equal(tensors[UP], kept)
    assert torch.equal(whole(outgoing.read, NORM), tensors[NORM].to(dtype))
    box = ((3, 7), (1, 5))
    assert torch.equal(outgoing.read(UP, UP, box, box), whole(outgoing.read, UP)[indices(box)])


def test_noise_and_quantisation_change_the_merged_weight() -> None:
    tensors, own = model(), factors()
    merge = LoraMerge(lambda: {UP: own}, reader(tensors), torch.float32)
    merged = whole(fold([merge], reader(tensors), 1).read, UP)
    noise = AqnNoise(AqnConfig(enabled=True, schedule="constant"), 10)
    aqn = AqnTransform(noise, SIZES, roles(SHAPE), lambda names: {name: tensors[name] for name in names}, torch.float32)
    four_bits = SimulatedQuantization("nvfp4", SIZES, roles(SHAPE), slices_of(full_series(SHAPE)), torch.device("cpu"))
    read = fold([merge, aqn, four_bits], reader(tensors), 1).read
    assert torch.equal(whole(read, UP), quantize_dequantize(merged, "nvfp4", float(merged.abs().max())))
    assert not torch.equal(whole(read, NORM), tensors[NORM])


@pytest.mark.parametrize(("size", "share"), [(0.0, None), (1e-5, (0.9, 1.0)), (10.0, (0.0, 0.01))])
def test_what_rounding_leaves_of_the_updates_is_measured(size: float, share: tuple[float, float] | None) -> None:
    tensors, own = model(torch.bfloat16), factors(size)
    merge = LoraMerge(lambda: {UP: own}, reader(tensors), torch.bfloat16)
    outgoing = fold([merge], reader(tensors), 1)
    found = whole(outgoing.read, UP)
    metrics = outgoing.metrics()
    assert metrics["adapter/largest_b"] == float(own.b.abs().max())
    if share is None:
        assert "adapter/unchanged_fraction" not in metrics and torch.equal(found, tensors[UP])
    else:
        assert metrics["adapter/unchanged_fraction"] == float((found == tensors[UP]).float().mean())
        assert share[0] <= metrics["adapter/unchanged_fraction"] <= share[1]


def test_slots_get_b_times_its_scale_and_a_as_it_is() -> None:
    own = factors()
    tensors = {"x.lora_A.weight": own.a, "x.lora_B.weight": own.b}
    scaled = ScaledAdapters({"x.lora_B.weight": 0.5}, reader(tensors), torch.bfloat16)
    read: Callable[..., Tensor] = fold([scaled], reader(tensors, torch.bfloat16), 1).read
    for name, expected in (("x.lora_A.weight", own.a), ("x.lora_B.weight", 0.5 * own.b)):
        box = whole_box(expected.shape)
        assert torch.equal(read(name, name, box, box), expected.to(torch.bfloat16))
