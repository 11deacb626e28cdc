"""vLLM's parsers of tool calls, without its server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from mega_rl.environments.tools import Parsed, ToolCall
from mega_rl.errors import InputError
from mega_rl.rollout.vllm import tool_parsers
from tests.recorded.observed_run import bytes_tokenizer

pytestmark = pytest.mark.skipif(not tool_parsers.parser_names(), reason="no vLLM here")
ONE = 'I compute.\n<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
TWO = (
    '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b", "arguments": {"x": 1}}</tool_call>'
)


def test_an_unknown_name_is_refused_before_vllm_is_imported() -> None:
    assert "hermes" in tool_parsers.parser_names() and len(tool_parsers.parser_names()) > 20
    with pytest.raises(InputError, match=r"tool_parser 'hermess' is none of vLLM's \(did you mean hermes\?\)"):
        tool_parsers.tool_parser("hermess", SimpleNamespace())


@pytest.mark.slow
def test_calls_are_found_and_malformed_ones_are_seen() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_tokenizer(), eos_token="</s>")
    parse = tool_parsers.tool_parser("hermes", tokenizer)
    assert parse(ONE) == Parsed("I compute.\n", [ToolCall("python", '{"code": "print(1)"}')])
    assert parse(TWO).calls == [ToolCall("a", "{}"), ToolCall("b", '{"x": 1}')]
    for cut in ('<tool_call>{"name": "python", "arguments": {"code": }}</tool_call>', '<tool_call>{"name": "py'):
        assert parse(cut) == Parsed(cut, [], is_malformed=True)
    assert parse("The answer is 3.") == Parsed("The answer is 3.", [])
    with pytest.raises(InputError, match="'deepseek_v3' does not fit this tokenizer"):
        tool_parsers.tool_parser("deepseek_v3", tokenizer)
