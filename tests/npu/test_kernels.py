"""The emulation itself: what the other tests here rely on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.npu import kernels


def test_devices_are_there() -> None:
    assert torch.npu.is_available() and torch.npu.device_count() == 2
    torch.npu.set_device(1)
    assert torch.empty(1, device="npu").device == torch.device("npu", 1)
    torch.npu.set_device(0)


def test_memory_is_shared_and_counted() -> None:
    before = torch.npu.memory_allocated()
    tensor = torch.zeros(1 << 20, device="npu")
    assert torch.npu.memory_allocated() - before >= 4 << 20
    kernels.host_view(tensor)[5] = 3.0
    assert tensor[5].item() == 3.0 and tensor[4].item() == 0.0
    del tensor
    assert torch.npu.memory_allocated() == before


def test_training_is_that_of_the_cpu(operator_counts: Counter[str]) -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        inputs, targets = torch.randn(8, 16).to(device), torch.randint(4, (8,)).to(device)
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses("npu") == losses("cpu")
    assert operator_counts["aten::_fused_adamw_"] == 5


def test_views_share_their_memory() -> None:
    base = torch.arange(24.0).to("npu").view(4, 6)
    for view in (
        base[1:, ::2],
        base.t(),
        base.unflatten(1, (2, 3)).transpose(0, 2),
        base.diagonal(),
        base.split(3, 1)[1],
    ):
        expected = base.cpu()
        view.add_(1)
        assert not torch.equal(base.cpu(), expected)


def test_an_operator_without_a_stand_in_raises() -> None:
    with pytest.raises(RuntimeError):
        torch.ops.npu.npu_fast_gelu(torch.ones(4, device="npu"))
