"""vLLM's parsers of tool calls, without its server: which there are, before vLLM is imported, and one as a function."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mega_rl.environments.tools import Parsed, Parser, ToolCall
from mega_rl.errors import InputError

TABLE = "_TOOL_PARSERS_TO_REGISTER"  # of vLLM's module, which it makes its list of names from
# What marks the begin of a call, by whatever name a parser has it.
MARKS = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "tool_call_prefix")


@cache
def parser_names() -> tuple[str, ...]:
    """The parsers of the installed vLLM, read from its source: an import takes many seconds. Empty: not found."""
    found = importlib.util.find_spec("vllm")
    for place in found.submodule_search_locations or () if found else ():
        file = Path(place, "tool_parsers", "__init__.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.is_file() else ():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                if names == [TABLE]:
                    return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return ()


def check_parser(name: str) -> None:
    """Raises InputError: the installed vLLM has no such parser."""
    names = parser_names()
    if names and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(f"tool_parser {name!r} is none of vLLM's{meant}; choose from {', '.join(sorted(names))}")


def tool_parser(name: str, tokenizer: Any) -> Parser:
    """A parser of turns. Imports vLLM.

    Args:
        tokenizer: the model's; some parsers refuse one without their marks.

    Raises:
        InputError: there is no such parser, or it does not fit the tokenizer.
    """
    check_parser(name)
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except ImportError as error:
        raise InputError(f"tool_parser {name!r} needs a package that is not here ({error}); install it") from error
    except Exception as error:  # of several kinds, by parser
        raise InputError(
            f"tool_parser {name!r} does not fit this tokenizer ({error}); choose the one that belongs to the model"
        ) from error
    marks = [mark for mark in (getattr(parser, name, None) for name in MARKS) if isinstance(mark, str) and mark]
    request = SimpleNamespace(tools=None, tool_choice="auto", skip_special_tokens=False)

    def parse(text: str) -> Parsed:
        found = parser.extract_tool_calls(text, request)
        calls = [ToolCall(call.function.name, call.function.arguments) for call in found.tool_calls]
        is_malformed = not calls and any(mark in text for mark in marks)
        return Parsed(text if is_malformed else found.content or "", calls, is_malformed)

    return parse
