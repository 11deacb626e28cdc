"""Plain text for pre-training: every token of every document, cut into sequences of the greatest length."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerBase

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.fitting import max_tokens
from mega_rl.data.rows.columns import refuse_columns
from mega_rl.data.rows.rows import DataFiles, Row
from mega_rl.data.stream import fingerprint
from mega_rl.data.tokens.tokenizer import encode
from mega_rl.errors import InputError, shown
from mega_rl.microbatch import Sequence


class TextDataset:
    """Training sequences in the order of their files.

    A row is ``{"text": ...}``: one document, tokenised without a template, behind the begin-of-sequence token if the
    tokenizer has one, and closed by the end-of-sequence token. A document longer than the limit becomes several
    sequences; each begins with the last token of the one before, so that every token but the document's first is
    predicted exactly once.
    """

    def __init__(self, sequences: list[Sequence], num_documents: int, num_empty: int = 0) -> None:
        self.sequences = sequences
        self.num_documents = num_documents  # with text in them
        self.num_empty = num_empty  # documents without a character
        self.fingerprint = fingerprint([sequence.token_ids.numpy().tobytes() for sequence in sequences])

    @classmethod
    def from_files(cls, files: DataFiles, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> TextDataset:
        """Reads and cuts at ``max_prompt_length + max_response_length`` tokens.

        Raises:
            InputError: unreadable files, a row whose ``text`` is no text, a limit of less than 2 tokens, or no text.
        """
        limit = max_tokens(data)
        if limit < 2:
            raise InputError(f"data.max_prompt_length + data.max_response_length is {limit}: set the sum to at least 2")
        sequences: list[Sequence] = []
        num_documents = num_empty = 0
        for row in files.rows():
            text = _text(row)
            if not text:
                num_empty += 1
                continue
            num_documents += 1
            ids = [*encode(tokenizer, text, add_special_tokens=True), int(tokenizer.eos_token_id)]
            sequences += _cut(ids, limit)
        if not sequences:
            raise InputError(f"{files.key}: all {num_empty} documents are empty; give some text")
        return cls(sequences, num_documents, num_empty)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, position: int) -> Sequence:
        return self.sequences[position]


def _text(row: Row) -> str:
    refuse_columns(row)
    text = row.get("text")
    if text is None:
        raise row.missing("`text`")
    if not isinstance(text, str):
        raise InputError(f"{row.where}: text is {shown(text)}; make it a string")
    return text


def _cut(ids: list[int], limit: int) -> Iterator[Sequence]:
    """Sequences of at most ``limit`` tokens that predict all of ``ids`` but the first; one token is no sequence."""
    for start in range(0, len(ids) - 1, limit - 1):
        part = ids[start : start + limit]
        yield Sequence(torch.tensor(part), torch.ones(len(part) - 1))
