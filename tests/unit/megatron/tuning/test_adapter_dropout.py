"""Dropout before adapters: its mask depends on the token, the weight and the step, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_rl.data.packing import pack
from mega_rl.megatron.tuning import dropout
from mega_rl.megatron.tuning.dropout import DroppedProduct, column_keys, dropped, token_keys
from mega_rl.microbatch import Sequence

NAME = "model.layers.0.self_attn.q_proj.weight"
LENGTHS = (40, 7, 90)


def tokens(places: list[int], seed: int = 1, step: int = 3) -> Tensor:
    sequences = [Sequence(torch.zeros(n + 1, dtype=torch.int64), torch.ones(n)) for n in LENGTHS]
    return token_keys(pack(sequences, places, 8, 0), seed, step)


def is_kept(keys: Tensor, name: str = NAME, columns: range = range(64), rate: float = 0.25) -> Tensor:
    return dropped(torch.ones(len(keys), len(columns)), keys, column_keys(name, columns), rate) > 0


def test_the_mask_is_the_same_in_any_packing_and_for_any_share_of_the_columns() -> None:
    whole = is_kept(tokens([0, 1, 2]))
    other = is_kept(tokens([2, 0]))
    assert torch.equal(other[:90], whole[47:137]) and torch.equal(other[90:130], whole[:40])
    assert torch.equal(is_kept(tokens([0, 1, 2]), columns=range(16, 48)), whole[:, 16:48])


def test_seed_step_and_weight_give_other_masks() -> None:
    masks = [
        is_kept(tokens([0, 1, 2]))[:137],
        is_kept(tokens([0, 1, 2], seed=2))[:137],
        is_kept(tokens([0, 1, 2], step=4))[:137],
        is_kept(tokens([0, 1, 2]), NAME.replace("q_proj", "o_proj"))[:137],
    ]
    expected = 0.75**2 + 0.25**2  # equal where two independent masks are
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs(float((one == other).float().mean()) - expected) < 0.03


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_elements_are_dropped_one_by_one(rate: float) -> None:
    """Their share, and no two tokens, columns or neighbours that go together; 4 deviations of independent elements."""
    keys = token_keys(pack([Sequence(torch.zeros(2049, dtype=torch.int64), torch.ones(2048))], [0], 1, 0), 0, 0)
    kept, deviation = is_kept(keys, columns=range(512), rate=rate).double(), (rate * (1 - rate)) ** 0.5
    assert abs(float(kept.mean()) - (1 - rate)) < 4 * deviation / kept.numel() ** 0.5
    centred = (kept - (1 - rate)) / deviation
    for mean, count in ((centred.mean(0), 2048), (centred.mean(1), 512)):
        assert 0.8 < float(mean.std()) * count**0.5 < 1.2
    for pairs in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[1:, 1:] * centred[:-1, :-1]):
        assert abs(float(pairs.mean())) < 4 / pairs.numel() ** 0.5
    if rate == 0.5:  # elsewhere the products are not normal numbers
        for products, count in ((centred @ centred.t() / 512, 512), (centred.t() @ centred / 2048, 2048)):
            assert float(products.fill_diagonal_(0.0).abs().max()) < 7 / count**0.5


def test_the_product_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "CHUNK", 100)  # several parts
    keys, columns, rate = tokens([0, 1]), column_keys(NAME, range(12)), 0.3
    generator = torch.Generator().manual_seed(0)
    x, a, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((48, 1, 12), (5, 12), (48, 1, 5))
    )
    mask = is_kept(keys, columns=range(12), rate=rate)[:, None] / (1 - rate)
    results = []
    for product in (lambda x, a: DroppedProduct.apply(x, a, keys, columns, rate), lambda x, a: (x * mask) @ a.t()):
        inputs = [x.clone().requires_grad_(), a.clone().requires_grad_()]
        output = product(*inputs)
        results.append([output.detach(), *torch.autograd.grad((output * weight).sum(), inputs)])
    for own, expected in zip(*results, strict=True):
        assert own.shape == expected.shape and torch.allclose(own, expected, atol=1e-6)
