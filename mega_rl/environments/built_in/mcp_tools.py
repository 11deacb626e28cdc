"""Tools of an MCP server: the server describes them, a session of each episode calls them."""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

from mega_rl.environments.protocol import Message
from mega_rl.environments.tools import Parser, ToolEnvironment
from mega_rl.errors import InputError
from mega_rl.types import Prompt

Server = str | tuple[str, ...]  # an address, or a command and its arguments
# A session with a server: ``list_tools()`` and ``call_tool(name, arguments)``, both to be awaited.
Open = Callable[[Any], AbstractAsyncContextManager[Any]]
LIST_TIMEOUT_S = 120.0  # for the tools of a server, which is started for it


def open_session(server: Any) -> AbstractAsyncContextManager[Any]:
    """A session with a server. Raises InputError: there is no package mcp, or one that is too old."""
    try:
        mcp = importlib.import_module("mcp")
        client, stdio = mcp.Client, mcp.StdioServerParameters
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"an MCP server needs the package mcp, of version 2: pip install 'mcp>=2' ({error})"
        ) from error
    if isinstance(server, tuple):
        server = stdio(command=server[0], args=list(server[1:]))
    found: AbstractAsyncContextManager[Any] = client(server)
    return found


class McpTools(ToolEnvironment):
    """Answers the calls of a turn with the tools of an MCP server; a turn without a call ends the episode.

    Every episode has a session of its own; of a command also a process of its own, which ends with it.
    """

    def __init__(
        self,
        prompt: Prompt,
        sample_index: int,
        *,
        server: Server,
        parse: Parser,
        timeout_s: float = 30.0,
        open_session: Open = open_session,
    ) -> None:
        """
        Args:
            timeout_s: of one call.

        Raises:
            InputError: the server cannot be asked for its tools.
        """
        super().__init__(prompt, sample_index, functions=(), parse=parse, timeout_s=timeout_s)
        self.tools = list(schemas_of(server, open_session))
        names = [tool["function"]["name"] for tool in self.tools]
        self._functions = {name: functools.partial(self._call, name) for name in names}
        self._open: Open = open_session
        self._server = server
        self._session: asyncio.Future[Any] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def start(self) -> Sequence[Message]:
        self._session = asyncio.get_running_loop().create_future()
        self._holder = asyncio.ensure_future(self._hold(self._session))
        await self._session
        return ()

    async def close(self) -> None:
        self._closing.set()
        if self._holder is not None:
            await self._holder

    async def _hold(self, session: asyncio.Future[Any]) -> None:
        """Open and close the session, which one task has to do; others may use it."""
        try:
            async with self._open(self._server) as opened:
                session.set_result(opened)
                await self._closing.wait()
        except Exception as error:  # of the server's, or of the way to it
            if not session.done():
                session.set_exception(error)

    async def _call(self, name: str, /, **arguments: Any) -> str:
        assert self._session is not None, "a call before start"
        return text_of_result(await (await self._session).call_tool(name, arguments))


@functools.cache
def schemas_of(server: Server, open_session: Open) -> tuple[Mapping[str, Any], ...]:
    """The tools of a server, as chat templates take them; asked once for a process. Raises InputError."""

    async def ask() -> Any:
        async with open_session(server) as session:
            return (await session.list_tools()).tools

    with ThreadPoolExecutor(1) as thread:  # there may be an event loop in this one
        try:
            tools = thread.submit(lambda: asyncio.run(asyncio.wait_for(ask(), LIST_TIMEOUT_S))).result()
        except InputError:
            raise
        except BaseException as error:  # groups of exceptions are not all Exceptions
            raise InputError(f"the MCP server {server!r} does not tell its tools: {_first(error)}") from error
    return tuple(_schema(tool) for tool in tools)


def _schema(tool: Any) -> Mapping[str, Any]:
    parameters = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)
    described = {"name": tool.name, "description": tool.description or "", "parameters": parameters or {}}
    return {"type": "function", "function": described}


def text_of_result(result: Any) -> str:
    """What the model reads of a result: its texts; other parts by their kind."""
    parts = [getattr(part, "text", None) or f"[{getattr(part, 'type', 'part')}]" for part in result.content]
    is_error = getattr(result, "is_error", False) or getattr(result, "isError", False)
    return ("error: " if is_error else "") + "\n".join(parts)


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
