"""A headless Chromium, driven through its debugging pipe: clicks, keys, what the page has, shots.

Nothing but the standard library is needed. A test that needs it skips where there is no browser.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60.0


@dataclass
class Browser:
    """One page. `requests` are the addresses that it asked for, `errors` what its console says."""

    sent: int
    received: int
    session: str = ""
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    loaded: int = 0
    _last: int = 0
    _rest: bytes = b""

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the DevTools protocol, and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.sent, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.received], [], [], SECONDS)
            data = os.read(self.received, 1 << 20) if ready else b""
            assert data, "the browser does not answer"
            self._rest += data
        one, _, self._rest = self._rest.partition(b"\0")
        told = json.loads(one)
        match told.get("method"):
            case "Page.loadEventFired":
                self.loaded += 1
            case "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"]["exceptionDetails"]))
            case "Log.entryAdded" | "Runtime.consoleAPICalled":
                self.errors.append(json.dumps(told["params"]))
        return told

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        told = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def open(self, path: Path) -> None:
        """Open a report, and wait until it has drawn itself."""
        before = self.loaded
        self.call("Page.navigate", url=path.as_uri())
        while self.loaded == before:
            self._next()
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def click(self, selector: str) -> None:
        """Click into the middle of an element, as a user does."""
        at = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1
            )

    def key(self, name: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def shot(self, path: Path) -> None:
        """Write what can be seen as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(
    profile: Path, width: int = 1280, height: int = 900, dark: bool = False
) -> Iterator[Browser]:
    """A browser with an empty profile in this folder."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None or not hasattr(os, "fork"):
        pytest.skip("there is no Chromium")
    to_read, sent = os.pipe()
    received, to_write = os.pipe()

    def join() -> None:  # the browser reads from 3 and writes to 4
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 64) for end in (to_read, to_write)]
        for end, number in zip(ends, (3, 4), strict=True):
            os.dup2(end, number)

    command = [found, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command,
        preexec_fn=join,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        b = Browser(sent, received)
        target = b.call("Target.createTarget", url="about:blank")["targetId"]
        b.session = b.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            b.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        b.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        b.call("Emulation.setEmulatedMedia", features=[scheme])
        yield b
    finally:
        process.terminate()
        process.wait()
        os.close(sent)
        os.close(received)
