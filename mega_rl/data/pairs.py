"""Preference data: a prompt with a chosen and a rejected answer, and a prompt with one answer and its verdict.

The prompt is ``prompt`` (text or messages), ``conversations`` or ``messages`` that end with the user, ``question``, or
``instruction`` with ``input``. An answer is text, one message (``role`` and ``content``, or ``from`` and ``value``) or
a list of messages. Lists that begin with the prompt need no other column: what both begin with is the prompt (TRL's
implicit prompt).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.conversations import REMEDY, response_after, response_segments
from mega_rl.data.fitting import RowKind, fitting, max_tokens
from mega_rl.data.rows.columns import LOSSES, message_of, messages_of, prompt_of, response_of, row_tools
from mega_rl.data.rows.messages import ASSISTANT, CALLS, TOOL, Message, as_messages, texts_of
from mega_rl.data.rows.rows import DataFiles, Row
from mega_rl.data.stream import fingerprint
from mega_rl.data.tokens.template import Tools, apply_template, check_written, uses_chat_template
from mega_rl.data.tokens.tokenizer import encode, num_characters, render_prompt
from mega_rl.errors import InputError, shown
from mega_rl.microbatch import Sequence

WANTED = (
    "`prompt`, `conversations`, `question` or `instruction` with `chosen` and `rejected`, or `chosen` and `rejected` "
    "as lists of messages that begin with the prompt"
)
WANTED_VERDICT = (
    "`prompt`, `question` or `instruction` with `completion`, `response`, `answer` or `output`, or `messages` or "
    "`conversations` that end with the assistant"
)
VERDICTS = ("kto_tag", "label")  # LLaMA-Factory's and TRL's name of the same column


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt. The loss mask is 1 where a token of the answer is predicted, its end included."""

    index: int  # its place in the data set
    chosen: Sequence
    rejected: Sequence
    margin: float | None = None  # by how much the chosen one should score higher; None: the row says nothing

    def __post_init__(self) -> None:
        start = num_prompt_tokens(self.chosen)
        assert start == num_prompt_tokens(self.rejected), "both answers follow the same prompt"
        assert torch.equal(self.chosen.token_ids[:start], self.rejected.token_ids[:start]), "token by token"

    @property
    def sequences(self) -> tuple[Sequence, Sequence]:
        """Chosen and rejected, in this order: what must lie in one micro-batch."""
        return self.chosen, self.rejected


@dataclass(frozen=True)
class LabelledAnswer:
    """One answer and whether it is good, with the same prompt before another prompt's answer."""

    index: int  # its place in the data set
    answer: Sequence
    mismatched: Sequence  # for the estimate of the KL from the reference that KTO compares with
    is_good: bool

    @property
    def sequences(self) -> tuple[Sequence, Sequence]:
        return self.answer, self.mismatched


def num_prompt_tokens(sequence: Sequence) -> int:
    """Tokens before the first one that is learnt from."""
    return int(sequence.loss_mask.argmax()) + 1


