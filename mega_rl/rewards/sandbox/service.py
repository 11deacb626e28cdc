"""A service that runs untrusted programs in the sandbox of its machine: HTTP and JSON, bounded in everything.

The protocol is in docs/sandbox.md. Each connection carries one request and has a thread; as many programs run at once
as there are workers, as many more requests wait as the queue holds, and all others are answered with 429.
"""

from __future__ import annotations

import contextlib
import hmac
import http
import json
import math
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mega_rl.rewards.sandbox.remote import MAX_BODY_BYTES
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, run_program

LOOPBACK = ("127.0.0.1", "::1", "localhost")
READ_TIMEOUT_S = 30.0  # for a whole request to arrive
# Name of a field -> what it may be. All but the source may be left out.
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "source": str, "stdin": str, "timeout_s": (int, float), "memory_bytes": int, "with_errors": bool,
}  # fmt: skip


@dataclass
class Service:
    """What a server runs, and how much of it."""

    token: str | None  # None: whoever reaches the port may run programs
    num_workers: int
    max_waiting: int
    max_timeout_s: float = 60.0
    max_memory_bytes: int = 1 << 32
    namespaces: bool = True
    preload: tuple[str, ...] = ()
    running: int = 0
    waiting: int = 0
    _change: threading.Condition = field(default_factory=threading.Condition)

    def run(self, request: Any) -> tuple[http.HTTPStatus, dict[str, Any]]:
        """Status and answer of one request."""
        try:
            fields = self._checked(request)
        except ValueError as error:
            return http.HTTPStatus.BAD_REQUEST, {"error": str(error)}
        with self._change:
            if self.waiting >= self.max_waiting and self.running >= self.num_workers:
                return http.HTTPStatus.TOO_MANY_REQUESTS, {"error": f"{self.waiting} requests wait already"}
            self.waiting += 1
            self._change.wait_for(lambda: self.running < self.num_workers)
            self.waiting -= 1
            self.running += 1
        try:
            limits = ProgramLimits(fields["timeout_s"], fields["memory_bytes"], namespaces=self.namespaces)
            run = run_program(fields["source"], fields["stdin"], limits, fields["with_errors"], self.preload)
        except OSError as error:
            return http.HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        finally:
            with self._change:
                self.running -= 1
                self._change.notify()
        return http.HTTPStatus.OK, {"exit_code": run.exit_code, "output": run.output, "cpu_s": run.cpu_s}

    def _checked(self, request: Any) -> dict[str, Any]:
        """All fields of a request. Raises ValueError."""
        if not isinstance(request, dict) or "source" not in request:
            raise ValueError("the request is no JSON object with a source")
        fields: dict[str, Any] = {
            "stdin": "",
            "timeout_s": 4.0,
            "memory_bytes": 1 << 29,
            "with_errors": False,
        } | request
        for name, value in fields.items():
            if name not in FIELDS:
                raise ValueError(f"unknown field {name!r:.60}; there are {', '.join(FIELDS)}")
            if not isinstance(value, FIELDS[name]) or (isinstance(value, bool) and FIELDS[name] is not bool):
                raise ValueError(f"{name} is {value!r:.60}, which is of another type")
        if not (math.isfinite(fields["timeout_s"]) and 0 < fields["timeout_s"] <= self.max_timeout_s):
            raise ValueError(f"timeout_s must be above 0 and at most {self.max_timeout_s:g}")
        if not 1 << 26 <= fields["memory_bytes"] <= self.max_memory_bytes:
            raise ValueError(f"memory_bytes must be from {1 << 26} to {self.max_memory_bytes}")
        return fields


class Server(ThreadingHTTPServer):
    """A service at a port."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, service: Service) -> None:
        """Listen. Raises OSError: the port is taken, or the host is none of this machine's."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.service = service
        # Beyond what is counted, requests that are being read or refused.
        self._connections = threading.BoundedSemaphore(service.num_workers + service.max_waiting + 64)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except Exception:  # there is no further thread, which would have released it
                self._connections.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whatever a connection does ends that connection, without a word."""


class _Handler(BaseHTTPRequestHandler):
    timeout = READ_TIMEOUT_S  # of each wait
    server: Server

    def setup(self) -> None:
        super().setup()
        self._deadline = threading.Timer(READ_TIMEOUT_S, self._cut)
        self._deadline.daemon = True
        self._deadline.start()

    def finish(self) -> None:
        self._deadline.cancel()
        super().finish()

    def _cut(self) -> None:
        """End a connection whose request did not arrive in time."""
        with contextlib.suppress(OSError):  # it has ended already
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:  # noqa: N802 - the name that the library calls
        service = self.server.service
        if self._is_allowed():
            if self.path != "/health":
                return self._refuse(http.HTTPStatus.NOT_FOUND, "there are GET /health and POST /run")
            answer = {"running": service.running, "waiting": service.waiting, "workers": service.num_workers}
            self._answer(http.HTTPStatus.OK, answer)

    def do_POST(self) -> None:  # noqa: N802 - as above
        if not self._is_allowed():
            return
        if self.path != "/run":
            return self._refuse(http.HTTPStatus.NOT_FOUND, "there are GET /health and POST /run")
        # A page in a browser cannot send this kind to another address without asking, which nobody answers.
        if self.headers.get_content_type() != "application/json":
            return self._refuse(http.HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
        length = self._length()
        if length is None or length > MAX_BODY_BYTES:
            error = f"give a Content-Length of at most {MAX_BODY_BYTES}"
            return self._refuse(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error)
        try:
            body = self.rfile.read(length)
            self._deadline.cancel()
            request = json.loads(body)
        except (ValueError, RecursionError):
            return self._answer(http.HTTPStatus.BAD_REQUEST, {"error": "the request is not JSON"})
        self._answer(*self.server.service.run(request))

    def _is_allowed(self) -> bool:
        token = self.server.service.token
        given = self.headers.get("Authorization", "")
        if token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return True
        self._refuse(http.HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")
        return False

    def _length(self) -> int | None:
        """Bytes of the body, as the client gives them."""
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() and len(length) < 12 else None

    def _refuse(self, status: http.HTTPStatus, error: str) -> None:
        """Answer at once, then read the body: a client that still sends when the connection ends loses the answer."""
        self._answer(status, {"error": error})
        left = min(self._length() or 0, MAX_BODY_BYTES)
        while left > 0 and (data := self.rfile.read1(min(left, 1 << 16))):
            left -= len(data)

    def _answer(self, status: http.HTTPStatus, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the library's name
        """Nothing: a line for every program helps nobody."""
