"""The losses of routers and the move of their bias, in one process; at every layout: test_engine_parity.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mega_rl.config.schema.learning import RouterConfig
from mega_rl.data.packing import pack
from mega_rl.megatron.layers import balance
from mega_rl.megatron.layers.balance import BalanceTotals, Balancing
from mega_rl.megatron.layers.routing import MicrobatchRouting, Router
from mega_rl.microbatch import Microbatch, Sequence
from mega_rl.models.mixture import Mixture
from mega_rl.parallel.zigzag import PADDING

E, K, LAYERS = 6, 2, 3
MIXTURE = Mixture(frozenset({0, 2}), E, K, ffn_size=8, normalize_weights=True)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank."""
    group = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(balance.parallel_state, "get_tensor_and_context_parallel_group", lambda: group)
    monkeypatch.setattr(balance.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(
        balance, "summed", lambda own: [number + other for number, other in zip(own, (1, 100), strict=True)]
    )


def microbatch(*lengths: int) -> Microbatch:
    """With a tail that is no token."""
    sequences = [Sequence(torch.zeros(n + 1, dtype=torch.int64), torch.ones(n)) for n in lengths]
    packed = pack(sequences, list(range(len(lengths))), pad_to_multiple=8, pad_token_id=0)
    assert packed.num_tokens > sum(lengths)
    return packed


def balancing(totals: BalanceTotals | None, **settings: object) -> Balancing:
    return Balancing(RouterConfig(**settings), MIXTURE, LAYERS, totals, (1, 0), torch.device("cpu"))  # type: ignore[arg-type]


def expected_balance(scores_LE: Tensor) -> Tensor:
    is_chosen_LE = torch.zeros_like(scores_LE).scatter(1, scores_LE.topk(K).indices, 1.0)
    return E / K * (is_chosen_LE.mean(0) * scores_LE.mean(0)).sum()


@pytest.mark.parametrize("over", ["sequence", "microbatch"])
def test_the_gradient_is_that_of_the_formulas(over: str) -> None:
    """Two micro-batches, the second in another order and with padding in between, as context parallelism has it."""
    generator = torch.Generator().manual_seed(0)
    batches = [microbatch(5, 8), microbatch(3, 7, 9)]
    pass_ = balancing(BalanceTotals(5, 32), aux_loss=0.5, z_loss=0.1, aux_loss_over=over)
    expected_losses, num_layers = torch.zeros(2), len(MIXTURE.layers)
    for number, one in enumerate(batches):
        order = torch.randperm(one.num_tokens, generator=generator) if number else torch.arange(one.num_tokens)
        sources = torch.cat([order[:4], torch.tensor([PADDING, PADDING]), order[4:]]) if number else None
        pack_TE = torch.randn(one.num_tokens, E, generator=generator, requires_grad=True)
        seen = pack_TE[order] if sources is None else pack_TE[sources.clamp_min(0)]
        for _ in range(num_layers):
            out = pass_.of(one, sources).with_losses(seen, K, "softmax")
        (own,) = torch.autograd.grad(out.sum() * 0 + 0 * seen.sum(), pack_TE)

        parts = list(pack_TE[: sum(one.lengths)].split(one.lengths))
        if over == "microbatch":
            parts = [torch.cat(parts)]
        shares = [1 / 5 if over == "sequence" else len(part) / 32 for part in parts]
        aux = sum(s * expected_balance(part.softmax(-1)) for s, part in zip(shares, parts, strict=True))
        z = torch.cat(parts).logsumexp(-1).square().sum() / 32
        (wanted,) = torch.autograd.grad(0.5 * aux + 0.1 * z, pack_TE)
        torch.testing.assert_close(own, wanted)
        expected_losses += torch.stack([aux.detach(), z.detach()])
    metrics = pass_.finish({}, is_changed=True)
    assert metrics["router/aux_loss"] == pytest.approx(float(expected_losses[0]))
    assert metrics["router/z_loss"] == pytest.approx(float(expected_losses[1]))


def test_totals_are_of_all_ranks() -> None:
    one = microbatch(5, 8)
    assert BalanceTotals.of([one, one], is_counted=True) == BalanceTotals(5, 126)
    assert BalanceTotals.of([one, one], is_counted=False) == BalanceTotals(1, 100), (
        "another rank counts these sequences"
    )


def routed(*tokens: tuple[int, ...]) -> Tensor:
    table = torch.zeros(len(tokens), E, dtype=torch.bool)
    for token, experts in enumerate(tokens):
        table[token, list(experts)] = True
    return table


@pytest.mark.parametrize("is_changed", [True, False])
def test_the_bias_goes_against_the_load(is_changed: bool) -> None:
    """Padding has no part in it, and a skipped step moves nothing."""
    pass_ = balancing(None, bias_update_rate=0.25)
    one = pass_.of(microbatch(4), None)
    one.note(2, routed((0, 1), (0, 2), (0, 1), (1, 2), *[(4, 5)] * 4))  # loads 3, 3, 2, 0, 0, 0; the mean is 4 / 3
    biases = {2: torch.ones(E)}
    metrics = pass_.finish(biases, is_changed)
    moved = [0.75, 0.75, 0.75, 1.25, 1.25, 1.25] if is_changed else [1.0] * E
    assert biases[2].tolist() == moved
    assert metrics.keys() == {"router/load_max", "router/idle_fraction"}
    assert metrics["router/idle_fraction"] == (3 + 6) / 12  # nothing came to layer 0


def test_a_step_smaller_than_the_dtype_moves_the_choice_in_the_end() -> None:
    """The bias is kept in float32 and used as the engine has it: in bfloat16 100.25 is 100, and 100.375 is 100.5."""
    router = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.config = SimpleNamespace(
        num_moe_experts=4,
        params_dtype=torch.bfloat16,
        moe_router_pre_softmax=False,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
    )
    router.topk, router.score_function = 1, "sigmoid"
    router.expert_bias = torch.tensor([100.0, 100.25, 99.0, 99.0])
    choice = SimpleNamespace(
        routing=MicrobatchRouting(), get_replay_topk=lambda scores, k, *_: torch.topk(scores, k, dim=1)
    )
    router.router_replay = choice
    logits = torch.tensor([[[0.1, 0.0, 0.0, 0.0]]])
    assert router.routing(logits)[1].tolist() == [[True, False, False, False]]
    router.expert_bias[1] += 0.125
    assert router.routing(logits)[1].tolist() == [[False, True, False, False]]


def test_a_micro_batch_of_nothing_but_its_tail() -> None:
    """Where a rank has fewer sequences than others have micro-batches."""
    empty = pack([], [], pad_to_multiple=4, pad_token_id=0)
    for totals in (None, BalanceTotals(3, 20)):
        found = balancing(totals, aux_loss=0.1).of(empty, None)
        assert not found.is_token_N.any() and len(found.is_token_N) == 4
