"""HTTP before an endpoint: paths, keys, limits, streams, and clients that go away. The protocol is in docs/serve.md."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mega_rl.errors import InputError
from mega_rl.serving.endpoint import Endpoint
from mega_rl.serving.engines import EngineLostError, FullError
from mega_rl.serving.openai_answers import Kind, error, event
from mega_rl.serving.sessions import EndedSessionError, Sessions, UnknownSessionError

T = TypeVar("T")
SESSION = "x-session-id"  # the header that names a session
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_BODY_BYTES = 1 << 24  # of a request
READ_TIMEOUT_S = 60.0  # for a whole body to arrive
RETRY_AFTER_S = 1
SHOWN_TO_ALL = "/health"
STATUSES: tuple[tuple[type[Exception], int, str], ...] = (  # the first that fits
    (UnknownSessionError, 404, "not_found_error"),
    (EndedSessionError, 409, "conflict_error"),
    (InputError, 400, "invalid_request_error"),
    (RecursionError, 400, "invalid_request_error"),
    (FullError, 429, "rate_limit_error"),
    (EngineLostError, 503, "server_error"),
)


class _TooLargeError(Exception):
    """The body of a request."""


def application(endpoint: Endpoint, keys: Sequence[str] = ()) -> ASGIApp:
    """
    Args:
        keys: whoever has one of them may ask; without any, whoever asks by a name of this machine.
    """
    paths: tuple[tuple[str, Kind], ...] = (
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "completion"),
        ("/inference/v1/generate", "tokens"),
        ("/generate", "tokens"),
    )
    posts = {path: partial(_sample, endpoint, kind) for path, kind in paths}
    posts |= {"/sessions/{session}" + path: handler for path, handler in posts.items()}
    posts |= {"/v1/sessions": partial(_open, endpoint), "/v1/sessions/{session}/reward": partial(_reward, endpoint)}
    gets = {name: partial(_models, endpoint) for name in ("/v1/models", "/sessions/{session}/v1/models")}
    gets |= {
        "/health": partial(_health, endpoint),
        "/metrics": partial(_metrics, endpoint),
        "/v1/sessions/{session}": partial(_session, endpoint),
    }
    routes = [Route(path, _Handled(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, _Handled(handler), methods=["GET"]) for path, handler in gets.items()]
    routes.append(Route("/v1/sessions/{session}", _Handled(partial(_drop, endpoint)), methods=["DELETE"]))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(endpoint.close)

    return _Door(Starlette(routes=routes, lifespan=lifespan), tuple(keys))


@dataclass(frozen=True)
class _Door:
    """Lets those in who may ask."""

    inside: ASGIApp
    keys: tuple[str, ...]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))) is not None:
            return await refusal(scope, receive, send)
        await self.inside(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if request.scope["path"] == SHOWN_TO_ALL:  # request.url is made of the Host header
            return None
        if self.keys:
            given = request.headers.get("authorization", "").encode()
            if not any([hmac.compare_digest(given, f"Bearer {key}".encode()) for key in self.keys]):
                return _refused(401, "the key is missing or wrong", "authentication_error")
        elif _host(request.headers.get("host", "")) not in LOOPBACK:  # a page in a browser that was led here
            return _refused(403, "without keys, only names of this machine are answered", "permission_error")
        # A page in a browser cannot send this kind to another address without asking, which nobody answers.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            return _refused(415, "send application/json", "invalid_request_error")
        return None


def _host(value: str) -> str:
    """The name of a header ``Host``, without the port."""
    return value[1:].partition("]")[0] if value.startswith("[") else value.partition(":")[0]


@dataclass(frozen=True)
class _Handled:
    """A handler whose errors are answers, and which ends when its client goes away."""

    handler: Callable[[Request, Any], Awaitable[Response]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await asyncio.wait_for(_body(request), READ_TIMEOUT_S) if request.method == "POST" else None
        except (_TooLargeError, TimeoutError) as trouble:
            is_large = isinstance(trouble, _TooLargeError)
            sentence = f"a body has at most {MAX_BODY_BYTES} bytes" if is_large else "the body did not arrive in time"
            response: Response | None = _refused(413 if is_large else 408, sentence, "invalid_request_error")
        except (ValueError, RecursionError):
            response = _refused(400, "the body is not JSON", "invalid_request_error")
        else:
            response = await _while_there(self._answer(request, body), receive)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, request: Request, body: Any) -> Response:
        try:
            return await self.handler(request, body)
        except Exception as trouble:  # noqa: BLE001 - whatever it is, the client is told, and others go on
            return _refused(*_told(trouble))


async def _body(request: Request) -> Any:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise _TooLargeError
    found = json.loads(data) if data else {}
    if b"\\u" in data:  # half of a character may be escaped, which no tokenizer takes
        json.dumps(found, ensure_ascii=False).encode()
    return found


async def _while_there(work: Awaitable[T], receive: Receive) -> T | None:
    """What the work returns; None: the client went away, and the work was cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


