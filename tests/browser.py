"""A real Chromium without a window for tests of pages, spoken to through the DevTools protocol over a pipe.

No package is needed: messages are JSON, each ended by a NUL byte, on the file descriptors 3 and 4 of the browser. It
resolves no name and so reaches nothing but this machine.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 120.0  # of one answer or one wait; machines are busy
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root; what is opened is our own
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@cache
def executable() -> str | None:
    """The browser of this machine; None if there is none that starts (Ubuntu has a script that only names a snap)."""
    return next((found for name in NAMES if (found := shutil.which(name)) and _starts(found)), None)


def _starts(program: str) -> bool:
    command = [program, "--version"]
    try:
        return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Browser:
    """One process of the browser."""

    def __init__(self, process: subprocess.Popen[bytes], write_to: int, read_from: int) -> None:
        self._process, self._write_to, self._read_from = process, write_to, read_from
        self._buffer, self._last_id = b"", 0
        self._events: list[dict[str, Any]] = []  # that nobody has asked for yet

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of one command; an assertion if the browser refuses it, or does not answer in time."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        _write(self._write_to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._events.append(answer)

    def events(self, session: str) -> list[dict[str, Any]]:
        """What has happened in a page since the last call."""
        self.call("Browser.getVersion")  # whatever happened before its answer has been read by then
        own = [event for event in self._events if event.get("sessionId") == session]
        self._events = [event for event in self._events if event.get("sessionId") != session]
        return own

    @contextmanager
    def page(self, width: int = 1280, height: int = 800, *, mobile: bool = False, dark: bool = False) -> Iterator[Page]:
        """An empty page of that size in CSS pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log"):
                page.call(f"{domain}.enable")
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
            page.call("Emulation.setDeviceMetricsOverride", **size)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            page.call("Emulation.setEmulatedMedia", features=[scheme])
            yield page
        finally:
            with suppress(AssertionError):
                self.call("Target.closeTarget", targetId=target)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready = select.select([self._read_from], [], [], max(left, 0))[0]
            assert ready, f"no answer from the browser in {TIMEOUT_S:.0f} s"
            data = os.read(self._read_from, 1 << 16)
            assert data, f"the browser ended with {self._process.poll()}"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


class Page:
    """One page of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Return once the page and everything in it is loaded."""
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        self.wait_for("document.readyState == 'complete' && location.href != 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise; an assertion if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The first value of the expression that JavaScript takes for true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.1)
        return value

    def errors(self) -> list[str]:
        """What the page has complained of since the last call."""
        found = []
        for event in self._browser.events(self._session):
            details, method = event["params"], event["method"]
            if method == "Runtime.exceptionThrown":
                found.append(str(details["exceptionDetails"]))
            if method == "Log.entryAdded" and details["entry"]["level"] == "error":
                found.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
            if method == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"):
                found.append(str(details["args"]))
        return found

    def screenshot(self, path: Path) -> None:
        """What is visible, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def started() -> Iterator[Browser]:
    """A browser with a profile of its own, which is gone with it."""
    program = executable()
    assert program is not None, f"none of {', '.join(NAMES)} starts"
    to_browser, from_browser = os.pipe(), os.pipe()

    def place() -> None:  # in the child; copies first, for any of the four may be 3 or 4
        ours = os.dup(to_browser[0]), os.dup(from_browser[1])
        high = [os.dup2(descriptor, 50 + number) for number, descriptor in enumerate(ours)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with tempfile.TemporaryDirectory(prefix="browser_", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            close_fds=False,
            start_new_session=True,
            env={**os.environ, "HOME": profile},
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Browser(process, to_browser[1], from_browser[0])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
