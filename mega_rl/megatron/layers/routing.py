"""Which experts take a token: the router's own choice, or one that was made elsewhere and is replayed.

A token whose router logits nearly tie goes to other experts as soon as anything rounds otherwise, and then its
log-probability is another function of the weights. Replaying the experts of the policy that sampled (rollout routing
replay, R3: arXiv 2510.11370), or those of the trainer's own pass before the update (R2: arXiv 2512.01374), keeps the
function. The weights of the replayed experts are computed from the present scores, so the router still learns.

Letters: N tokens of this rank as its routers see them, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mega_rl.megatron.layers.balance import Balance


@dataclass(frozen=True)
class MicrobatchRouting:
    """The experts of one micro-batch on this rank; layers count from 0 over the whole model."""

    given: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [N, K]; -1, or no entry: the router chooses
    recorded: dict[int, Tensor] | None = None  # layer -> [N, K] int16: filled in by the routers if it is there
    balance: Balance | None = None  # of a pass that learns


class Choice:
    """Stands where Megatron's router expects its ``RouterReplay``, which would choose for it.

    Megatron's own keeps the micro-batch under way in one global list per process and hands recomputation a queue: it
    needs a switch between every forward and backward pass, which an interleaved schedule does not offer, and cannot
    leave the choice of a single token to the router.
    """

    routing: MicrobatchRouting | None = None
    layer: int

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores [N, E] -> those of the chosen experts, and the experts, both [N, K]; Megatron's signature."""
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routing is None:
            return values, experts
        if (given := self.routing.given.get(self.layer)) is not None:
            assert given.shape == experts.shape, f"experts {tuple(given.shape)} for tokens {tuple(experts.shape)}"
            given = given.to(experts.device, experts.dtype, non_blocking=True)
            experts = torch.where(given < 0, experts, given)
            values = scores.gather(1, experts)
        if self.routing.recorded is not None:
            self.routing.recorded[self.layer] = experts.to(torch.int16)
        return values, experts


class Router(TopKRouter):
    """Megatron's router, whose logits have the precision of the engine's and whose choice can be made elsewhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = Choice()

    def set_layer_number(self, layer_number: int) -> None:
        super().set_layer_number(layer_number)
        self.router_replay.layer = layer_number - 1

    def gating(self, input: Tensor) -> Tensor:
        """Logits rounded as ``moe_router_dtype`` says; what follows is computed in float32, as in the engine."""
        return super().gating(input).float()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights of the chosen experts and where they are, [N, E] each, of the logits [N, 1, E]."""
        config, choice = self.config, self.router_replay
        logits_NE = logits.view(-1, config.num_moe_experts)
        balance = choice.routing.balance if choice.routing is not None and torch.is_grad_enabled() else None
        if balance is not None:
            logits_NE = balance.with_losses(logits_NE, self.topk, self.score_function)
        # The bias is float32 whatever the model is, so that small changes add up; the engine has it in its dtype.
        bias = None if self.expert_bias is None else self.expert_bias.to(config.params_dtype).float()
        weights_NE, is_routed_NE = topk_routing_with_score_function(
            logits_NE,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=bias,
            router_replay=choice,
        )
        if balance is not None:
            balance.note(choice.layer, is_routed_NE)
        return weights_NE, is_routed_NE


class MixtureLayer(TransformerLayer):
    """Megatron's layer with experts, which tells its router what the micro-batch's record says of the experts.

    The record is read when a forward pass begins, also when full recomputation repeats it. Recomputation of the experts
    alone would begin in the middle, when the router may hold the record of another micro-batch; it is therefore done
    here and not by Megatron's layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._routing: MicrobatchRouting | None = None
        self._are_experts_recomputed = self.mlp.moe_layer_recompute
        self.mlp.moe_layer_recompute = False
        self._mlp_forward = self.mlp.forward
        self.mlp.forward = self._routed_forward

    def forward(self, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        self._routing = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def _routed_forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        routing = self._routing

        def forward(hidden_states: Tensor) -> Any:
            self.mlp.router.router_replay.routing = routing
            return self._mlp_forward(hidden_states, **kwargs)

        if self._are_experts_recomputed:
            return tensor_parallel.checkpoint(forward, False, hidden_states)
        return forward(hidden_states)
