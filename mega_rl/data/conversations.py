"""Supervised data: conversations as training sequences whose loss is only on the responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.fitting import RowKind, fitting
from mega_rl.data.pictures.pictures import FilePicture, PictureReader
from mega_rl.data.rows.columns import LOSSES, messages_of, prompt_of, response_of, row_tools
from mega_rl.data.rows.messages import ASSISTANT, CALLS, TOOL, Message, as_messages, texts_of
from mega_rl.data.rows.rows import DataFiles, Row
from mega_rl.data.stream import fingerprint
from mega_rl.data.tokens.replies import ReplyTokens
from mega_rl.data.tokens.template import Tools, apply_template, check_written, uses_chat_template
from mega_rl.data.tokens.tokenizer import encode, render_prompt
from mega_rl.errors import InputError, shown
from mega_rl.microbatch import Images, Sequence
from mega_rl.models.positions import Placed, image_positions, picture_places
from mega_rl.parallel.collectives import together

WANTED = "`messages`, or `prompt`, `question` or `instruction` with `response`, `answer` or `output`"

Segment = tuple[list[int], bool]  # token ids, and whether they are learnt from
REMEDY = "correct the template, or set data.chat_template to never"


class ConversationDataset:
    """Training sequences in the order of their files.

    A row is ``{"messages": [...]}`` that ends with the assistant, or ``{"prompt": ..., "response": ...}`` where the
    prompt is text or messages (``answer`` stands in for ``response``). Every response ends with the end-of-sequence
    token. Prompt and response are tokenised apart, as they are when the response is sampled. A row is one sequence, or
    several with ``data.rewritten_history: split``.
    """

    def __init__(self, sequences: list[Sequence], num_dropped: int = 0, num_conversations: int | None = None) -> None:
        self.sequences = sequences
        self.num_dropped = num_dropped  # conversations longer than the limits
        self.num_conversations = len(sequences) if num_conversations is None else num_conversations  # those left
        parts = [tensor.numpy().tobytes() for item in sequences for tensor in (item.token_ids, item.loss_mask)]
        pictures = [picture.key.encode() for item in sequences if item.images for picture in item.images.pictures]
        self.fingerprint = fingerprint([*parts, *pictures])

    @classmethod
    def from_files(
        cls,
        files: DataFiles,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        pictures: PictureReader | None = None,
    ) -> ConversationDataset:
        """Reads, renders and filters by ``max_prompt_length + max_response_length`` tokens in all. Collective.

        Args:
            pictures: reads those of the rows; None: the model sees none.

        Raises:
            InputError: on every rank, unreadable files, rows without the needed fields, overlong ones if they are not
                filtered, or nothing left.
        """
        with together(f"reading {files.key}"):
            rows = files.rows()
        seen = [(row, []) for row in rows] if pictures is None else pictures.take(rows, files.key)
        of_row = {id(row): found for row, found in seen}
        kind = RowKind(
            "conversations",
            _texts,
            lambda row, tokenizer, data: _sequences(row, tokenizer, data, of_row[id(row)], pictures),
            lambda sequences: max(sequence.token_ids.numel() for sequence in sequences),
        )
        with together(f"rendering {files.key}"):
            conversations, num_dropped = fitting([row for row, _ in seen], kind, tokenizer, data, files.key)
        return cls([one for sequences in conversations for one in sequences], num_dropped, len(conversations))

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, position: int) -> Sequence:
        return self.sequences[position]


def _texts(row: Row) -> list[Any]:
    messages = messages_of(row)
    tools = list(texts_of(row.get("tools")))
    return [prompt_of(row), response_of(row), *tools] if messages is None else [messages, *tools]


def _sequences(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    pictures: list[FilePicture],
    reader: PictureReader | None,
) -> list[Sequence]:
    try:
        messages, learnt = _messages(row, data.system_prompt)
        tools = row_tools(row)
        if uses_chat_template(tokenizer, data.chat_template):
            parts = _templated_segments(tokenizer, messages, learnt, tools, data)
        else:
            parts = [_plain_segments(tokenizer, messages, learnt, tools, data)]
        learning = [segments for segments in parts if any(is_learnt for _, is_learnt in segments)]
        found = [
            _sequence(segments) if reader is None else _seeing(segments, pictures, reader) for segments in learning
        ]
        most = max((len(one.images.pictures) for one in found if one.images is not None), default=0)
        if found and most < len(pictures):
            raise InputError(
                f"the chat template writes {most} of {len(pictures)} pictures: take the model's own template, or leave "
                "the row out"
            )
    except InputError as error:
        raise InputError(str(error) if row.where in str(error) else f"{row.where}: {error}") from error
    if not found:
        raise InputError(
            f"{row.where}: nothing of the conversation is learnt from: see its {', '.join(LOSSES)} and "
            "data.mask_spans, or leave the row out"
        )
    return found


def _sequence(segments: list[Segment]) -> Sequence:
    token_ids = [token for ids, _ in segments for token in ids]
    learnt = [float(is_learnt) for ids, is_learnt in segments for _ in ids]
    # Position t predicts token t + 1, so the mask of the tokens moves one to the left.
    return Sequence(torch.tensor(token_ids), torch.tensor(learnt[1:]))


def _seeing(segments: list[Segment], pictures: list[FilePicture], reader: PictureReader) -> Sequence:
    """The same with pictures, each token of which the template wrote one becoming as many as it has."""
    made: list[Segment] = []
    placed: list[Placed] = []
    num_tokens = 0
    for ids, is_learnt in segments:
        own: list[int] = []
        for token in ids:
            if token != reader.token:
                own.append(token)
                continue
            if is_learnt or len(placed) == len(pictures):
                raise InputError(
                    "a text has the special token of a picture: take it out, and write <image> where a picture belongs"
                )
            picture = pictures[len(placed)]
            placed.append(Placed(num_tokens + len(own), *picture.grid))
            own += [token] * reader.num_tokens(picture)
        made.append((own, is_learnt))
        num_tokens += len(own)
    sequence = _sequence(made)
    if not placed:
        return sequence
    images = Images(tuple(pictures[: len(placed)]), picture_places(placed, reader.merge))
    return replace(sequence, images=images, position_ids=image_positions(num_tokens - 1, placed, reader.merge))


def _messages(row: Row, system_prompt: str | None) -> tuple[list[Message], list[bool]]:
    """The conversation, and of every message whether it is learnt from."""
    given: Any = messages_of(row)
    if given is None:
        prompt, response = prompt_of(row), response_of(row)
        if prompt is None or response is None:
            raise row.missing(WANTED)
        given = [
            *(prompt if isinstance(prompt, list) else as_messages(prompt, None)),
            {"role": ASSISTANT, "content": response},
        ]
    messages = as_messages(given, system_prompt)
    learnt = [False] * (len(messages) - len(given)) + [_is_learnt(message) for message in given]
    last = messages[-1]
    if len(messages) < 2 or last["role"] != ASSISTANT or not (last["content"] or CALLS in last):
        raise InputError("a conversation needs a prompt and ends with a non-empty message of the assistant")
    return messages, learnt


def _is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether a message of a conversation is learnt from: if it is the assistant's, unless it says no."""
    marks = {key: message[key] for key in LOSSES if message.get(key) is not None}
    for key, mark in marks.items():
        if mark not in (0, 1):
            raise InputError(f"a message has the {key} {shown(mark)}: give 0 or 1, or leave it out")
    if message["role"] != ASSISTANT:
        if marks.get("loss"):
            raise InputError(f"a message of {shown(message['role'])} has loss 1: only the assistant's are learnt from")
        return False
    if len({bool(mark) for mark in marks.values()}) > 1:
        raise InputError(f"a message has {' and '.join(marks)} that differ: leave one of them out")
    return all(marks.values())


