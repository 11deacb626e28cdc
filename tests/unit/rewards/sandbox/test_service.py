"""The sandbox as a service: its protocol, its limits, and the client."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mega_rl.environments.built_in.python import PythonSandbox
from mega_rl.environments.protocol import Turn
from mega_rl.errors import InputError
from mega_rl.rewards.functions.code import _check_code_tests, code_tests
from mega_rl.rewards.sandbox import sandbox
from mega_rl.rewards.sandbox.remote import MAX_BODY_BYTES, TOKEN, SandboxClient, ServiceError
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, ProgramRun
from mega_rl.rewards.sandbox.service import Server, Service
from mega_rl.types import Prompt
from tests.launching.launch import REPO, run

HAS_NAMESPACES = sandbox.has_namespaces()
pytestmark = pytest.mark.skipif(not HAS_NAMESPACES and os.geteuid() == 0, reason="no program is run here")
LIMITS = ProgramLimits(timeout_s=30.0, memory_bytes=1 << 29)
SECRET = "a-token-of-the-tests"
TRUTH = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
SUM = "```python\nprint(sum(map(int, input().split())))\n```"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv(TOKEN, SECRET)
    service = Service(SECRET, num_workers=2, max_waiting=4, namespaces=HAS_NAMESPACES)
    with Server("127.0.0.1", 0, service) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def ask(server: Server, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Mapping[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=120)
    given = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, given)
    response = connection.getresponse()
    status, answer = response.status, json.loads(response.read())
    connection.close()
    return status, answer


def test_a_program_runs_there_as_it_would_here(served: Server) -> None:
    client = SandboxClient(url(served))
    client.check()
    assert client.run("print(input()); print('\\xff\\u4e2d')", "given", LIMITS) == ProgramRun(0, "given\n\xff\u4e2d\n")
    assert client.run("1 / 0", "", LIMITS, with_errors=True).output.endswith("division by zero\n")
    assert client.run("while True: pass", "", ProgramLimits(0.5, 1 << 29)).exit_code is None


def test_the_reward_and_the_environment_name_a_service(served: Server) -> None:
    _check_code_tests(service=url(served))
    assert code_tests("s", SUM, TRUTH, {}, timeout_s=30.0, service=url(served)) == 1.0
    environment = PythonSandbox(Prompt(0, (1,), "?", "", "t"), 0, service=url(served), timeout_s=30.0)
    assert environment.step(Turn("```python\nprint(6 * 7)\n```")).messages[0]["content"] == "42"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "headers", "status", "sentence"),
    [
        (b"{}", {}, 400, "no JSON object with a source"),
        (b"{", {}, 400, "not JSON"),
        (b"[" * 100000, {}, 400, "not JSON"),
        (b'{"source": 1}', {}, 400, "source is 1, which is of another type"),
        (b'{"source": "", "timeout_s": true}', {}, 400, "timeout_s is True"),
        (b'{"source": "", "timeout_s": NaN}', {}, 400, "timeout_s must be above 0 and at most 60"),
        (b'{"source": "", "timeout_s": 61}', {}, 400, "timeout_s must be above 0 and at most 60"),
        (b'{"source": "", "memory_bytes": 1}', {}, 400, "memory_bytes must be from"),
        (b'{"source": "", "isolation": "none"}', {}, 400, "unknown field 'isolation'"),
        (b"{}", {"Authorization": "Bearer wrong"}, 401, "the token is missing or wrong"),
        (b"{}", {"Content_Type": "text/plain"}, 415, "send application/json"),
        (b"", {"Content_Length": "99999999"}, 413, "Content-Length of at most"),
    ],
)
def test_a_bad_request_is_refused_in_a_sentence(
    served: Server, body: bytes, headers: dict[str, str], status: int, sentence: str
) -> None:
    found, answer = ask(served, "POST", "/run", body, **headers)
    assert found == status and sentence in answer["error"]


def test_a_refused_client_with_a_large_body_reads_why(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "another-token-of-the-tests")
    client = SandboxClient(url(served))
    with pytest.raises(ServiceError, match=r"the token is missing or wrong \(status 401\)"):
        client.run("", "x" * (MAX_BODY_BYTES - 1000), LIMITS, patience_s=0.0)
    with pytest.raises(ServiceError, match=f"bytes as JSON, more than {MAX_BODY_BYTES}"):
        client.run("", "x" * MAX_BODY_BYTES, LIMITS, patience_s=0.0)


def test_a_request_that_never_ends_is_cut(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_rl.rewards.sandbox.service.READ_TIMEOUT_S", 0.2)
    head = f"POST /run HTTP/1.0\r\nAuthorization: Bearer {SECRET}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(served.server_address[:2], timeout=0.02) as connection:  # type: ignore[arg-type]
        connection.sendall(f"{head}Content-Length: {MAX_BODY_BYTES}\r\n\r\n".encode())
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            try:
                connection.sendall(b" ")
                assert connection.recv(1) == b""
                return
            except TimeoutError:
                continue
            except OSError:
                return
    pytest.fail("the service still reads")


def test_a_thread_that_cannot_start_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with Server("127.0.0.1", 0, Service(None, num_workers=1, max_waiting=1)) as server:
        monkeypatch.setattr(threading.Thread, "start", fails)
        for _ in range(100):  # more than there are places
            with pytest.raises(RuntimeError, match="new thread"):
                server.process_request(None, None)


def test_the_state_of_the_service(served: Server) -> None:
    assert ask(served, "GET", "/health") == (200, {"running": 0, "waiting": 0, "workers": 2})
    assert ask(served, "GET", "/other")[0] == ask(served, "POST", "/other")[0] == 404


def test_a_full_service_says_so_and_the_client_tries_anew(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    may_run = threading.Event()
    real = sandbox.run_program

    def held(*arguments: Any, **named: Any) -> ProgramRun:
        may_run.wait()
        return real(*arguments, **named)

    monkeypatch.setattr("mega_rl.rewards.sandbox.service.run_program", held)
    service, client, runs = served.service, SandboxClient(url(served)), list[ProgramRun]()
    threads = [threading.Thread(target=lambda: runs.append(client.run("print(1)", "", LIMITS))) for _ in range(6)]
    late = threading.Thread(target=lambda: runs.append(client.run("print(1)", "", LIMITS, patience_s=600.0)))
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + 120.0
        while (service.running, service.waiting) != (2, 4) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (service.running, service.waiting) == (2, 4)
        assert ask(served, "POST", "/run", b'{"source": ""}') == (429, {"error": "4 requests wait already"})
        with pytest.raises(ServiceError, match=r"refuses: 4 requests wait already \(status 429\)"):
            client.run("", "", LIMITS, patience_s=0.0)
        late.start()
    finally:
        may_run.set()
    for thread in (*threads, late):
        thread.join()
    assert runs == [ProgramRun(0, "1\n")] * 7


@pytest.mark.parametrize("address", ["", "host:1", "ftp://host", "http://", "http://u:p@host", "http://host/run?x=1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is no address; write http://HOST:PORT"):
        SandboxClient(address)
    if address:
        with pytest.raises(InputError, match="python_sandbox: service"):
            PythonSandbox(Prompt(0, (1,), "?", "", "t"), 0, service=address)


def test_a_token_may_end_in_a_new_line_and_is_never_shown(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, f" {SECRET}\n")
    SandboxClient(url(served)).check()
    for token in (f"{SECRET}\n{SECRET}", f"{SECRET}\u4e2d", f"{SECRET}\xe9"):
        monkeypatch.setenv(TOKEN, token)
        with pytest.raises(ValueError, match="may have printable ASCII characters only") as raised:
            SandboxClient(url(served))
        assert SECRET not in str(raised.value)


def test_nobody_there_is_told_at_start() -> None:
    with socket.socket() as deaf:  # has a port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"{address} refuses: no answer.*; start it with mega-rl sandbox-server"):
            _check_code_tests(service=f"http://{address}")


SERVER = (sys.executable, str(REPO / "tools" / "sandbox_server.py"))


def test_the_server_runs_until_a_signal_and_leaves_nothing() -> None:
    isolation = "namespaces" if HAS_NAMESPACES else "limits"
    command = (*SERVER, "--port", "0", "--isolation", isolation, "--workers", "2")
    environment = os.environ | {TOKEN: SECRET}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].split(",")[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TOKEN, SECRET)
            look = "import os; print('" + TOKEN + "' in os.environ)"
            assert SandboxClient(address).run(look, "", LIMITS).output == "False\n"
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "token", "sentence"),
    [
        (("--host", "0.0.0.0"), "", f"can be reached from elsewhere; put a token into {TOKEN}"),
        ((), "short", "has 5 characters; give it at least 16"),
        ((), "short" + " " * 20 + "\n", "has 5 characters; give it at least 16"),
        ((), "\u4e2d" * 16, "may have printable ASCII characters only"),
        (("--workers", "0"), "", "must be above 0"),
        (("--port", "99999"), "", "cannot be listened on"),
    ],
)
def test_a_server_that_cannot_be_is_refused(arguments: tuple[str, ...], token: str, sentence: str) -> None:
    isolation = () if HAS_NAMESPACES else ("--isolation", "limits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN, token)
        ended = run((*SERVER, *arguments, *isolation))
    assert ended.returncode == 2 and sentence in ended.stdout
