"""Building Megatron's GPTModel from a Hugging Face shape, with packed input and token log-probabilities as its output.

Letters: T packed tokens, D hidden width, V vocabulary rows of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.bridge.mapping.megatron import padded_vocab_size
from mega_rl.config.schema.sections import ParallelConfig
from mega_rl.errors import InputError
from mega_rl.megatron.layers import fused
from mega_rl.megatron.layers.attention import PackedSequences
from mega_rl.megatron.layers.vision import VisionTower, with_pictures
from mega_rl.megatron.model.families import config_class, family_settings
from mega_rl.megatron.model.heads import HEADS, OUTPUT_LAYERS, Output
from mega_rl.megatron.model.layers import layer_specs
from mega_rl.megatron.model.recompute import recompute_settings
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.models.fit import trainer_problems
from mega_rl.models.positions import rotary_axes
from mega_rl.models.shape import ModelShape
from mega_rl.models.vision import NUM_AXES


class PolicyModel(GPTModel):
    """GPTModel on packed sequences.

    With labels its last stage returns what the head computes from them: log-probabilities of the labels, the entropy
    and the hits ``[3, T]``, zero at tokens that are not learnt, or values ``[1, T]``; without labels this rank's logits
    ``[1, T, V]`` as GPTModel does.
    """

    def __init__(
        self,
        *args: Any,
        inverse_frequencies: Tensor,
        head: Output,
        axes: Tensor | None = None,
        vision: VisionTower | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            axes: int64 [D/2], the axis of positions that turns each pair of channels; None: positions have one axis.
            vision: turns pictures into embeddings, on the first pipeline stage.
        """
        super().__init__(*args, **kwargs)
        self.inverse_frequencies = inverse_frequencies
        self.rotary_axes = axes
        self.vision = vision
        if not self.config.multi_latent_attention:  # with it the layers apply rotary positions themselves
            self.rotary_pos_emb.inv_freq = inverse_frequencies
        self.head = head

    def _preprocess(self, *args: Any, position_ids: Tensor, packed_seq_params: PackedSequences, **kwargs: Any) -> tuple:
        if self.vision is not None and packed_seq_params.images is not None:
            embedded = self.embedding(input_ids=kwargs["input_ids"], position_ids=None)
            kwargs["decoder_input"] = with_pictures(self.vision, embedded, packed_seq_params, self.config)
        outputs = super()._preprocess(*args, position_ids=position_ids, packed_seq_params=packed_seq_params, **kwargs)
        # One row per token instead of one per position, so that positions restart in every sequence.
        if self.config.multi_latent_attention:
            angles = position_ids[0][:, None] * self.inverse_frequencies
            packed_seq_params.rotary_T11D = torch.cat([angles, angles], dim=-1)[:, None, None]
            return outputs
        if self.rotary_axes is not None:
            positions_3L = position_ids.expand(NUM_AXES, -1)
            angles = positions_3L[self.rotary_axes].t() * self.inverse_frequencies
            return (outputs[0], torch.cat([angles, angles], dim=-1)[:, None, None], *outputs[2:])
        table_S11D = outputs[1]
        return (outputs[0], table_S11D[position_ids[0]], *outputs[2:])

    def _postprocess(
        self, hidden_states: Tensor, *, labels: Tensor | None, packed_seq_params: PackedSequences, **kwargs: Any
    ) -> Tensor:
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states, labels=labels, packed_seq_params=packed_seq_params, **kwargs)
        return self.head(self, hidden_states, labels[0], packed_seq_params.learnt_K)


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Rotary frequencies [D/2], float32, as transformers computes them; Llama 3's scaling included.

    Source: RoPE (arXiv 2104.09864) and the scaling rule of Llama 3.1's reference implementation.
    """
    width = shape.latent.rope_dim if shape.latent else shape.head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    frequencies = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if not scaling or scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return frequencies
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    is_medium = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_medium, smoothed, scaled)


def transformer_config(spec: TrainerSpec, shape: ModelShape) -> TransformerConfig:
    """Megatron's configuration of one model; the fused kernels that need TransformerEngine or apex are off.

    Raises:
        InputError: Megatron refuses ``spec.fields`` beside the other settings.
    """
    parallel, dtype = spec.parallel, spec.dtype
    misfits = trainer_problems(shape, parallel, world_size=None)
    assert not misfits, misfits
    settings: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence,
        # An interleaved pipeline of two stages crosses its messages if sends and receives are batched.
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=parallel.virtual_pipeline is None,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it with variable lengths, dense models included
        calculate_per_token_loss=True,  # gradients are plain sums; the loss carries its global denominator
        deallocate_pipeline_outputs=False,  # silently wrong gradients over gloo with overlapped sends
        # Weights always come from a file, but Megatron marks its tensor-parallel ones only when it initialises them.
        # Without the mark the gradient norm counts the first rank's shards only.
        perform_initialization=True,
        use_cpu_initialization=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=True,  # not TransformerEngine's: that of the layer spec
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    settings |= family_settings(shape) | recompute_settings(spec.memory, shape)
    return _with_fields(config_class(shape), settings, spec.fields)


def _with_fields(
    built: type[TransformerConfig], settings: Mapping[str, Any], fields: Mapping[str, Any]
) -> TransformerConfig:
    """The configuration with ``fields`` beside ``settings``; what Megatron refuses of them is an InputError."""
    try:
        return built(**settings, **fields)
    except (AssertionError, ValueError) as error:
        if not fields:
            raise
        raise InputError(
            f"trainer.megatron has {', '.join(fields)}, which Megatron-core refuses here ({error}): correct them"
        ) from error


def process_groups(parallel: ParallelConfig) -> ProcessGroupCollection:
    """Megatron's groups as the model sees them: as if there were no context parallelism.

    Position tables are gathered per token and the attention collects keys itself, so Megatron must not cut either.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if parallel.context > 1:
        groups.cp = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return groups


def mark_experts(model: torch.nn.Module) -> None:
    """Mark the experts, so that their gradients are summed over the experts' replicas.

    Megatron marks them only with expert parallelism. Without it, but with another tensor parallelism for experts, it
    would silently add up gradients of different shards.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def build_model(spec: TrainerSpec, shape: ModelShape, device: torch.device) -> list[PolicyModel]:
    """This rank's chunks of the model, their weights not yet filled except padding rows, which are zero.

    There is one chunk, or ``parallel.virtual_pipeline`` of them.
    """
    fused.install()
    config, parallel = transformer_config(spec, shape), spec.parallel
    head = HEADS[shape.head](spec, shape)
    groups = process_groups(parallel)
    tower, chunks = shape.tower, []
    axes = None if tower is None else rotary_axes(tower).to(device)
    for chunk in [None] if parallel.virtual_pipeline is None else range(parallel.virtual_pipeline):
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
        model = PolicyModel(
            config=config,
            transformer_layer_spec=layer_specs(config, shape, chunk, spec.layers),
            vocab_size=padded_vocab_size(shape.vocab_size, parallel.tensor),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=is_first,
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_theta),
            inverse_frequencies=inverse_frequencies(shape).to(device),
            head=head,
            axes=axes,
            vision=VisionTower(tower, config, spec.vision.cache_bytes) if tower is not None and is_first else None,
            pg_collection=groups,
            vp_stage=chunk,
        )
        if model.post_process and shape.head in OUTPUT_LAYERS:
            model.output_layer = OUTPUT_LAYERS[shape.head](config)
        model = model.to(device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        mark_experts(model)
        chunks.append(model)
    return chunks
