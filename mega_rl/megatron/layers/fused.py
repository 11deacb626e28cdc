"""Megatron's operations that have fused kernels, done by ``platform.dispatch``.

| operation | seam in Megatron |
|---|---|
| attention | ``core_attention`` of the layer spec (``PackedAttention``) |
| RMSNorm | the norms of the layer spec (``norms.RMSNorm``) |
| sum and RMSNorm | ``self_attn_bda``, ``pre_mlp_layernorm`` and ``mlp_bda`` of the layer spec (``norms.SumNorm``) |
| SwiGLU | ``activation_func`` of the MLP's spec, which ``use_te_activation_func`` turns on |
| experts | ``experts`` of the MoE spec (``GroupedExperts``) |
| rotary | ``apply_rotary_pos_emb``, a name that two modules import: replaced there |
| permutation | ``permute`` and ``unpermute``, names that the token dispatcher imports: replaced there |
| exchange of tokens | the dispatcher's class, a name that the MoE layer imports: replaced there (``TokenDispatcher``) |

Letters: T tokens of this rank, H heads, D width, E experts of all ranks, N rows sorted by expert.
"""

from __future__ import annotations

from typing import Any

import megatron.core.transformer.attention as attention
import megatron.core.transformer.moe.moe_layer as moe_layer
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import megatron.core.transformer.multi_latent_attention as multi_latent_attention
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.megatron.tuning.adapter import product_of_experts
from mega_rl.platform import dispatch as operators
from mega_rl.platform.operators.attention import once_per_tensor
from mega_rl.platform.operators.torch_kernels import chosen_experts


class GroupedExperts(SequentialMLP):
    """Megatron's experts, each with its own weights as Megatron holds them, computed by one grouped product."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Rows [N, D] sorted by expert, how many each has, and their weights [N] -> [N, D]; there is no bias."""
        rows, ends_E = permuted_local_hidden_states, tokens_per_expert.cumsum(0)
        first, second = ([getattr(x, name) for x in self.local_experts] for name in ("linear_fc1", "linear_fc2"))
        hidden = operators.swiglu(product_of_experts(rows, first, ends_E), permuted_probs)
        return product_of_experts(hidden, second, ends_E), None


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's exchange of tokens between ranks, which has experts' counts of rows stay on the device.

    The host has to know how many rows the ranks exchange, and waits for that once in every layer. If they exchange none
    there is nothing to wait for, and nothing to sort either: the rows stand by expert already.
    """

    @property
    def _exchanges_none(self) -> bool:
        return self.ep_size * self.tp_size == 1

    def preprocess(self, routing_map: Tensor) -> Tensor:
        self._counts_E: Tensor = super().preprocess(routing_map)
        return self._counts_E

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if self._exchanges_none:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self._exchanges_none:
            rows, _, weights = super().dispatch_postprocess(global_input_tokens, global_probs)
            return rows, self._counts_E, weights
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(global_input_tokens)
        return global_input_tokens, self._counts_E, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states if self._exchanges_none else super().combine_preprocess(hidden_states)


def use_in_mlp(spec: ModuleSpec) -> None:
    """Let the MLP of a layer, or its experts, use the platform's operators."""
    submodules = spec.submodules
    if hasattr(submodules, "experts"):
        submodules.experts.module = GroupedExperts
        submodules = submodules.shared_experts.submodules
    submodules.activation_func = operators.swiglu


@once_per_tensor
def _cosines_and_sines(angles_T11D: Tensor) -> tuple[Tensor, Tensor]:
    return angles_T11D[:, 0, 0].cos(), angles_T11D[:, 0, 0].sin()


def apply_rotary(
    t: Tensor, freqs: Tensor, config: TransformerConfig, cu_seqlens: Tensor, mscale: float = 1.0, cp_group: Any = None
) -> Tensor:
    """``apply_rotary_pos_emb`` for packed [T, H, D] whose angles [T, 1, 1, D] are gathered per token beforehand."""
    assert cu_seqlens is not None and mscale == 1.0 and not config.rotary_interleaved and freqs.shape[0] == t.shape[0]
    if config.multi_latent_attention:  # latent attention's pairs lie side by side
        t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
    cos_TD, sin_TD = (table.to(t.dtype) for table in _cosines_and_sines(freqs))
    return operators.rotary(t, cos_TD, sin_TD)


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor, num_out_tokens: int, fused: bool, drop_and_pad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [N, D] of the tokens [T, D] by the map [T, E], their weights [N] of ``probs`` [T, E], and their order."""
    assert not fused and not drop_and_pad, "no tokens are dropped"
    experts_per_token = num_out_tokens // max(1, len(tokens))
    rows_ND, order_N = operators.permute_tokens(tokens, routing_map, experts_per_token)
    weights_TK = probs.gather(1, chosen_experts(routing_map, experts_per_token))
    places_N = torch.empty_like(order_N)  # of every row among the weights, which stand token by token
    places_N[order_N.long()] = torch.arange(len(order_N), dtype=order_N.dtype, device=order_N.device)
    return rows_ND, weights_TK.flatten().index_select(0, places_N), order_N


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    routing_map: Tensor,
    fused: bool,
    drop_and_pad: bool,
) -> Tensor:
    """The reverse of ``permute``; the weights have been applied by the experts."""
    assert not fused and not drop_and_pad and restore_shape[0] == len(routing_map), "no tokens are dropped"
    return operators.unpermute_tokens(permuted_tokens, sorted_indices, routing_map)


def install() -> None:
    """Replace the names for which Megatron's specs have no place."""
    attention.apply_rotary_pos_emb = multi_latent_attention.apply_rotary_pos_emb = apply_rotary
    token_dispatcher.permute, token_dispatcher.unpermute = permute, unpermute
    moe_layer.MoEAlltoAllTokenDispatcher = TokenDispatcher
