"""Token log-probabilities and entropy from hidden states against plain torch in float64: values and gradients.

Letters: T tokens, D hidden width, V vocabulary rows, padding included.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import Tensor

from mega_rl.megatron.model import logprob
from mega_rl.megatron.model.logprob import VocabularyShard, token_logprobs
from mega_rl.platform.operators import products

T, D, V, NUM_VALID = 7, 16, 40, 37
COEFFICIENTS = {"logprob": (1.0, 0.0), "entropy": (0.0, 1.0), "both": (1.0, 0.1)}


def shard(temperature: float = 1.0, chunk_tokens: int = 3, num_valid: int = NUM_VALID) -> VocabularyShard:
    return VocabularyShard(group=None, start=0, num_valid=num_valid, temperature=temperature, chunk_tokens=chunk_tokens)


def inputs(num_tokens: int = T, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights whose padding rows are large, and targets that reach the last valid row."""
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(num_tokens, D, generator=generator)
    weight_VD = torch.randn(V, D, generator=generator)
    weight_VD[NUM_VALID:] *= 100.0
    target_ids_T = torch.randint(0, NUM_VALID, (num_tokens,), generator=generator)
    target_ids_T[0], target_ids_T[-1] = 0, NUM_VALID - 1
    return hidden_TD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), target_ids_T


def plain(hidden_TD: Tensor, weight_VD: Tensor, target_ids_T: Tensor, temperature: float) -> tuple[Tensor, ...]:
    table_TV = torch.log_softmax(hidden_TD @ weight_VD[:NUM_VALID].t() / temperature, dim=-1)
    is_top_T = (table_TV.argmax(-1) == target_ids_T).to(table_TV)
    return table_TV.gather(1, target_ids_T[:, None])[:, 0], -(table_TV.exp() * table_TV).sum(-1), is_top_T


def weighted(statistics: tuple[Tensor, ...], logprob_coefficient: float, entropy_coefficient: float) -> Tensor:
    """A sum in which every position has a weight of its own, one of them zero."""
    logprobs_T, entropy_T, *_ = statistics
    weights_T = torch.linspace(-1.0, 2.0, logprobs_T.numel(), dtype=logprobs_T.dtype)
    weights_T[1:2] = 0.0
    return (weights_T * (logprob_coefficient * logprobs_T + entropy_coefficient * entropy_T)).sum()


@pytest.mark.parametrize("chunk_tokens", [1, 3, T, T + 1, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("coefficients", COEFFICIENTS.values(), ids=COEFFICIENTS)
def test_equals_plain_torch(chunk_tokens: int, temperature: float, coefficients: tuple[float, float]) -> None:
    hidden_TD, weight_VD, target_ids_T = inputs()
    own = token_logprobs(hidden_TD, weight_VD, target_ids_T, shard(temperature, chunk_tokens))
    weighted(own, *coefficients).backward()
    exact_hidden_TD, exact_weight_VD = (x.detach().double().requires_grad_() for x in (hidden_TD, weight_VD))
    expected = plain(exact_hidden_TD, exact_weight_VD, target_ids_T, temperature)
    weighted(expected, *coefficients).backward()
    for values, exact in zip(own, expected, strict=True):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), exact, atol=1e-5, rtol=1e-6)
    for parameter, exact in ((hidden_TD, exact_hidden_TD), (weight_VD, exact_weight_VD)):
        assert parameter.grad is not None and exact.grad is not None
        torch.testing.assert_close(parameter.grad.double(), exact.grad, atol=3e-5, rtol=1e-5)


def test_padding_rows_have_no_part() -> None:
    hidden_TD, weight_VD, target_ids_T = inputs()
    before = token_logprobs(hidden_TD, weight_VD, target_ids_T, shard())
    weighted(before, 1.0, 0.1).backward()
    assert weight_VD.grad is not None
    assert torch.equal(weight_VD.grad[NUM_VALID:], torch.zeros(V - NUM_VALID, D))
    with torch.no_grad():
        weight_VD[NUM_VALID:] = -1e4
    after = token_logprobs(hidden_TD, weight_VD, target_ids_T, shard())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_extreme_logits_stay_finite() -> None:
    """A certain token: log-probability and entropy 0, no gradient, nothing that is not a number."""
    hidden_TD = torch.ones(2, 1, requires_grad=True)
    weight_VD = torch.tensor([[1e4], [-1e4], [0.0], [0.0]], requires_grad=True)
    own = token_logprobs(hidden_TD, weight_VD, torch.tensor([0, 1]), shard(num_valid=3))
    weighted(own, 1.0, 0.1).backward()
    assert own[0].tolist() == [0.0, -2e4] and own[1].tolist() == [0.0, 0.0]
    assert hidden_TD.grad is not None and hidden_TD.grad.isfinite().all()
    assert weight_VD.grad is not None and weight_VD.grad.isfinite().all()


