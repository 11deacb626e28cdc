"""The replacements inside Megatron: the same numbers as what they replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import param_and_grad_buffer as buffers

from mega_rl.megatron import compat


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_swiglu_gradient_is_autograds(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 14, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(5, 7, generator=generator).to(dtype)
    gate, up = x.chunk(2, -1)
    (F.silu(gate) * up).backward(grad)
    own = compat.swiglu_gradient(grad, x.detach())
    assert own.dtype == dtype and x.grad is not None
    torch.testing.assert_close(own, x.grad, rtol=tolerance, atol=tolerance)


def test_swiglu_gradient_of_a_float32_gradient_stays_float32() -> None:
    """Experts' outputs are weighted in float32 whatever the model computes in."""
    x, grad = torch.randn(3, 8).bfloat16(), torch.randn(3, 4)
    own = compat.swiglu_gradient(grad, x)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own, compat.swiglu_gradient(grad, x.float()))


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
