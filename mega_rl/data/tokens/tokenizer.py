"""The tokenizer of a model directory, and prompts rendered with its chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mega_rl.data.rows.messages import CALLS, Message, as_messages, texts_of
from mega_rl.data.tokens.template import Tools, apply_template, uses_chat_template
from mega_rl.errors import InputError, shortened
from mega_rl.models.files import tokenizer_problem

MAX_TOKEN_CHARACTERS = 256  # no vocabulary has longer tokens; a text of more per token has too many tokens
BEGINNING_CHARACTERS = 16  # per token that a text may have, of what is encoded of a very long one first


def load_tokenizer(model_path: str, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory, with a padding token (the end-of-sequence one if it has none).

    Never downloads.

    Args:
        key: of the configuration, which names the directory in the sentences.

    Raises:
        InputError: no such directory, no or malformed tokenizer files, no end-of-sequence token.
    """
    directory = Path(model_path)
    if not os.path.isdir(directory):
        raise InputError(
            f"{key}: {shortened(model_path)} is no directory; give a downloaded Hugging Face model directory"
        )
    # Without this check transformers builds an empty tokenizer from nothing but config.json.
    problem = tokenizer_problem(directory)
    if problem is not None:
        raise InputError(problem)
    try:
        # Without False transformers would ask on standard input whether it may run code that lies beside the model.
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a malformed tokenizer.json
        cause = shortened(next(iter(str(error).splitlines()), type(error).__name__))
        raise InputError(
            f"{key}: the tokenizer in {model_path} cannot be loaded ({cause}); copy its files again"
        ) from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"{key}: the tokenizer in {model_path} has no eos_token; set it in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def padding_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int | None:
    """A token that stands in no text, for who looks for the end of one: not the end-of-sequence token, which does.

    Args:
        vocab_size: rows of the model's embedding; one without a token of its own will do.
    """
    if tokenizer.pad_token_id not in (None, tokenizer.eos_token_id):
        return int(tokenizer.pad_token_id)
    return vocab_size - 1 if vocab_size > len(tokenizer) else None


def num_characters(*texts: Any) -> int:
    """Of texts and lists of chat messages together, tool calls included; whatever is neither counts nothing."""
    return sum(len(content) for content in _contents(texts))


def _contents(texts: Iterable[Any]) -> list[str]:
    parts = [part for text in texts for part in (text if isinstance(text, list) else [text])]
    contents = [part.get("content") if isinstance(part, Mapping) else part for part in parts]
    calls = [part.get(CALLS) for part in parts if isinstance(part, Mapping)]
    return [*(content for content in contents if isinstance(content, str)), *texts_of(calls)]


def is_surely_longer(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Any], max_tokens: int) -> bool:
    """Whether texts and lists of chat messages are too long, told without encoding all of a text of megabytes.

    By its length, or by the tokens of its beginning: twice as many as may be, because the beginning may end within a
    token. False says nothing.
    """
    length = num_characters(*texts)
    if length > max_tokens * MAX_TOKEN_CHARACTERS:
        return True
    beginning = BEGINNING_CHARACTERS * max_tokens
    if length < 4 * beginning:  # soon encoded as a whole
        return False
    return any(len(encode(tokenizer, part[:beginning])) > 2 * max_tokens for part in _contents(texts))


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text; of the special tokens only a leading one (begin of sequence) is added."""
    ids = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    if add_special_tokens and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()  # some tokenizers end every text: nothing can follow such a prompt
    return ids


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[Message],
    chat_template: str = "auto",
    system_prompt: str | None = None,
    tools: Tools = (),
) -> tuple[str, list[int]]:
    """The text and the token ids from which a response is sampled.

    With the chat template, a string is one user message and the text ends with the generation prompt; the template
    writes all special tokens itself. Without, the contents are joined by newlines and the tokenizer adds its
    begin-of-sequence token if it has one.

    Args:
        chat_template: auto | always | never.
        system_prompt: a leading system message for prompts without one.
        tools: that the chat template offers, as JSON schemas.

    Raises:
        InputError: malformed messages, an empty prompt, or ``always`` without a template.
    """
    messages = as_messages(prompt, system_prompt)
    if uses_chat_template(tokenizer, chat_template):
        text = apply_template(tokenizer, messages, add_generation_prompt=True, tools=tools)
        ids = encode(tokenizer, text)
    else:
        text = "\n".join(message["content"] for message in messages)
        ids = encode(tokenizer, text, add_special_tokens=True)
    if not ids:
        raise InputError("the prompt is empty: a response needs at least one token to follow")
    return text, ids


def generation_ends(model_path: str) -> list[int]:
    """Tokens that end a response besides the end-of-sequence token, as generation_config.json says."""
    file = Path(model_path, "generation_config.json")
    try:
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (OSError, ValueError, AttributeError):
        return []  # the engine says what is wrong with it
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