def test_bfloat16() -> None:
    """Statistics are float32 of the bfloat16 logits; gradients come in the parameters' type."""
    hidden_TD, weight_VD, target_ids_T = inputs(dtype=torch.bfloat16)
    own = token_logprobs(hidden_TD, weight_VD, target_ids_T, shard(0.7))
    weighted(own, 1.0, 0.1).backward()
    logits_TV = (hidden_TD @ weight_VD.t())[:, :NUM_VALID].double() / 0.7
    table_TV = torch.log_softmax(logits_TV, dim=-1)
    assert own[0].dtype == own[1].dtype == torch.float32
    torch.testing.assert_close(own[0].double(), table_TV.gather(1, target_ids_T[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    exact_hidden_TD, exact_weight_VD = (x.detach().double().requires_grad_() for x in (hidden_TD, weight_VD))
    weighted(plain(exact_hidden_TD, exact_weight_VD, target_ids_T, 0.7), 1.0, 0.1).backward()
    for parameter, exact in ((hidden_TD, exact_hidden_TD), (weight_VD, exact_weight_VD)):
        assert parameter.grad is not None and exact.grad is not None and parameter.grad.dtype == torch.bfloat16
        error = (parameter.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert float(error) < 0.02, float(error)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 14))
def test_chunks_change_nothing(num_tokens: int, chunk_tokens: int) -> None:
    gradients = []
    for size in (chunk_tokens, 1000):
        hidden_TD, weight_VD, target_ids_T = inputs(num_tokens)
        own = token_logprobs(hidden_TD, weight_VD, target_ids_T, shard(0.7, size))
        weighted(own, 1.0, 0.1).backward()
        gradients.append((*own, hidden_TD.grad, weight_VD.grad))
    for chunked, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, whole, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk_tokens", "num_tiles", "num_kept"), [(3, 37, 1), (17, 8, 2), (1000, 8, 8)])
def test_kept_logits_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk_tokens: int, num_tiles: int, num_kept: int
) -> None:
    """The bound on memory decides how many tiles the backward pass computes again; the gradients are the same."""
    monkeypatch.setattr(logprob, "CPU_TILE_LOGITS", 4 * NUM_VALID)
    computed: list[int] = []
    product = torch.mm

    def counted(*arguments: Any, **options: Any) -> Tensor:
        computed.append(1)
        return product(*arguments, **options)

    monkeypatch.setattr(logprob.torch, "mm", counted)
    results, counts = [], []
    for has_backward in (False, True):  # without a backward pass nothing is kept
        hidden_TD, weight_VD, target_ids_T = inputs(4 * T, dtype)
        computed.clear()
        apply = logprob._TokenLogprobs.apply
        own = apply(hidden_TD, weight_VD, target_ids_T, shard(0.7, chunk_tokens), has_backward)
        forward = len(computed)
        weighted(own, 1.0, 0.1).backward()
        results.append((*own, hidden_TD.grad, weight_VD.grad))
        counts.append((forward, len(computed) - forward))
    assert all(torch.equal(again, kept) for again, kept in zip(*results, strict=True))
    assert counts == [(num_tiles, num_tiles), (num_tiles, num_tiles - num_kept)]


def test_nothing_is_kept_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    logits = logprob._Tiles.logits

    def noted(self: Any, tokens: slice, rows: slice, into: list[Tensor] | None = None) -> Tensor:
        kept.append(into is not None)
        return logits(self, tokens, rows, into)

    monkeypatch.setattr(logprob._Tiles, "logits", noted)
    hidden_TD, weight_VD, target_ids_T = inputs()
    token_logprobs(hidden_TD, weight_VD, target_ids_T, shard(chunk_tokens=1000))
    with torch.no_grad():
        token_logprobs(hidden_TD, weight_VD, target_ids_T, shard(chunk_tokens=1000))
    assert kept == [True, False]


def test_an_entropy_without_gradient() -> None:
    """A loss of log-probabilities has the gradient that it has beside the entropy's, and no entropy adds to it."""
    of_logprobs, gradients = COEFFICIENTS["logprob"], []
    for has_gradient, coefficients in ((True, of_logprobs), (False, of_logprobs), (False, COEFFICIENTS["both"])):
        hidden_TD, weight_VD, target_ids_T = inputs()
        own = token_logprobs(hidden_TD, weight_VD, target_ids_T, replace(shard(0.7), entropy_has_gradient=has_gradient))
        assert own[1].requires_grad == has_gradient
        weighted(own, *coefficients).backward()
        assert hidden_TD.grad is not None and weight_VD.grad is not None
        gradients.append((hidden_TD.grad, weight_VD.grad))
    for expected, own_gradient, others in zip(*gradients, strict=True):
        torch.testing.assert_close(own_gradient, expected)
        assert torch.equal(own_gradient, others)


def test_a_frozen_head_costs_no_gradient() -> None:
    """The product that gives the weights' gradient is left out, and the hidden states' stays the same to the bit."""
    gradients, num_products = [], []
    for is_trained in (True, False):
        with mock.patch.object(products, "weight_gradient", wraps=products.weight_gradient) as product:
            hidden_TD, weight_VD, target_ids_T = inputs()
            weight_VD.requires_grad_(is_trained)
            weighted(token_logprobs(hidden_TD, weight_VD, target_ids_T, shard()), 1.0, 0.1).backward()
        assert hidden_TD.grad is not None and (weight_VD.grad is not None) == is_trained
        gradients.append(hidden_TD.grad)
        num_products.append(product.call_count)
    assert torch.equal(*gradients)
    assert num_products[0] > 0 and num_products[1] == 0


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_products_by_onednn(monkeypatch: pytest.MonkeyPatch, chunk_tokens: int) -> None:
    """Tiles whose logits the library allocates, kept for the backward pass or made again: the same values."""
    results = []
    for size in (1, 1 << 40):
        monkeypatch.setattr(products, "is_onednn_faster", lambda: True)
        monkeypatch.setattr(products, "MIN_WEIGHT", size)
        monkeypatch.setattr(products, "MIN_ROWS", size)
        hidden_TD, weight_VD, target_ids_T = inputs()
        values = token_logprobs(hidden_TD, weight_VD, target_ids_T, shard(0.7, chunk_tokens))
        weighted(values, 1.0, 0.1).backward()
        results.append([*values, hidden_TD.grad, weight_VD.grad])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected)


