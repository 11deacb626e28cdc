"""Tokens between two turns of the model: what closes a turn, the replies to it, and the next generation prompt.

A conversation goes on in tokens. What the model sampled is never decoded and encoded again; what is appended to it are
the tokens that the chat template itself would write there. The template is asked with a conversation of its own, whose
turn of the assistant is a word that stands nowhere else: what follows that word is what follows any turn.

A template that changes earlier turns once a message follows them (thoughts left out, tools written before the last
message of the user) has no such tokens: its own rendering is not what the model has read and written. It is refused,
unless the history is to be kept as it was written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal

from transformers import PreTrainedTokenizerBase

from mega_rl.data.rows.messages import ASSISTANT, CALLS, TOOL, Message, as_messages
from mega_rl.data.tokens.template import CALL_ID, Tools, apply_template, probe_answer, probe_call
from mega_rl.data.tokens.tokenizer import encode
from mega_rl.errors import InputError

History = Literal["refuse", "keep"]
MARK = "probeturn"
LAST_MARK = f"{MARK}end"  # the argument of the last call of a turn
UNNAMED = "probeunnamed"  # the tool of an answer that does not say whose it is
THOUGHT = f"<think>\nprobe thought\n</think>\n\n{MARK}"  # as models write it that think
ASKED: Message = {"role": "user", "content": "probe question"}
LED: Message = {"role": "system", "content": "probe system"}
TAKES_NO = "takes no"
REMEDY = "take a template that only appends, or keep the history as it was written"


class ReplyTokens:
    """Makes the token ids of replies.

    Args:
        tokenizer: with a chat template.
        tools: that the conversations offer, as JSON schemas.
        roles: of messages that may begin a reply; the template is tried with each of them here.
        ends: token ids that end a sampled turn, besides the end-of-sequence token (those of generation_config.json).
        history: keep: what was written stays, also where the template would change it later; refuse: such a template
            is refused.

    Raises:
        InputError: the template refuses one of the roles, ends no turn with one of ``ends``, or changes earlier turns.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Tools = (),
        roles: Collection[str] = (),
        ends: Collection[int] = (),
        history: History = "refuse",
    ) -> None:
        self._tokenizer, self._tools, self._history = tokenizer, tools, history
        self.ends = frozenset({int(tokenizer.eos_token_id), *ends})
        self._end_texts = [str(tokenizer.convert_ids_to_tokens(end)) for end in sorted(self.ends)]
        self._has_calls: dict[str, bool] = {}  # role -> whether only a turn with tool calls may come before it
        for role in roles:
            self._try(role)

    def __call__(self, sampled_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The token ids that stand between a turn and the next one.

        Args:
            sampled_ids: of the turn, through its end token if it has one. The end of a turn that was cut, or that ended
                with another token than the template's, is among the ids that are returned.
            messages: the replies, in their order.

        Raises:
            InputError: messages that the template refuses.
        """
        ids = encode(self._tokenizer, self.text(messages))
        has_end = bool(sampled_ids) and sampled_ids[-1] in self.ends and ids[:1] == [sampled_ids[-1]]
        return ids[1:] if has_end else ids

    def text(self, messages: Sequence[Message]) -> str:
        """The same as text, with the end of the turn before the replies."""
        messages = as_messages(list(messages), None) if messages else []
        role = messages[0]["role"] if messages else "user"
        if role not in self._has_calls:
            self._try(role)
        return self._after_turn(messages, self._has_calls[role])

    def opening(self, text: str, messages: Sequence[Message]) -> str:
        """The text of a prompt with further messages at its end: before the generation prompt, which closes both.

        Raises:
            InputError: messages that the template refuses, or the prompt does not end as its prompts do.
        """
        asked, whole = ([ASKED], [ASKED, *as_messages(list(messages), None)])
        closed = apply_template(self._tokenizer, asked, add_generation_prompt=False, tools=self._tools)
        ready = apply_template(self._tokenizer, asked, add_generation_prompt=True, tools=self._tools)
        longer = apply_template(self._tokenizer, whole, add_generation_prompt=True, tools=self._tools)
        begin = ready.removeprefix(closed)
        if not text.endswith(begin) or not ready.startswith(closed) or not longer.startswith(closed):
            raise InputError("the chat template cannot append messages to a prompt: let start() return none")
        return text.removesuffix(begin) + longer.removeprefix(closed)

    def _try(self, role: str) -> None:
        """Raises InputError unless the template can answer a turn with a message of this role."""
        problem = ""
        for has_calls in (False, True) if role == TOOL else (False,):
            found = self._problem(role, has_calls)
            if not found:
                self._has_calls[role] = has_calls
                return
            problem = found if not problem or problem.startswith(TAKES_NO) else problem
        name = self._tokenizer.name_or_path
        raise InputError(f"the chat template of {name or 'the tokenizer'} {problem}")

    def _problem(self, role: str, has_calls: bool) -> str:
        """Why the template cannot append a reply of this role; completes "the chat template ..."."""
        said = [MARK] if has_calls else [MARK, THOUGHT]
        try:
            answer = {**probe_answer("probe answer"), "role": role} if role == TOOL else {**ASKED, "role": role}
            first = encode(self._tokenizer, self._after_turn([answer], has_calls))[:1]
            if not first or first[0] not in self.ends:
                ends = ", ".join(self._end_texts)
                return f"ends no turn with {ends}: make the token that ends a turn the end-of-sequence token"
            if self._history == "keep" or all(self._appends(answer, has_calls, text) for text in said):
                return ""
        except InputError as error:
            return f"{TAKES_NO} message of {role} after a turn: {error}"
        return f"is not append-only: after a message of {role} it writes earlier turns in other tokens; {REMEDY}"

    def _appends(self, answer: Message, has_calls: bool, said: str) -> bool:
        """Whether two turns and their replies, put together token by token, are the tokens of the template's whole."""
        leading = [LED, ASKED]
        try:
            context = apply_template(self._tokenizer, leading, add_generation_prompt=True, tools=self._tools)
        except InputError:  # it takes no message of the system
            leading = [ASKED]
            context = apply_template(self._tokenizer, leading, add_generation_prompt=True, tools=self._tools)
        turn = _turn(has_calls, said, [answer])
        through = apply_template(self._tokenizer, [*leading, turn], add_generation_prompt=False, tools=self._tools)
        whole = apply_template(
            self._tokenizer, [*leading, turn, answer, turn, answer], add_generation_prompt=True, tools=self._tools
        )
        # A turn as the template writes it at the end of a conversation, or what the message says and nothing else.
        turns = [] if has_calls else [said]
        if through.startswith(context):
            turns.append(through[len(context) : self._end(through, has_calls)])
        turns = [text for text in turns if said == MARK or THOUGHT in text]  # a thought that is left out was sampled
        between, ids = self._after_turn([answer], has_calls), partial(encode, self._tokenizer)
        return any(ids(context) + 2 * (ids(text) + ids(between)) == ids(whole) for text in turns)

    def _after_turn(self, messages: Sequence[Message], has_calls: bool) -> str:
        """What follows a turn, from its end token on."""
        turn = _turn(has_calls, MARK, [message for message in messages if message["role"] == TOOL])
        text = apply_template(self._tokenizer, [ASKED, turn, *messages], add_generation_prompt=True, tools=self._tools)
        after = text[self._end(text, has_calls) :]
        if UNNAMED in after:
            raise InputError("the chat template writes which tool answers: give messages of tools a name")
        if MARK in after:
            raise InputError("it repeats what the assistant said")
        return after

    def _end(self, text: str, has_calls: bool) -> int:
        """Where the end of the first turn stands; where nothing ends it, the end of its mark."""
        mark = LAST_MARK if has_calls else MARK
        start = text.find(mark)
        if start < 0:
            raise InputError("it leaves out what the assistant said")
        places = [place for place in (text.find(end, start) for end in self._end_texts) if place >= 0]
        return min(places, default=start + len(mark))


def _turn(has_calls: bool, said: str, answers: Sequence[Message]) -> Message:
    """A turn that says the mark, or that makes the calls which the answers belong to, with the mark in the last one."""
    if not has_calls:
        return {"role": ASSISTANT, "content": said}
    marks = [*(MARK for _ in answers[1:]), LAST_MARK]
    calls = [
        call
        for answer, mark in zip(answers or [{}], marks, strict=True)
        for call in probe_call("", mark, answer.get("name", UNNAMED), answer.get("tool_call_id", CALL_ID))[CALLS]
    ]
    return {"role": ASSISTANT, "content": "", CALLS: calls}