class PairDataset:
    """Pairs in the order of their files."""

    def __init__(self, pairs: list[Pair], num_dropped: int = 0) -> None:
        self.items = pairs
        self.num_dropped = num_dropped  # pairs of which one answer is longer than the limits
        margins = repr([pair.margin for pair in pairs]).encode()
        self.fingerprint = fingerprint([margins, *_bytes(s for pair in pairs for s in pair.sequences)])

    @classmethod
    def from_files(cls, files: DataFiles, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> PairDataset:
        """Reads, renders and filters: each answer with its prompt by max_prompt_length + max_response_length tokens.

        Raises:
            InputError: unreadable files, rows without the needed fields, answers that are equal or empty, overlong ones
                if they are not filtered, or nothing left.
        """
        pairs, num_dropped = fitting(files.rows(), PAIRS, tokenizer, data, files.key)
        return cls([Pair(place, p.chosen, p.rejected, p.margin) for place, p in enumerate(pairs)], num_dropped)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> Pair:
        return self.items[position]


class LabelledDataset:
    """Answers with their verdicts, in the order of their files.

    The mismatched answer of a row is that of the next row with another prompt, cut where it would be too long.
    """

    def __init__(self, items: list[LabelledAnswer], num_dropped: int = 0) -> None:
        self.items = items
        self.num_dropped = num_dropped  # answers longer than the limits
        verdicts = bytes(item.is_good for item in items)
        self.fingerprint = fingerprint([verdicts, *_bytes(s for item in items for s in (item.answer, item.mismatched))])

    @classmethod
    def from_files(cls, files: DataFiles, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> LabelledDataset:
        """As ``PairDataset.from_files``.

        Raises:
            InputError: also where all rows have the same prompt, so that no answer is a mismatch.
        """
        rows, num_dropped = fitting(files.rows(), JUDGED, tokenizer, data, files.key)
        answers = [answer for answer, _ in rows]
        mismatched = _mismatched(answers, max_tokens(data), files.key)
        judged = zip(rows, mismatched, strict=True)
        return cls(
            [LabelledAnswer(i, answer, other, is_good) for i, ((answer, is_good), other) in enumerate(judged)],
            num_dropped,
        )

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> LabelledAnswer:
        return self.items[position]


def _bytes(sequences: Any) -> list[bytes]:
    return [tensor.numpy().tobytes() for item in sequences for tensor in (item.token_ids, item.loss_mask)]


def _pair_texts(row: Row) -> list[Any]:
    """Tools, prompt, and the longer answer."""
    prompt, *answers = _prompt_and_answers(row)
    tools = list(texts_of(row.get("tools")))
    return max(([*tools, prompt, [answer]] for answer in answers), key=lambda texts: num_characters(*texts))


def _pair(row: Row, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Pair:
    prompt, *answers = _prompt_and_answers(row)
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if _is_empty(answer):
            raise InputError(f"{row.where}: {name} is empty; give an answer, or leave the row out")
    chosen, rejected = _sequences(row, prompt, answers, tokenizer, data)
    if torch.equal(chosen.token_ids, rejected.token_ids):
        raise InputError(f"{row.where}: chosen and rejected are equal, so that nothing is preferred; leave the row out")
    margin = row.get("margin")
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin)
    if margin is not None and not is_number:
        raise InputError(f"{row.where}: margin is {shown(margin)}; make it a number, or leave it out")
    return Pair(0, chosen, rejected, None if margin is None else float(margin))


def _judged_texts(row: Row) -> list[Any]:
    prompt, answer = _prompt_and_answer(row)
    return [*texts_of(row.get("tools")), prompt, [answer]]


def _judged(row: Row, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> tuple[Sequence, bool]:
    found = [row.get(name) for name in VERDICTS if row.get(name) is not None]
    if not found:
        raise row.missing("`kto_tag` or `label`, true for a good answer and false for a bad one")
    if len(found) > 1 or not isinstance(found[0], bool):
        raise InputError(f"{row.where}: kto_tag or label is {shown(found)}; give one of them, true or false")
    prompt, answer = _prompt_and_answer(row)
    if _is_empty(answer):
        raise InputError(f"{row.where}: the answer is empty; give one, or leave the row out")
    (sequence,) = _sequences(row, prompt, [answer], tokenizer, data)
    return sequence, found[0]


PAIRS = RowKind("pairs", _pair_texts, _pair, lambda pair: max(one.token_ids.numel() for one in pair.sequences))
JUDGED = RowKind("answers", _judged_texts, _judged, lambda judged: judged[0].token_ids.numel())


# --- columns ---------------------------------------------------------------------------------------------------------


def _prompt_and_answers(row: Row) -> tuple[Any, Message, Message]:
    """The prompt (text or messages), and both answers."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        raise row.missing(WANTED)
    if not (_begins_with_prompt(row, chosen) and _begins_with_prompt(row, rejected)):
        prompt = _own_prompt(row)
        if prompt is None:
            raise row.missing(WANTED)
        return prompt, _answer_message(row, "chosen", chosen), _answer_message(row, "rejected", rejected)
    first, second = ([message_of(row, turn) for turn in turns] for turns in (chosen, rejected))
    prompt, last = first[:-1], (first[-1], second[-1])
    if second[:-1] != prompt:
        raise InputError(f"{row.where}: chosen and rejected differ before their last messages; make them one prompt")
    _check_own_prompt(row, prompt)
    return prompt, _answer_message(row, "chosen", last[0]), _answer_message(row, "rejected", last[1])


def _begins_with_prompt(row: Row, answer: Any) -> bool:
    return isinstance(answer, list) and bool(answer) and message_of(row, answer[0])["role"] != ASSISTANT


def _check_own_prompt(row: Row, prompt: list[dict[str, Any]]) -> None:
    """A prompt column beside answers that begin with it must say the same."""
    own = _own_prompt(row)
    if own is None:
        return
    last = prompt[-1]["content"] if prompt else None
    same = own == (last if isinstance(own, str) else prompt)
    if not same:
        raise InputError(f"{row.where}: the prompt is not what chosen and rejected begin with; leave one of them out")


def _own_prompt(row: Row) -> Any:
    """The prompt that stands in columns of its own, led by ``system`` if there is one; None without."""
    messages = messages_of(row)
    if messages is not None:
        last = messages[-1] if isinstance(messages, list) and messages else None
        if not isinstance(last, Mapping) or last.get("role") == ASSISTANT:
            raise InputError(f"{row.where}: the conversation before the answers must end with the user; correct it")
        return messages
    prompt = prompt_of(row)
    return [message_of(row, turn) for turn in prompt] if isinstance(prompt, list) else prompt


def _prompt_and_answer(row: Row) -> tuple[Any, Message]:
    """The prompt (text or messages), and the only answer."""
    messages = messages_of(row)
    if isinstance(messages, list) and len(messages) > 1 and row.get("completion") is None:
        return messages[:-1], _answer_message(row, "the conversation", messages[-1])
    answer = response_of(row) if row.get("completion") is None else row.get("completion")
    prompt = _own_prompt(row)
    if prompt is None or answer is None:
        raise row.missing(WANTED_VERDICT)
    return prompt, _answer_message(row, "the answer", answer)


def _answer_message(row: Row, name: str, answer: Any) -> Message:
    """Text, one message of the assistant, or a list of just that, as a message, which may call tools."""
    if isinstance(answer, str):
        return {"role": ASSISTANT, "content": answer}
    message = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    if isinstance(message, Mapping):
        message = message_of(row, message)
        _refuse_losses(row, [message])
        try:
            (found,) = as_messages([message], None)
        except InputError as error:
            raise InputError(f"{row.where}: {name}: {error}") from error
        if found["role"] == ASSISTANT:
            return found
    raise InputError(f"{row.where}: {name} is {shown(answer)}; make it text, or one message of the assistant")


def _is_empty(answer: Message) -> bool:
    return not answer["content"].strip() and CALLS not in answer


def _refuse_losses(row: Row, messages: Any) -> None:
    """Raises InputError where a message says that it is not learnt from, which only supervised training heeds."""
    for message in messages if isinstance(messages, list) else ():
        found = [key for key in LOSSES if isinstance(message, Mapping) and message.get(key) is not None]
        if found and message.get("role") == ASSISTANT and not message[found[0]]:
            raise InputError(
                f"{row.where} has an answer with {found[0]}, but an answer is judged as a whole: take {found[0]} out"
            )


# --- tokens ----------------------------------------------------------------------------------------------------------


def _sequences(
    row: Row, prompt: Any, answers: list[Message], tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> list[Sequence]:
    """Every answer, through its end of sequence, behind the tokens of the same prompt."""
    tools = row_tools(row)
    try:
        messages = as_messages(prompt, data.system_prompt)
        if uses_chat_template(tokenizer, data.chat_template):
            check_written(tokenizer, [*messages, *answers], tools)
            prompt_ids = encode(tokenizer, apply_template(tokenizer, messages, add_generation_prompt=True, tools=tools))
            found = [_templated(tokenizer, messages, answer, tools) for answer in answers]
        else:
            _, prompt_ids = render_prompt(tokenizer, messages, data.chat_template)
            found = [_plain(tokenizer, messages, answer, tools) for answer in answers]
    except InputError as error:
        raise InputError(str(error) if row.where in str(error) else f"{row.where}: {error}") from error
    # Position t predicts token t + 1, so the mask of the tokens moves one to the left.
    mask = [torch.cat([torch.zeros(len(prompt_ids) - 1), torch.ones(len(ids))]) for ids in found]
    return [Sequence(torch.tensor([*prompt_ids, *ids]), m) for ids, m in zip(found, mask, strict=True)]


def _plain(tokenizer: PreTrainedTokenizerBase, messages: list[Message], answer: Message, tools: Tools) -> list[int]:
    if tools or any(CALLS in message or message["role"] == TOOL for message in [*messages, answer]):
        raise InputError("tools and their calls need a chat template; choose another tokenizer, or leave the row out")
    return [*encode(tokenizer, answer["content"]), int(tokenizer.eos_token_id)]


def _templated(tokenizer: PreTrainedTokenizerBase, messages: list[Message], answer: Message, tools: Tools) -> list[int]:
    context = apply_template(tokenizer, messages, add_generation_prompt=True, tools=tools)
    through = apply_template(tokenizer, [*messages, answer], add_generation_prompt=False, tools=tools)
    if not through.startswith(context):
        raise InputError(f"the tokenizer's chat template rewrites the prompt once an answer follows it; {REMEDY}")
    segments = response_segments(tokenizer, response_after(tokenizer, context, through))
    return [token for ids, _ in segments for token in ids]


def _mismatched(answers: list[Sequence], limit: int, key: str) -> list[Sequence]:
    """For every answer its prompt before the answer of the next one, in a ring, that has another prompt."""
    starts = [num_prompt_tokens(answer) for answer in answers]
    prompts = [answer.token_ids[:start] for answer, start in zip(answers, starts, strict=True)]
    found: list[Sequence] = [answers[0]] * len(answers)
    other = None  # a place behind the present one, within two turns of the ring, that has another prompt
    for place in reversed(range(2 * len(answers))):
        here, behind = place % len(answers), (place + 1) % len(answers)
        if not torch.equal(prompts[here], prompts[behind]):
            other = behind
        if other is None or place >= len(answers):
            continue
        ids = torch.cat([prompts[here], answers[other].token_ids[starts[other] :]])[:limit]
        mask = torch.cat([torch.zeros(starts[here] - 1), torch.ones(len(ids) - starts[here])])
        found[here] = Sequence(ids, mask)
    if other is None:
        raise InputError(f"{key}: all rows have the same prompt, and KTO compares with answers to others; add some")
    return found
