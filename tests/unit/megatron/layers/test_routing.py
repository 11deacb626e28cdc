"""The router: which experts it takes, what it learns of them, and in which precision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mega_rl.megatron.layers.routing import Choice, MicrobatchRouting, Router

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.3], [0.8, 0.2, 0.7, 0.1], [0.4, 0.3, 0.2, 0.1]])
OWN = [[1, 2], [0, 2], [0, 1]]


def chosen(routing: MicrobatchRouting | None, scores: Tensor = SCORES) -> tuple[Tensor, Tensor]:
    choice = Choice()
    choice.layer, choice.routing = 5, routing
    return choice.get_replay_topk(scores, 2, None, None, lambda s, k, **_: torch.topk(s, k, dim=1))


def test_without_a_record_the_router_chooses() -> None:
    for routing in (None, MicrobatchRouting(), MicrobatchRouting({4: torch.zeros(3, 2)})):
        values, experts = chosen(routing)
        assert experts.tolist() == OWN and values.equal(SCORES.gather(1, experts))


def test_given_experts_are_taken_but_where_they_are_not_known() -> None:
    recorded: dict[int, Tensor] = {}
    given = torch.tensor([[3, 0], [-1, -1], [2, 3]], dtype=torch.int16)
    values, experts = chosen(MicrobatchRouting({5: given}, recorded))
    assert experts.tolist() == [[3, 0], [0, 2], [2, 3]] and values.equal(SCORES.gather(1, experts))
    assert recorded[5].tolist() == experts.tolist() and recorded[5].dtype == torch.int16


def test_the_scores_of_given_experts_have_the_gradient() -> None:
    scores = SCORES.clone().requires_grad_()
    values, _ = chosen(MicrobatchRouting({5: torch.tensor([[3, 0]] * 3)}), scores)
    values.sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[1, 0, 0, 1]] * 3


def test_other_tokens_than_the_record_has_are_no_silent_error() -> None:
    with pytest.raises(AssertionError, match="experts"):
        chosen(MicrobatchRouting({5: torch.zeros(2, 2)}))


@pytest.mark.parametrize("router_dtype", [None, "fp32"])
def test_logits_have_the_precision_of_the_engines(router_dtype: str | None) -> None:
    """None: those of a product in the model's dtype, as vLLM's gate has it; everything after them is float32."""
    generator = torch.Generator().manual_seed(0)
    router = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.config = SimpleNamespace(moe_router_dtype=router_dtype)
    router.weight = torch.nn.Parameter(torch.randn(16, 64, generator=generator).bfloat16())
    router.bias = None
    hidden = torch.randn(7, 64, generator=generator).bfloat16()
    exact = hidden.float() @ router.weight.float().t()
    expected = exact if router_dtype else torch.nn.functional.linear(hidden, router.weight).float()
    assert router.gating(hidden).dtype == torch.float32 and torch.equal(router.gating(hidden), expected)
    assert torch.equal(expected, exact) == (router_dtype is not None), "the precisions do not differ here"
