"""Reply tokens are the template's own of the whole conversation, or the template is refused by name."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from mega_rl.data.rows.messages import Message
from mega_rl.data.tokens.replies import ReplyTokens
from mega_rl.data.tokens.template import apply_template
from mega_rl.data.tokens.tokenizer import encode
from mega_rl.errors import InputError
from tests.models.chat_templates import FAMILIES, ends_of, tokenizer_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}},
        },
    }
]
THOUGHT = "<think>\nhm\n</think>\n\n"
SAID = ["It is 4.", "é² \n<x>", "let me run it:\n```python\nprint(1)\n```"]
REPLIES = ["4", "Traceback:\n  x  é", "no, <|im_end|> again\n"]
CALLED = {
    "mistral",
    "deepseek",
    "harmony",
}  # whose answers of tools follow only what the template itself writes as a call
WHO: dict[str, dict[str, str]] = {  # family -> role of the reply -> part of the sentence that refuses; "" if it can
    "chatml": {"tool": "", "user": ""},
    "qwen2.5": {"tool": "", "user": ""},
    "qwen3": {"tool": "", "user": "is not append-only: after a message of user"},
    "llama3": {"tool": "", "user": ""},
    "mistral": {"tool": "", "user": "is not append-only: after a message of user"},
    "gemma": {"tool": "takes no message of tool after a turn: .*roles take turns", "user": ""},
    "phi": {"tool": "", "user": ""},
    "deepseek": {"tool": "", "user": "is not append-only: after a message of user"},
    "glm": {"tool": "", "user": ""},
    "granite": {"tool": "", "user": ""},
    "harmony": {"tool": ""},
    "vicuna": {"user": "is not append-only: after a message of user"},  # "ASSISTANT: " and a word are one token less
}
CASES = [(name, role) for name, roles in WHO.items() for role, refusal in roles.items() if not refusal]
REFUSALS = [(name, role, refusal) for name, roles in WHO.items() for role, refusal in roles.items() if refusal]


def tools_of(name: str) -> list[dict[str, Any]]:
    return TOOLS if name in ("qwen2.5", "qwen3", "llama3", "mistral", "glm", "granite") else []


def reply(role: str, content: str) -> Message:
    return {"role": role, "content": content} | ({"tool_call_id": "abcdefghi", "name": "add"} if role == "tool" else {})


def turn(name: str, role: str, said: str) -> Message:
    if role == "tool" and name in CALLED:
        function = {"name": "add", "arguments": {"a": len(said)}}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "function": function}]}
    thought = THOUGHT if name == "qwen3" else ""
    return {"role": "assistant", "content": thought + said}


def sampled_of(name: str, conversation: list[Message], made: Message) -> str:
    """What a model samples that says ``made`` and ends: the template's text of it, through the token that ends it."""
    tokenizer, tools = tokenizer_of(name), tools_of(name)
    if "tool_calls" not in made:
        return made["content"]
    context = apply_template(tokenizer, conversation, True, tools)
    through = apply_template(tokenizer, [*conversation, made], False, tools)
    assert through.startswith(context)
    body = through[len(context) :].removesuffix(tokenizer.eos_token)
    for end in FAMILIES[name].ends:
        body = body.removesuffix(end)
    return body


def test_there_are_ten_families() -> None:
    assert len(WHO) >= 10 and set(WHO) == set(FAMILIES)


@pytest.mark.parametrize(("name", "role"), CASES)
@pytest.mark.parametrize("has_system", [False, True])
def test_three_turns_are_the_tokens_of_the_whole_conversation(name: str, role: str, has_system: bool) -> None:
    tokenizer, tools = tokenizer_of(name), tools_of(name)
    conversation: list[Message] = [{"role": "user", "content": "2 + 2?"}]
    if has_system and name != "gemma":
        conversation.insert(0, {"role": "system", "content": "Be brief."})
    replies = ReplyTokens(tokenizer, tools, [role], ends_of(name))
    ids = encode(tokenizer, apply_template(tokenizer, conversation, True, tools))
    is_cut = itertools.cycle([False, True])
    for said, answer in zip(SAID, REPLIES, strict=True):
        made = turn(name, role, said)
        messages = [reply(role, answer)]
        if name == "gemma" or name == "llama3":
            made["content"], messages[0]["content"] = made["content"].strip(), messages[0]["content"].strip()
        text = replies.text(messages)
        end = encode(tokenizer, text)[:1]
        assert end[0] in {tokenizer.eos_token_id, *ends_of(name)}
        sampled = encode(tokenizer, sampled_of(name, conversation, made)) + ([] if next(is_cut) else end)
        ids += sampled + replies(sampled, messages)
        conversation += [made, *messages]
        assert ids == encode(tokenizer, apply_template(tokenizer, conversation, True, tools)), tokenizer.decode(ids)


