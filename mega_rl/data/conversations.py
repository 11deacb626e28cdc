"""Supervised data: conversations as training sequences whose loss is only on the responses."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mega_rl.config.schema import DataConfig
from mega_rl.data.columns import messages_of, prompt_of, response_of
from mega_rl.data.fitting import fitting
from mega_rl.data.rows import Row, read_rows
from mega_rl.data.stream import Stream, fingerprint
from mega_rl.data.tokenizer import (
    Message,
    apply_template,
    as_messages,
    encode,
    render_prompt,
    uses_chat_template,
)
from mega_rl.errors import InputError
from mega_rl.types import Sequence

WANTED = "`messages`, or `prompt`, `question` or `instruction` with `response`, `answer` or `output`"

ConversationStream = Stream[Sequence]
Segment = tuple[list[int], bool]  # token ids, and whether they are learnt from


class ConversationDataset:
    """Training sequences in the order of their files.

    A row is ``{"messages": [...]}`` that ends with the assistant, or ``{"prompt": ..., "response": ...}`` where the
    prompt is text or messages (``answer`` stands in for ``response``). Every response ends with the end-of-sequence
    token. Prompt and response are tokenised apart, as they are when the response is sampled.
    """

    def __init__(self, sequences: list[Sequence], num_dropped: int = 0) -> None:
        self.sequences = sequences
        self.num_dropped = num_dropped  # conversations longer than the limits
        parts = [tensor.numpy().tobytes() for item in sequences for tensor in (item.token_ids, item.loss_mask)]
        self.fingerprint = fingerprint(parts)

    @classmethod
    def from_files(
        cls,
        files: list[str],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        key: str = "data.train_files",
        max_samples: int | None = None,
    ) -> ConversationDataset:
        """Reads, renders and filters by ``max_prompt_length + max_response_length`` tokens in all.

        Args:
            key: the configuration field that lists ``files``, for messages.
            max_samples: take the first rows only, before filtering.

        Raises:
            InputError: unreadable files, rows without the needed fields, overlong ones if they are not
                filtered, or nothing left.
        """
        rows = read_rows(files, key)[:max_samples]
        sequences, num_dropped = fitting(
            rows,
            key,
            "conversations",
            tokenizer,
            data,
            texts_of=_texts,
            item_of=lambda row: _sequence(row, tokenizer, data),
            num_tokens_of=lambda sequence: sequence.token_ids.numel(),
        )
        return cls(sequences, num_dropped)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, position: int) -> Sequence:
        return self.sequences[position]


def _texts(row: Row) -> list[Any]:
    messages = messages_of(row)
    return [prompt_of(row), response_of(row)] if messages is None else [messages]


def _sequence(row: Row, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Sequence:
    try:
        messages = _messages(row, data.system_prompt)
        if uses_chat_template(tokenizer, data.chat_template):
            segments = _templated_segments(tokenizer, messages)
        else:
            segments = _plain_segments(tokenizer, messages)
    except InputError as error:
        raise InputError(str(error) if row.where in str(error) else f"{row.where}: {error}") from error
    token_ids = [token for ids, _ in segments for token in ids]
    learnt = [float(is_learnt) for ids, is_learnt in segments for _ in ids]
    # Position t predicts token t + 1, so the mask of the tokens moves one to the left.
    return Sequence(torch.tensor(token_ids), torch.tensor(learnt[1:]))


def _messages(row: Row, system_prompt: str | None) -> list[Message]:
    messages: Any = messages_of(row)
    if messages is None:
        prompt, response = prompt_of(row), response_of(row)
        if prompt is None or response is None:
            raise row.missing(WANTED)
        messages = [*as_messages(prompt, None), {"role": "assistant", "content": response}]
    messages = as_messages(messages, system_prompt)
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise InputError("a conversation needs a prompt and ends with a non-empty message of the assistant")
    return messages


def _plain_segments(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[Segment]:
    if any(message["role"] == "assistant" for message in messages[:-1]):
        raise InputError("several assistant messages need a chat template; split the row or choose another tokenizer")
    _, prompt_ids = render_prompt(tokenizer, messages[:-1], "never")
    response_ids = encode(tokenizer, messages[-1]["content"])
    return [(prompt_ids, False), ([*response_ids, int(tokenizer.eos_token_id)], True)]


def _templated_segments(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[Segment]:
    """Context and response in turn: a response is what follows the generation prompt, through its end of sequence."""
    segments: list[Segment] = []
    done = ""  # the rendered text that segments already hold
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        context = apply_template(tokenizer, messages[:position], add_generation_prompt=True)
        through = apply_template(tokenizer, messages[: position + 1], add_generation_prompt=False)
        if not context.startswith(done) or not through.startswith(context):
            raise InputError(
                f"the tokenizer's chat template rewrites what stands before message {position + 1}; "
                "split the conversation into rows of one response each"
            )
        text, response_ids = response_after(tokenizer, context, through)
        segments += [(encode(tokenizer, context[len(done) :]), False), (response_ids, True)]
        done = context + text
    return segments


def response_after(tokenizer: PreTrainedTokenizerBase, context: str, through: str) -> tuple[str, list[int]]:
    """The response in a rendered text, through its end of sequence, and its token ids.

    Args:
        context: the text through the generation prompt.
        through: the same with the response behind it.
    """
    response, eos, _ = through[len(context) :].rpartition(str(tokenizer.eos_token))
    # Templates write a newline after the end of sequence: it belongs to the next context, not to the response.
    text = response + eos if eos else through[len(context) :]
    ids = encode(tokenizer, text)
    return text, ids if eos else [*ids, int(tokenizer.eos_token_id)]
