"""The replacements inside Megatron: the same numbers as what they replace."""

from __future__ import annotations

import functools
import types
from typing import Any

import megatron.core.models.common.embeddings.rope_utils as rope_utils
import megatron.core.tensor_parallel.layers as layers
import megatron.core.transformer.attention as attention
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import megatron.core.transformer.multi_latent_attention as multi_latent_attention_module
import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer as buffers

from mega_rl.megatron.layers import compat, fused
from mega_rl.platform.operators import products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multi_latent_attention", [False, True])
def test_rotary_is_megatrons(dtype: torch.dtype, multi_latent_attention: bool) -> None:
    fused.install()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 8, generator=generator).to(dtype)
    angles = torch.rand(6, 1, 1, 4, generator=generator).repeat(1, 1, 1, 2)
    config = types.SimpleNamespace(
        multi_latent_attention=multi_latent_attention, rotary_interleaved=False, apply_rope_fusion=False
    )
    borders, alone = torch.tensor([0, 6]), types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    theirs = rope_utils.apply_rotary_pos_emb(x, angles, config, borders, cp_group=alone)
    assert torch.equal(fused.apply_rotary(x, angles, config, borders, cp_group=alone), theirs)
    assert attention.apply_rotary_pos_emb is multi_latent_attention_module.apply_rotary_pos_emb is fused.apply_rotary


def test_permutation_is_megatrons() -> None:
    generator = torch.Generator().manual_seed(0)
    routing_map = torch.rand(7, 5, generator=generator).argsort(1) < 2
    x, probs = torch.randn(7, 4, generator=generator), torch.rand(7, 5, generator=generator)
    arguments = {"fused": False, "drop_and_pad": False}
    own = fused.permute(x, routing_map, probs=probs, num_out_tokens=14, **arguments)
    theirs = moe_utils.permute(x, routing_map, probs=probs, num_out_tokens=14, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(own[:2], theirs[:2], strict=True))
    arguments |= {"restore_shape": x.shape, "routing_map": routing_map}  # the third value is each side's own order
    merged = fused.unpermute(own[0], own[2], **arguments)
    assert torch.equal(merged, moe_utils.unpermute(theirs[0], theirs[2], **arguments))
    assert (token_dispatcher.permute, token_dispatcher.unpermute) == (fused.permute, fused.unpermute)


class _Group:
    def __init__(self, size: int) -> None:
        self.size = lambda: size


def test_only_a_rank_alone_leaves_its_buffers_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(
        buffers, "dist_all_gather_func", lambda out, own, group: calls.append((out.numel(), own.numel()))
    )
    monkeypatch.setattr(buffers, "dist_reduce_scatter_func", buffers.dist_reduce_scatter_func)
    compat.spare_a_rank_alone()
    whole = torch.zeros(4)
    buffers.dist_all_gather_func(whole, whole[:4], group=_Group(1))
    assert calls == []
    buffers.dist_all_gather_func(whole, whole[:2], group=_Group(2))
    buffers.dist_all_gather_func(whole, torch.ones(4), group=_Group(1))
    assert calls == [(4, 2), (4, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_by_the_product_itself(dtype: torch.dtype) -> None:
    """``gradient_accumulation_fusion`` through Megatron's own linear layer, without apex."""
    generator = torch.Generator().manual_seed(0)
    x, weight, upstream = (torch.randn(*n, generator=generator).to(dtype) for n in ((5, 1, 6), (4, 6), (5, 1, 4)))
    before = torch.randn(4, 6, generator=generator)
    expected = before.double() + upstream[:, 0].double().t() @ x[:, 0].double()
    parameter: Any = torch.nn.Parameter(weight)
    parameter.main_grad, parameter.grad_added_to_main_grad = before.clone(), False
    output = layers.linear_with_grad_accumulation_and_async_allreduce(
        x.requires_grad_(), parameter, None, True, allreduce_dgrad=False, sequence_parallel=False
    )
    output.backward(upstream)
    assert parameter.grad_added_to_main_grad
    absolute = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(parameter.main_grad.double(), expected, atol=absolute, rtol=absolute)


@pytest.mark.parametrize("library", ["onednn", "torch"])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("num_rows", [0, 10])
def test_linear_layers_on_a_host(monkeypatch: pytest.MonkeyPatch, library: str, is_frozen: bool, num_rows: int) -> None:
    """Output, and the gradients of input, weight and bias, against torch's own linear layer in float64."""
    monkeypatch.setattr(products, "is_onednn_faster", lambda: library == "onednn")
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (num_rows, 3, 192), "weight": (384, 192), "bias": (384,), "upstream": (num_rows, 3, 384)}
    given = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    trained = ["x"] if is_frozen else ["x", "weight", "bias"]

    def run(linear: Any, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
        inputs = {name: value.detach().to(dtype).requires_grad_(name in trained) for name, value in given.items()}
        upstream = inputs.pop("upstream")
        output = linear(*inputs.values())
        output.backward(upstream)
        return {"output": output.detach()} | {name: value.grad for name, value in inputs.items()}

    name = "linear_with_frozen_weight" if is_frozen else "linear_with_grad_accumulation_and_async_allreduce"
    switches = {"gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}
    own = run(functools.partial(getattr(layers, name), tp_group=_Group(1), **switches), torch.float32)
    exact = run(torch.nn.functional.linear, torch.float64)
    assert [name for name, value in own.items() if value is not None] == ["output", *trained]
    for name, value in own.items():
        if value is not None:
            torch.testing.assert_close(value.double(), exact[name], atol=1e-4, rtol=1e-5)