def _plain_segments(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], learnt: list[bool], tools: Tools, data: DataConfig
) -> list[Segment]:
    if any(message["role"] == ASSISTANT for message in messages[:-1]):
        raise InputError("several assistant messages need a chat template; split the row or choose another tokenizer")
    if tools or any(CALLS in message or message["role"] == TOOL for message in messages):
        raise InputError("tools and their calls need a chat template; choose another tokenizer, or leave the row out")
    _, prompt_ids = render_prompt(tokenizer, messages[:-1], "never")
    response = response_segments(tokenizer, messages[-1]["content"], spans_of(data.mask_spans))
    return [(prompt_ids, False), *((ids, is_own and learnt[-1]) for ids, is_own in response)]


def _templated_segments(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], learnt: list[bool], tools: Tools, data: DataConfig
) -> list[list[Segment]]:
    """Context and response in turn: a response is what follows the generation prompt, through its end of sequence.

    One list, or several where the template rewrites what stands before a turn: then the turn begins a list, with all
    that the template writes before it.
    """
    check_written(tokenizer, messages, tools)
    lists: list[list[Segment]] = []
    done, before = "", -1  # the rendered text that the last list already holds, and the place of its last response
    spans = spans_of(data.mask_spans)
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        context = apply_template(tokenizer, messages[:place], add_generation_prompt=True, tools=tools)
        through = apply_template(tokenizer, messages[: place + 1], add_generation_prompt=False, tools=tools)
        if not through.startswith(context):
            raise InputError(f"the tokenizer's chat template rewrites what stands before message {place + 1}; {REMEDY}")
        if not lists or context.startswith(done):
            between = context[len(done) :]
            lists = lists or [[]]
        elif data.rewritten_history == "split":
            between, done = context, ""
            lists.append([])
        elif data.rewritten_history == "keep":
            replies = ReplyTokens(tokenizer, tools, history="keep").text(messages[before + 1 : place])
            between = replies.removeprefix(str(tokenizer.eos_token))
        else:
            raise InputError(
                f"the tokenizer's chat template rewrites what stands before message {place + 1}; set "
                "data.rewritten_history to split or keep, or split the conversation into rows of one response each"
            )
        text = response_after(tokenizer, context, through)
        response = response_segments(tokenizer, text, spans)
        lists[-1].append((encode(tokenizer, between), False))
        lists[-1] += [(ids, is_own and learnt[place]) for ids, is_own in response]
        done, before = done + between + text, place
    return lists