@pytest.mark.parametrize(("name", "role", "words"), REFUSALS)
def test_other_templates_are_refused_by_name(name: str, role: str, words: str) -> None:
    with pytest.raises(InputError, match=f"^the chat template of {name} {words}"):
        ReplyTokens(tokenizer_of(name), tools_of(name), [role], ends_of(name))


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_what_was_written_can_be_kept(name: str) -> None:
    """The history stays, thoughts and all; what is appended is what the template writes after any turn."""
    tokenizer = tokenizer_of(name)
    replies = ReplyTokens(tokenizer, tools_of(name), ["user"], history="keep")
    ids = replies([5, tokenizer.eos_token_id], [reply("user", "Sure?")])
    plain = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}, reply("user", "Sure?")]
    whole = encode(tokenizer, apply_template(tokenizer, plain, True, tools_of(name)))
    assert whole[-len(ids) :] == ids and whole[-len(ids) - 1] == tokenizer.eos_token_id
    assert replies([5], [reply("user", "Sure?")]) == [tokenizer.eos_token_id, *ids], "the end of a turn that was cut"


def test_a_turn_that_ends_with_another_token_gets_the_template_s_too() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    replies = ReplyTokens(tokenizer, roles=["tool"], ends=ends_of("qwen2.5"))
    messages = [reply("tool", "4")]
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert replies([5, other], messages) == [tokenizer.eos_token_id, *replies([5, tokenizer.eos_token_id], messages)]
    assert tokenizer.decode(replies([5, tokenizer.eos_token_id], messages)).startswith("\n<|im_start|>user"), (
        "line feed"
    )
    assert replies([], messages) == replies([5], messages)


def test_several_answers_and_several_roles() -> None:
    tokenizer = tokenizer_of("mistral")
    answers = [{"role": "tool", "content": c, "tool_call_id": f"callnr{c}{c}{c}"} for c in "12"]
    text = ReplyTokens(tokenizer, roles=["tool"]).text(answers)
    assert text == "</s>" + "".join(
        f'[TOOL_RESULTS]{{"content": "{c}", "id": "callnr{c}{c}{c}"}}[/TOOL_RESULTS]' for c in "12"
    )
    tokenizer = tokenizer_of("qwen2.5")
    both = ReplyTokens(tokenizer, roles=["tool"]).text([reply("tool", "4"), reply("user", "and?")])
    assert both.endswith("</tool_response><|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_that_says_whose_it_is() -> None:
    """Where only the call says so, and the call was sampled, the message has to."""
    replies = ReplyTokens(tokenizer_of("harmony"), roles=["tool"], ends=ends_of("harmony"))
    assert replies.text([reply("tool", "4")]) == "<|call|><|start|>add<|message|>4<|end|><|start|>assistant"
    with pytest.raises(InputError, match="writes which tool answers: give messages of tools a name"):
        replies([1], [{"role": "tool", "content": "4"}])


def test_templates_without_an_end_of_their_turns_are_refused() -> None:
    with pytest.raises(InputError, match="^the chat template of gemma ends no turn with <eos>: make the token"):
        ReplyTokens(tokenizer_of("gemma"), roles=["user"])
    with pytest.raises(InputError, match=r"^the chat template of glm ends no turn with <\|eot\|>"):
        ReplyTokens(tokenizer_of("glm"), roles=["tool"])
    with pytest.raises(InputError, match="takes no message of wizard after a turn"):
        tokenizer = tokenizer_of("gemma")
        ReplyTokens(tokenizer, roles=["user"], ends=ends_of("gemma"))([1], [reply("wizard", "x")])


def test_a_template_that_writes_nothing_after_a_turn_is_refused() -> None:
    tokenizer = copy.copy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = "{% for m in messages[:2] %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match="^the chat template of qwen2.5 ends no turn with <.im_end.>: make the token"):
        ReplyTokens(tokenizer, roles=["user"], history="keep")
