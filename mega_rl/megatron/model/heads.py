"""What the last pipeline stage makes of the hidden states and the targets: one entry of ``HEADS`` for each head.

Letters: T packed tokens, K of them that are learnt from, D hidden width, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.bridge.mapping.megatron import padded_vocab_size
from mega_rl.megatron.model.logprob import VocabularyShard, token_logprobs
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.model.value import ScoreLayer, token_values
from mega_rl.models.shape import Head, ModelShape

# (model, hidden states [T, 1, D], targets [T], the tokens that are learnt from [K] or None: all) -> rows [n, T]
Output = Callable[[GPTModel, Tensor, Tensor, Tensor | None], Tensor]


def vocabulary_head(spec: TrainerSpec, shape: ModelShape) -> Output:
    """Log-probabilities of the targets, the entropy and whether the target is the most probable token, ``[3, T]``."""
    rows = padded_vocab_size(shape.vocab_size, spec.parallel.tensor) // spec.parallel.tensor
    start = rows * parallel_state.get_tensor_model_parallel_rank()
    shard = VocabularyShard(
        group=parallel_state.get_tensor_model_parallel_group(),
        start=start,
        num_valid=max(0, min(rows, shape.vocab_size - start)),
        temperature=spec.temperature,
        chunk_tokens=spec.chunk_tokens,
        entropy_has_gradient=spec.entropy_has_gradient,
    )
    return partial(_token_statistics, shard)


def _token_statistics(
    shard: VocabularyShard, model: GPTModel, hidden_T1D: Tensor, target_ids_T: Tensor, learnt_K: Tensor | None
) -> Tensor:
    """Of tokens that are not learnt from nothing is computed: their columns are zero."""
    is_cut = model.config.sequence_parallel
    if is_cut:
        hidden_T1D = gather_from_sequence_parallel_region(hidden_T1D, tensor_parallel_output_grad=True)
    hidden_KD, targets_K = hidden_T1D[:, 0], target_ids_T
    if learnt_K is not None:
        hidden_KD, targets_K = hidden_KD.index_select(0, learnt_K), target_ids_T.index_select(0, learnt_K)
    if not is_cut:
        hidden_KD = copy_to_tensor_model_parallel_region(hidden_KD)
    shared = model.share_embeddings_and_output_weights
    weight_VD = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
    rows_3K = torch.stack(token_logprobs(hidden_KD, weight_VD, targets_K, shard))
    if learnt_K is None:
        return rows_3K
    return rows_3K.new_zeros(len(rows_3K), len(target_ids_T)).index_copy(1, learnt_K, rows_3K)


def value_head(spec: TrainerSpec, shape: ModelShape) -> Output:
    """The value of every position, ``[1, T]``."""
    return token_values


HEADS: Mapping[Head, Callable[[TrainerSpec, ModelShape], Output]] = {"vocabulary": vocabulary_head, "value": value_head}
# What takes the place of Megatron's output layer; a head that is not here keeps it.
OUTPUT_LAYERS: Mapping[Head, Callable[[TransformerConfig], torch.nn.Module]] = {"value": ScoreLayer}
