"""A client of a sandbox service (`mega_rl.rewards.sandbox.service`, docs/sandbox.md): programs on another machine."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from typing import Any
from urllib.parse import urlsplit

from mega_rl.rewards.sandbox.sandbox import ProgramLimits, ProgramRun

TOKEN = "MEGA_RL_SANDBOX_TOKEN"  # variable of the environment, on both sides
MAX_BODY_BYTES = 1 << 24  # of a request
MAX_ANSWER_BYTES = 1 << 27
MARGIN_S = 60.0  # of one attempt, beyond the time limit of its program
WAIT_S = 0.2, 2.0  # shortest and longest pause before another attempt, on average


class ServiceError(OSError):
    """A service does not answer, or refuses: which one and why."""


def token_of(text: str) -> str:
    """The token in a variable, which may end in a new line. Raises ValueError, which does not show it."""
    token = text.strip()
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"the token in {TOKEN} may have printable ASCII characters only")
    return token


class SandboxClient:
    """Programs of this process, run by a service."""

    def __init__(self, url: str) -> None:
        """Raises ValueError: no URL of such a service, or a token that no header can hold."""
        parts = urlsplit(url)
        is_plain = not (parts.username or parts.password or parts.query or parts.fragment) and parts.path in ("", "/")
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise ValueError(f"service {url!r} is no address; write http://HOST:PORT, and the token into {TOKEN}")
        self._token = token_of(os.environ.get(TOKEN, ""))
        self._url = url
        self._host, self._port = parts.hostname, parts.port
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    def run(
        self, source: str, stdin: str, limits: ProgramLimits, with_errors: bool = False, patience_s: float = 60.0
    ) -> ProgramRun:
        """As `sandbox.run_program`; isolation, file sizes and numbers of processes are the service's.

        Args:
            patience_s: how long to try anew while the service is full or cannot be reached.

        Raises:
            ServiceError: no answer, a refusal, or more than a request may hold.
        """
        fields = {
            "source": source,
            "stdin": stdin,
            "timeout_s": limits.timeout_s,
            "memory_bytes": limits.memory_bytes,
            "with_errors": with_errors,
        }
        body = json.dumps(fields).encode()
        if len(body) > MAX_BODY_BYTES:
            raise ServiceError(f"the program and its input are {len(body)} bytes as JSON, more than {MAX_BODY_BYTES}")
        deadline = time.monotonic() + patience_s
        pause_s = WAIT_S[0]
        while True:
            status, answer = self._ask("POST", "/run", body, limits.timeout_s + MARGIN_S)
            if status == http.client.OK:
                return self._checked(answer)
            is_busy = status in (0, http.client.TOO_MANY_REQUESTS, http.client.SERVICE_UNAVAILABLE)
            if not is_busy or time.monotonic() > deadline:
                raise ServiceError(f"the sandbox service {self._url} refuses: {_reason(answer)} (status {status})")
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, WAIT_S[1])

    def check(self) -> None:
        """Raises ServiceError: the service does not answer, or does not take the token."""
        status, answer = self._ask("GET", "/health", None, 10.0)
        if status != http.client.OK:
            raise ServiceError(f"the sandbox service {self._url} refuses: {_reason(answer)} (status {status})")

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, Any]:
        """Status and answer; status 0 and a reason if there was none (a program may be run twice)."""
        connection = self._connection(self._host, self._port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            data = response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            return 0, {"error": f"no answer: {error}"}
        finally:
            connection.close()
        try:
            return response.status, json.loads(data)
        except (ValueError, RecursionError):
            return response.status, {"error": "the answer is not JSON"}

    def _checked(self, answer: Any) -> ProgramRun:
        match answer:
            case {"exit_code": int() | None as code, "output": str() as output, "cpu_s": int() | float() as cpu_s}:
                return ProgramRun(code, output, float(cpu_s))
        raise ServiceError(f"the sandbox service {self._url} answered with something else than the end of a program")


def _reason(answer: Any) -> str:
    return str(answer.get("error") if isinstance(answer, dict) else answer)[:300]
