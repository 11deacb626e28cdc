"""The modules that the layers of a model are made of, and which layer gets which.

Letters: T packed tokens, D width of the rotary part of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor

from mega_rl.config.schema.device import Layers
from mega_rl.errors import InputError
from mega_rl.megatron.layers.attention import PackedAttention, PackedSequences
from mega_rl.megatron.layers.fused import use_in_mlp
from mega_rl.megatron.layers.norms import RMSNorm, use_in_layer
from mega_rl.megatron.layers.routing import MixtureLayer, Router
from mega_rl.megatron.layers.vision import add_features
from mega_rl.models.fit import layer_problems
from mega_rl.models.shape import ModelShape


class _TokenTable(torch.nn.Module):
    """Replaces Megatron's rotary module: the table is the micro-batch's own, one row per token."""

    table_T11D: Tensor

    def get_rotary_seq_len(self, *_: Any) -> int:
        return self.table_T11D.shape[0]

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.table_T11D


class SeeingLayer(TransformerLayer):
    """A layer that adds features of pictures to its output where the micro-batch has some for it (DeepStack)."""

    def forward(self, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        hidden_L1D, context = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        return add_features(hidden_L1D, self.layer_number - 1, packed_seq_params), context


class SeeingMixtureLayer(SeeingLayer, MixtureLayer):
    """One with experts: what it adds comes behind theirs."""


class LatentSelfAttention(MLASelfAttention):
    """Megatron's latent attention on packed sequences whose positions restart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = _TokenTable()
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gather)

    def _gather(self, _: torch.nn.Module, __: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Whole compressed keys and values from this rank's rows of the projection.

        Megatron 0.16 gathers them too, but does not sum the gradient of the rotary part over the ranks, although each
        rank uses that part for its own heads only.
        """
        gathered = gather_from_tensor_model_parallel_region(outputs[0])
        # The result is cut along the sequence, so that Megatron gathers the rotary part again and sums its gradient.
        return scatter_to_sequence_parallel_region(gathered), outputs[1]

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> Any:
        assert packed_seq_params is not None and packed_seq_params.rotary_T11D is not None, "every batch is packed"
        # Set for every call: recomputation may run several micro-batches' layers in any order.
        self.rotary_pos_emb.table_T11D = packed_seq_params.rotary_T11D
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **kwargs
        )


def layer_specs(
    config: TransformerConfig, shape: ModelShape, chunk: int | None = None, layers: Layers = "local"
) -> TransformerBlockSubmodules:
    """The layers of one model chunk; ``chunk`` counts those of an interleaved pipeline and is None without one.

    Raises:
        InputError: ``layers`` are not usable here, or not for this model.
    """
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    last = first + get_num_layers_to_build(config, vp_stage=chunk)
    dense = _layer_spec(config, num_experts=None)
    sparse = _layer_spec(config, num_experts=config.num_moe_experts) if shape.mixture else dense
    if layers == "transformer_engine":
        for problem in layer_problems(shape, layers):
            raise InputError(problem)
        _use_transformer_engine(config, dense.submodules, sparse.submodules)
    if shape.tower is not None and shape.tower.deepstack:
        dense.module, sparse.module = SeeingLayer, SeeingMixtureLayer if shape.mixture else SeeingLayer
    specs = [sparse if shape.has_experts(layer) else dense for layer in range(first, last)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    spec: ModuleSpec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = RMSNorm
    use_in_layer(layer)
    use_in_mlp(layer.mlp)
    if num_experts is not None:
        spec.module, layer.mlp.submodules.router = MixtureLayer, Router
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        layer.self_attention.module = LatentSelfAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _use_transformer_engine(config: TransformerConfig, dense: Any, sparse: Any) -> None:
    """Put the linear layers of Megatron's own spec for TransformerEngine into two layers' submodules (may be one's).

    Attention, norms of heads, experts and activation stay: they are made for packed sequences and the bridge's names.
    """
    if not gpt_layer_specs.HAVE_TE:
        raise InputError(
            "platform.layers is 'transformer_engine', whose part for torch Megatron-core cannot import: install "
            "transformer-engine[pytorch], or set the key to local"
        )
    theirs = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm).submodules
    attention, mlp = theirs.self_attention.submodules, theirs.mlp.submodules
    for layer in (dense, sparse):
        own = layer.self_attention.submodules
        own.linear_qkv, own.linear_proj = attention.linear_qkv, attention.linear_proj
        layer.input_layernorm = theirs.input_layernorm  # none: it is in linear_qkv
    dense.mlp.submodules.linear_fc1, dense.mlp.submodules.linear_fc2 = mlp.linear_fc1, mlp.linear_fc2
    for name in ("self_attn_bda", "pre_mlp_layernorm", "mlp_bda"):  # this norm is in linear_fc1
        setattr(dense, name, getattr(theirs, name))


def frozen_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weights of the model that are no parameters: the routers' score biases, which no gradient ever reaches.

    They are float32 whatever the model is, but are used, exported and sent to the engine in its dtype.
    """
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("router.expert_bias")}
