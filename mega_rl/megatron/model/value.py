"""The value head: one number for every position, as transformers' ``*ForSequenceClassification`` with one label has it.

The layer is whole on every rank and every rank computes every value: one row does not pay for being cut.
Letters: T packed tokens, D hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tensors import SCORE
from mega_rl.bridge.slices import Box, indices


class ScoreLayer(torch.nn.Module):
    """``score.weight`` ``[1, D]`` in the place of the output layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # With sequence parallelism a rank sees its own tokens only: Megatron sums the gradients of what has this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [...], float32 whatever the model is."""
        return F.linear(hidden.float(), self.weight.float())[..., 0]


def token_values(model: GPTModel, hidden_T1D: Tensor, target_ids_T: Tensor, learnt_K: Tensor | None) -> Tensor:
    """The values of all positions, ``[1, T]`` float32; what a position predicts does not matter, nor what is learnt."""
    values_T = model.output_layer(hidden_T1D[:, 0])
    if model.config.sequence_parallel:  # T numbers cross the ranks, and every rank goes on with the whole loss
        values_T = gather_from_sequence_parallel_region(values_T, tensor_parallel_output_grad=False)
    return values_T[None]


class NewScore:
    """A language model's directory read as that of a value model, whose ``score.weight`` begins anew.

    Args:
        reader: of the directory.
        seed: of a normal distribution of deviation 1 / sqrt(D + 1) (InstructGPT's, arXiv 2009.01325); None: zeros, so
            that every value begins at 0.
    """

    def __init__(self, reader: HFReader, hidden_size: int, seed: int | None) -> None:
        self._reader = reader
        self._score = torch.zeros(1, hidden_size)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self._score.normal_(0.0, (hidden_size + 1) ** -0.5, generator=generator)

    def read(self, name: str, box: Box) -> Tensor:
        """As ``HFReader.read``."""
        return self._score[indices(box)] if name == SCORE else self._reader.read(name, box)