def response_after(tokenizer: PreTrainedTokenizerBase, context: str, through: str) -> str:
    """The response in a rendered text, through its end of sequence.

    Args:
        context: the text through the generation prompt.
        through: the same with the response behind it.
    """
    response, eos, _ = through[len(context) :].rpartition(str(tokenizer.eos_token))
    # Templates write a newline after the end of sequence: it belongs to the next context, not to the response.
    return response + eos if eos else through[len(context) :]


def spans_of(marks: list[list[str]]) -> re.Pattern[str] | None:
    """What finds ``data.mask_spans`` in a response; one that nothing closes goes on to the end."""
    each = (f"{re.escape(first)}.*?(?:{re.escape(last)}|\\Z)" for first, last in marks)
    return re.compile("|".join(each), re.DOTALL) if marks else None


def response_segments(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: re.Pattern[str] | None = None
) -> list[Segment]:
    """Token ids of a response through its end of sequence, which is added where the text has none.

    What lies in spans is not the response's own. It is tokenised apart, as it is where an interpreter writes it.
    """
    segments: list[Segment] = []
    start = 0
    for found in spans.finditer(text) if spans else ():
        segments += [(encode(tokenizer, text[start : found.start()]), True), (encode(tokenizer, found[0]), False)]
        start = found.end()
    segments.append((encode(tokenizer, text[start:]), True))
    if not text.endswith(str(tokenizer.eos_token)):
        segments.append(([int(tokenizer.eos_token_id)], True))
    return [segment for segment in segments if segment[0]]
