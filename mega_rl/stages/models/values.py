"""Models with a value head, opened from a directory: of a reward model, or of a language model that gets a new head."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.errors import InputError
from mega_rl.megatron.model.value import NewScore
from mega_rl.microbatch import Sequence
from mega_rl.models.shape import SUFFIXES, Head, ModelShape, read_model_shape, value_shape


def open_value_model(
    directory: str | Path, key: str, seed: int | None, allowed: Collection[Head] = tuple(SUFFIXES)
) -> tuple[ModelShape, HFReader | NewScore]:
    """The shape of the value model in a directory, and its weights.

    Args:
        key: of the configuration, which names the directory.
        seed: of the head that a language model gets; None: it begins with zeros.
        allowed: what the model in the directory may have on its last layer.

    Raises:
        InputError: no such model, or files that are not its.
    """
    shape, reader = read_model_shape(directory, key, allowed), HFReader(directory)
    reader.check(shape)
    if shape.head == "value":
        return shape, reader
    shape = value_shape(shape)
    return shape, NewScore(reader, shape.hidden_size, seed)


def scored_at_end(token_ids: torch.Tensor) -> Sequence:
    """Token ids as a sequence whose last position is the last token, which is the one that counts."""
    loss_mask = torch.zeros(token_ids.numel())
    loss_mask[-1] = 1.0
    return Sequence(torch.cat([token_ids, token_ids[-1:]]), loss_mask)


def check_same_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: str | Path, key: str) -> None:
    """InputError unless the model in a directory reads token ids as the policy writes them."""
    other = load_tokenizer(str(directory), key).get_vocab()
    own = tokenizer.get_vocab()
    if other == own:
        return
    different = min(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    raise InputError(
        f"{key}={directory} has another tokenizer than model.path: the token {different!r} has the id "
        f"{other.get(different)} there and {own.get(different)} here; give a model of the same family"
    )
