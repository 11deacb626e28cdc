"""The optimizer that keeps its own masters, without a model: where its state lies changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.megatron.optim import frugal_adam
from mega_rl.megatron.optim.adam import GroupStepAdam
from mega_rl.platform.rounding import NUM_BITS, round_stochastically

SIZES = (1000, 64, 1, 2500, 63)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frugal_adam, "WINDOW_ELEMENTS", 512)
    monkeypatch.setattr(frugal_adam, "BLOCK_ELEMENTS", 1152)


def trained(on_host: bool, moments: torch.dtype, dtype: torch.dtype, num_steps: int = 3) -> Any:
    """An optimizer after some steps, its parameters in two groups."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    groups = [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:], "weight_decay": 0.0}]
    optimizer = frugal_adam.frugal_adam(on_host, moments)(groups, lr=1e-2, betas=(0.9, 0.95))
    optimizer.allocate()
    step(optimizer, num_steps, "decoupled_grad")
    return optimizer


def step(optimizer: torch.optim.Optimizer, num_steps: int, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for parameter in parameters_of(optimizer):
            setattr(parameter, name, torch.randn(parameter.shape, generator=generator))
        optimizer.step()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def everything(optimizer: Any) -> list[Tensor]:
    states = [optimizer.state[p][name] for p in parameters_of(optimizer) for name in ("exp_avg", "exp_avg_sq")]
    return parameters_of(optimizer) + states


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_place_of_the_state_changes_nothing(dtype: torch.dtype, moments: torch.dtype) -> None:
    here, there = (trained(on_host, moments, dtype) for on_host in (False, True))
    assert same(everything(here), everything(there))
    assert all(own["exp_avg"].dtype == moments for own in there.state.values())
    cuts = [[(p.order, p.start, p.end) for w in block.windows() for p in w] for block in there._blocks]
    assert sum(end - start for cut in cuts for _, start, end in cut) == sum(SIZES) and max(map(len, cuts)) > 1
    wholes = [
        view for own in there.state.values() for view in own.values() if view.nbytes == view.untyped_storage().nbytes()
    ]
    assert len(wholes) == (len(SIZES) if dtype == torch.float32 else 0)  # weights that are their own masters
    assert all(w[-1].place + w[-1].end - w[-1].start - w[0].place <= 512 for b in there._blocks for w in b.windows())


def test_it_is_adam_on_float32_masters() -> None:
    own = trained(True, torch.float32, torch.bfloat16)
    masters = [own.state[p]["master_param"].clone() for p in parameters_of(own)]
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(size, generator=generator).bfloat16().float() for size in SIZES]
    groups = [{"params": plain[:3], "weight_decay": 0.1}, {"params": plain[3:], "weight_decay": 0.0}]
    adam = GroupStepAdam(groups, lr=1e-2, betas=(0.9, 0.95))
    step(adam, 3, "grad")
    assert same(masters, plain) and same(parameters_of(own), [p.bfloat16() for p in plain])


def test_weights_that_were_changed_become_the_masters() -> None:
    own = trained(True, torch.float32, torch.bfloat16)
    for parameter in parameters_of(own):
        parameter.fill_(0.5)
    own.masters_from_weights()
    assert all(bool((own.state[p]["master_param"] == 0.5).all()) for p in parameters_of(own))


def test_a_state_dict_has_the_groups_and_leaves_the_state() -> None:
    own, other = trained(True, torch.float32, torch.bfloat16), trained(True, torch.float32, torch.bfloat16, 2)
    before = [tensor.clone() for tensor in everything(other)]
    other.load_state_dict(own.state_dict())
    assert [group["step"] for group in other.param_groups] == [3, 3] and same(everything(other), before)
    step(other, 1, "decoupled_grad")
    assert [group["step"] for group in other.param_groups] == [4, 4] and not same(everything(other), before)


def test_tensors_share_blocks_as_far_as_there_is_room() -> None:
    assert frugal_adam.placed([3, 9, 2, 5, 20], 10) == [[4], [1], [3, 0, 2]]
    assert frugal_adam.placed([], 10) == []


@pytest.mark.parametrize("value", [1.0 + 2.0**-10, -(1.0 + 3 * 2.0**-12), 1e-12, 0.0, -7.5])
def test_rounding_keeps_the_mean_over_all_bits(value: float) -> None:
    bits = torch.arange(1 << NUM_BITS, dtype=torch.int32)
    values = torch.full(bits.shape, value)
    rounded = round_stochastically(values, bits)
    assert rounded.dtype == torch.bfloat16 and len(rounded.unique()) <= 2
    assert float(rounded.double().mean()) == float(values[0].double())


def test_a_mean_of_squares_follows_small_changes() -> None:
    """Rounded to the nearest it would stay where it is: each step changes it by less than half of its last bit."""
    parameter = torch.zeros(4096)
    optimizer: Any = frugal_adam.frugal_adam(False, torch.bfloat16)([{"params": [parameter]}], betas=(0.9, 0.999))
    optimizer.allocate()
    moment = optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    for _ in range(1000):
        parameter.decoupled_grad = torch.zeros(4096)  # type: ignore[attr-defined]
        optimizer.step()
    assert float(moment.double().mean()) == pytest.approx(0.999**1000, rel=0.05)