class _Stream(Response):
    """Events as they come."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _while_there(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._rest) as rest:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for chunk in rest:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as trouble:  # noqa: BLE001 - as in `_Handled`; the status was sent already
                chunk = event(error(*_told(trouble)))
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _told(trouble: Exception) -> tuple[int, str, str]:
    """Status, sentence and kind of an error."""
    for kind, status, name in STATUSES:
        if isinstance(trouble, kind):
            return status, str(trouble), name
    traceback.print_exception(trouble)
    return 500, f"the server failed: {type(trouble).__name__}", "server_error"


def _refused(status: int, sentence: str, kind: str) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return JSONResponse(error(status, sentence, kind), status, headers)


async def _sample(endpoint: Endpoint, kind: Kind, request: Request, body: Any) -> Response:
    session = request.path_params.get("session") or request.headers.get(SESSION)
    turns = endpoint.turns(kind, body, session)
    if not turns[0].asked.is_streamed:
        return JSONResponse(await endpoint.whole(turns, session))
    chunks = endpoint.stream(turns[0], session)
    try:
        return _Stream(await anext(chunks), chunks)  # what is refused is refused before the first one
    except BaseException:
        await chunks.aclose()
        raise


async def _models(endpoint: Endpoint, request: Request, body: Any) -> Response:
    model = {"id": endpoint.model.name, "object": "model", "created": 0, "owned_by": "mega_rl"}
    return JSONResponse({"object": "list", "data": [model | {"max_model_len": endpoint.model.max_model_len}]})


async def _health(endpoint: Endpoint, request: Request, body: Any) -> Response:
    failure = endpoint.engines.failure
    return JSONResponse({"status": failure or "ok"}, 200 if failure is None else 503)


async def _metrics(endpoint: Endpoint, request: Request, body: Any) -> Response:
    lines = [f'mega_rl_requests_under_way{{engine="{i}"}} {load}' for i, load in enumerate(endpoint.engines.loads)]
    lines.append(f"mega_rl_sampled_tokens_total {endpoint.num_sampled}")
    if endpoint.sessions is not None:
        lines.append(f"mega_rl_sessions_open {len(endpoint.sessions)}")
        lines += [f"mega_rl_{name}_total {count}" for name, count in asdict(endpoint.sessions.counts).items()]
    return PlainTextResponse("\n".join(lines) + "\n")


def _sessions(endpoint: Endpoint) -> Sessions:
    if endpoint.sessions is None:
        raise InputError("nothing is recorded: start the server with --record")
    return endpoint.sessions


async def _open(endpoint: Endpoint, request: Request, body: Any) -> Response:
    if not isinstance(body, dict):
        raise InputError("the request is no JSON object")
    session = _sessions(endpoint).open(body)
    url = f"{request.url.scheme}://{request.headers.get('host', '')}/sessions/{session.name}/v1"
    return JSONResponse({"session": session.name, "base_url": url})


async def _session(endpoint: Endpoint, request: Request, body: Any) -> Response:
    session = _sessions(endpoint).find(request.path_params["session"])
    rows = session.conversations.rows
    told = {"rows": len(rows), "turns": sum(len(row.marks) for row in rows), "under_way": session.num_under_way}
    return JSONResponse({"session": session.name} | told | {"tokens": sum(len(row.token_ids) for row in rows)})


async def _reward(endpoint: Endpoint, request: Request, body: Any) -> Response:
    if not isinstance(body, dict) or "reward" not in body or not isinstance(parts := body.get("parts", {}), dict):
        raise InputError("give a reward, and as parts the numbers that it is made of, if there are any")
    session = request.path_params["session"]
    rows = _sessions(endpoint).reward(session, body["reward"], parts)
    num_sampled = sum(row.num_sampled for row in rows)
    return JSONResponse({"session": session, "rows": len(rows), "sampled_tokens": num_sampled})


async def _drop(endpoint: Endpoint, request: Request, body: Any) -> Response:
    session = request.path_params["session"]
    _sessions(endpoint).drop(session)
    return JSONResponse({"session": session, "rows": 0})
