"""Tools that the model calls, and whatever they do instead of answering."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mega_rl.data.sets.retool import TOOL
from mega_rl.environments.built_in.functions import calculate, local_search
from mega_rl.environments.built_in.python import PythonSandbox
from mega_rl.environments.called import CalledFunction
from mega_rl.environments.choice import tool
from mega_rl.environments.protocol import End, Reply, ToolResult, Turn
from mega_rl.environments.tools import MAX_CALLS, Parsed, ToolCall, ToolEnvironment, schema
from mega_rl.errors import InputError
from mega_rl.rewards.sandbox import sandbox
from mega_rl.types import Prompt

PROMPT = Prompt(0, (1,), "?", "", "test")
HAS_NAMESPACES = sandbox.has_namespaces()
TOOLS = '''
import os, signal, sys, time
from mega_rl.environments.protocol import ToolResult
def answer(text: str):
    """Repeat a text.

    Args:
        text: what is repeated.
    """
    print("noise on standard output")
    return text
def misbehave(how: str):
    """Do not answer.

    Args:
        how: the way.
    """
    match how:
        case "raise": raise ValueError("no luck")
        case "exit": sys.exit(4)
        case "die": os._exit(3)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "hang": time.sleep(600)
        case "flood": return "x" * (1 << 25)
        case "print": sys.stdout.write("x" * (1 << 25))
        case "memory": return str(len(bytearray(1 << 33)))
        case "binary": return bytes(range(256))
        case "numbers": return {"a": [1, 2.5, None]}
        case "told": return ToolResult("told that it failed", True)
        case "fine": return ToolResult("error: is printed by a program that works")
        case "environment": return os.environ.get("GIVEN", "")
    return None
'''


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import importlib
    import sys

    name = f"tools_{tmp_path.name}".replace("-", "_")
    Path(tmp_path, f"{name}.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GIVEN", "kept")
    yield importlib.import_module(name)
    sandbox.close_zygotes()
    del sys.modules[name]


def lines(text: str) -> Parsed:
    """A call on each line: NAME JSON."""
    if text == "malformed":
        return Parsed(text, [], is_malformed=True)
    calls = [
        line.split(" ", 1) for line in text.splitlines() if line.startswith(("answer", "mis", "no", "async", "add"))
    ]
    return Parsed("", [ToolCall(name, arguments) for name, arguments in calls])


def contents(environment: ToolEnvironment, text: str) -> tuple[list[str], Mapping[str, float]]:
    reply = asyncio.run(environment.step(Turn(text)))
    assert isinstance(reply, Reply)
    assert all(message["role"] == "tool" for message in reply.messages)
    return [message["content"] for message in reply.messages], reply.metrics


def test_whatever_a_tool_does_is_a_reply(tools: Any) -> None:
    functions = [tools.answer, tools.misbehave]
    environment = ToolEnvironment(PROMPT, 0, functions=functions, parse=lines, timeout_s=20.0)
    ways = (
        "raise",
        "exit",
        "die",
        "kill",
        "flood",
        "print",
        "memory",
        "binary",
        "numbers",
        "environment",
        "told",
        "fine",
    )
    calls = [f"misbehave {json.dumps({'how': way})}" for way in ways]
    texts, metrics = contents(environment, "\n".join([*calls, 'answer {"text": "last"}', "none {}", "answer [1]"]))
    found = dict(zip(ways, texts, strict=False))
    assert found["raise"] == "error: ValueError: no luck" and found["exit"] == "error: SystemExit: 4"
    assert found["die"].endswith("exit status 3") and found["kill"].endswith("exit status -9")
    assert "exit status" in found["flood"] or found["flood"].startswith("error: ")
    assert found["print"] == "null" and found["memory"] == "error: MemoryError: "
    assert found["binary"].startswith("\0\1\2") and found["numbers"] == '{"a": [1, 2.5, null]}'
    assert found["environment"] == "kept"
    assert texts[len(ways) :] == [
        "last",
        "error: there is no tool 'none'; there are answer, misbehave",
        "error: the arguments are not a JSON object",
    ]
    assert (found["told"], found["fine"]) == ("told that it failed", "error: is printed by a program that works")
    assert metrics["tool_calls"] == 15 and metrics["tool_errors"] == 9


def test_a_tool_that_hangs_is_ended(tools: Any) -> None:
    call = CalledFunction(tools.misbehave, 0.5, 1 << 32)
    assert call({"how": "hang"}) == ToolResult("error: misbehave gave nothing within 0.5 s", has_failed=True)


def test_turns_without_calls_end_and_malformed_ones_do_not(tools: Any) -> None:
    environment = ToolEnvironment(PROMPT, 0, functions=[tools.answer], parse=lines)
    assert asyncio.run(environment.step(Turn("done"))) == End()
    assert "cannot be read or is cut off" in contents(environment, "malformed")[0][0]
    many, metrics = contents(environment, "\n".join(["none {}"] * (MAX_CALLS + 2)))
    assert many[-1] == f"error: at most {MAX_CALLS} calls are answered in one turn" and len(many) == MAX_CALLS + 2
    assert metrics["tool_errors"] == MAX_CALLS + 2


async def async_tool(text: str) -> str:
    """Wait a while.

    Args:
        text: what comes back.
    """
    await asyncio.sleep(600 if text == "hang" else 0)
    return text


def test_async_tools_and_methods_keep_the_order_of_the_calls() -> None:
    class Account:
        total = 0

        def add(self, number: int) -> int:
            """Add to the account.

            Args:
                number: how much.
            """
            self.total += number
            return self.total

    functions: list[Callable[..., Any]] = [Account().add, async_tool]
    made = ToolEnvironment(PROMPT, 0, functions=functions, parse=lines, is_in_process=True, timeout_s=120.0)
    texts, _ = contents(made, 'async_tool {"text": "a"}\nadd {"number": 2}\nasync_tool {"text": "b"}\nadd {"other": 1}')
    assert texts[:3] == ["a", "2", "b"] and "TypeError" in texts[3]
    assert [tool["function"]["name"] for tool in made.tools] == ["add", "async_tool"]
    assert made.tools[0]["function"]["parameters"]["properties"]["number"]["type"] == "integer"


def test_an_async_tool_that_hangs_is_cancelled() -> None:
    made = ToolEnvironment(PROMPT, 0, functions=[async_tool], parse=lines, timeout_s=0.1)
    assert contents(made, 'async_tool {"text": "hang"}')[0] == ["error: async_tool gave nothing within 0.1 s"]


def test_tools_that_cannot_be_used_are_refused() -> None:
    def plain(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return x

    for functions, in_process, sentence in (
        ([plain], True, "the tool plain cannot be described to a model"),
        ([calculate, calculate], True, "two tools are called 'calculate'"),
        ([plain], False, "the tool plain cannot be imported by another process"),
    ):
        with pytest.raises(InputError, match=sentence):
            ToolEnvironment(PROMPT, 0, functions=functions, parse=lines, is_in_process=in_process)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4)", "14"),
        ("-2 ** 2 / 8", "-0.5"),
        ("round(sqrt(2) * 1000) // 1", "1414"),
        ("max(1, 2, pi)", "3.141592653589793"),
        ("1 / 0", "error: division by zero"),
        ("__import__('os')", "error: __import__('os') is not arithmetic"),
        ("9 ** 9 ** 9 ** 9", "error: the power is too large"),
        ("x", "error: x is not arithmetic"),
        ("1" * 2000, "error: the expression has more than 1000 characters"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_the_search(tmp_path: Path) -> None:
    path = Path(tmp_path, "texts.jsonl")
    rows = ["The cat sat on the mat.", "A dog is no cat; a dog barks.", "The sun is a star."]
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    search = local_search(str(path), num_results=2)
    assert search("dog").splitlines() == [f"[1] {rows[1]}"]
    assert search("the cat").splitlines()[0] == f"[0] {rows[0]}"
    assert search("quantum") == "nothing found"
    with pytest.raises(InputError, match="cannot be read"):
        local_search(str(Path(tmp_path, "missing.txt")))


@pytest.mark.skipif(not HAS_NAMESPACES and os.geteuid() == 0, reason="no program is run here")
def test_a_python_interpreter_as_retool_has_it() -> None:
    options: dict[str, Any] = {"timeout_s": 30.0, "isolation": "namespaces" if HAS_NAMESPACES else "limits"}

    def answer(text: str, **more: Any) -> Any:
        return PythonSandbox(PROMPT, 0, **options | more).step(Turn(text))

    assert answer("The answer is 3.") == End() and answer("```python\nprint(1)") == End()
    reply = answer("First\n```python\nprint(1)\n```\nthen\n```python\nprint(6 * 7)\n```\n")
    assert reply.messages == [{"role": "tool", "content": "42"}] and reply.metrics["tool_errors"] == 0
    reply = answer("<code>\n```python\n1 / 0\n```\n</code>", form="code", role="user")
    assert reply.messages[0]["role"] == "user" and reply.metrics["tool_errors"] == 1
    text = reply.messages[0]["content"]
    assert text.startswith("<interpreter>\nTraceback") and text.endswith("division by zero\n</interpreter>")
    assert answer("<code>pass</code>", form="code").messages[0]["content"] == "(no output)"
    slow = answer("```python\nprint(1, flush=True)\nwhile True: pass\n```", timeout_s=0.5)
    assert slow.messages[0]["content"].endswith("error: the program did not end within 0.5 s")
    with pytest.raises(InputError, match="python_sandbox: form 'x'"):
        answer("", form="x")
    called = tool({"name": "code_interpreter", "options": options})
    assert called(code="print(6 * 7)") == ToolResult("42")
    text = called(code="1 / 0").text
    assert text.startswith("Traceback") and text.endswith("division by zero")


@pytest.mark.parametrize(
    ("run", "text", "num_errors"),
    [
        (sandbox.ProgramRun(1, "Traceback\nZeroDivisionError\n"), "Traceback\nZeroDivisionError", 1),
        (sandbox.ProgramRun(0, "error: 3\n"), "error: 3", 0),
    ],
)
def test_calls_of_the_interpreter_count_as_errors_by_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, run: sandbox.ProgramRun, text: str, num_errors: int
) -> None:
    monkeypatch.setattr("mega_rl.environments.built_in.python.run_program", lambda *_, **__: run)
    parsed = Parsed("", [ToolCall("code_interpreter", json.dumps({"code": "1 / 0"}))])
    made = ToolEnvironment(
        PROMPT, 0, functions=[tool("code_interpreter")], parse=lambda _: parsed, is_in_process=True, timeout_s=120.0
    )
    texts, metrics = contents(made, "")
    assert texts == [text] and metrics["tool_errors"] == metrics["tool_errors/code_interpreter"] == num_errors


def test_the_interpreter_is_offered_as_retools_data_offers_it() -> None:
    """A model that learnt to call it there finds the same words in its prompts here."""
    for name in ("code_interpreter", "mega_rl.environments.built_in.python:code_interpreter"):
        assert schema(tool(name)) == TOOL
    with pytest.raises(InputError, match="code_interpreter: there is no option keep"):
        tool({"name": "code_interpreter", "options": {"keep": "state"}})
    with pytest.raises(InputError, match="local_search does not take these options"):
        tool("local_search")


def test_a_session_that_is_made_after_the_end_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Late:
        def __init__(self, *_: Any) -> None:
            environment.close()  # as an episode does that ends while the session is made

        def close(self) -> None:
            done.append("closed")

        def run(self, *_: Any, **__: Any) -> None:
            done.append("run")

    monkeypatch.setattr("mega_rl.environments.built_in.python.SandboxSession", Late)
    environment = PythonSandbox(PROMPT, 0, keep="files")
    reply = environment.step(Turn("```python\nprint(1)\n```"))
    assert done == ["closed"] and isinstance(reply, Reply)
    assert reply.messages[0]["content"].startswith("error: the episode is over")


@pytest.mark.skipif(not HAS_NAMESPACES and os.geteuid() == 0, reason="no program is run here")
@pytest.mark.parametrize(
    ("keep", "found"),
    [("nothing", ["no file", "no name"]), ("files", ["a file", "no name"]), ("state", ["a file", "a name"])],
)
def test_what_an_interpreter_keeps(keep: Any, found: list[str]) -> None:
    isolation: Any = "namespaces" if HAS_NAMESPACES else "limits"
    environment = PythonSandbox(PROMPT, 0, timeout_s=60.0, isolation=isolation, keep=keep)
    look = "import os\nprint('a file' if os.path.exists('x') else 'no file')\n"
    look += "print('a name' if 'y' in globals() else 'no name')"
    for program in ("open('x', 'w').close(); y = 1", look):
        reply = environment.step(Turn(f"```python\n{program}\n```"))
        assert isinstance(reply, Reply)
    environment.close()
    assert reply.messages[0]["content"].split("\n") == found
    with pytest.raises(InputError, match="a service keeps nothing"):
        PythonSandbox(PROMPT, 0, service="http://127.0.0.1:1", keep="files")