@dataclass(frozen=True)
class Half(VocabularyShard):
    """One of two shards, whose ranks are threads."""

    rank: int = 0
    sent: list[Tensor | None] = field(default_factory=lambda: [None, None])
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=60))

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        self.sent[self.rank] = tensor.clone()
        self.barrier.wait()
        both = torch.stack([part for part in self.sent if part is not None])
        self.barrier.wait()
        return both.amax(0) if op == dist.ReduceOp.MAX else both.sum(0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hits_over_a_split_vocabulary_are_those_of_the_whole(temperature: float, dtype: torch.dtype) -> None:
    """To the token: of the targets a third is most probable, a third second, the others are drawn."""
    generator = torch.Generator().manual_seed(1)
    hidden_TD, weight_VD = (torch.randn(n, D, generator=generator).to(dtype) for n in (60, V))
    logits_TV = (hidden_TD @ weight_VD.t()).float()[:, :NUM_VALID] / temperature
    top_T2 = logits_TV.topk(2, dim=-1).indices
    drawn_T = torch.randint(0, NUM_VALID, (20,), generator=generator)
    target_ids_T = torch.cat([top_T2[:20, 0], top_T2[20:40, 1], drawn_T])
    half, first = V // 2, Half(None, 0, V // 2, temperature, 7)
    second = Half(None, half, NUM_VALID - half, temperature, 7, rank=1, sent=first.sent, barrier=first.barrier)

    def hits(shard: VocabularyShard, weight: Tensor) -> Tensor:
        with torch.no_grad():
            return token_logprobs(hidden_TD, weight, target_ids_T, shard)[2]

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(hits, second, weight_VD[half:])
        own_T, other_T = hits(first, weight_VD[:half]), other.result()
    highest_T = logits_TV.amax(-1)
    expected_T = (logits_TV.gather(1, target_ids_T[:, None])[:, 0] == highest_T).float()
    assert torch.equal(own_T, expected_T) and torch.equal(other_T, expected_T)
    assert expected_T[:20].all() and not expected_T.all()
