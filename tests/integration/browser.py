"""Drives a headless Chromium through chromedriver, by the W3C WebDriver protocol."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.hosts import DEADLINE_S, eventually

FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,800",
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
]  # fmt: skip
# xterm.js draws on a canvas. So keep its object, of which `screen` reads the cells.
_KEEP_TERMINAL = """
Object.defineProperty(Object.prototype, "terminal", {
  configurable: true,
  set(value) {
    Object.defineProperty(this, "terminal", {value, writable: true, enumerable: true, configurable: true});
    window.keptTerminal = value;
  },
});
"""
_READ_SCREEN = """
const {rows = 0, cols, buffer} = window.keptTerminal ?? {};
return Array.from({length: rows}, (_, y) => buffer.active.getLine(y).translateToString(false, 0, cols));
"""
_CONNECT = """
const socket = new WebSocket("%s");
return new Promise(done => { socket.onopen = () => done(true); socket.onerror = () => done(false); });
"""


class Chromium:
    """One browser window. `session` is the address of its WebDriver session."""

    def __init__(self, session: str) -> None:
        self.session = session

    def do(self, command: str, **values: Any) -> Any:
        return request(f"{self.session}/{command}", values)

    def open(self, address: str) -> None:
        self.do("url", url=address)

    def script(self, text: str) -> Any:
        return self.do("execute/sync", script=text, args=[])

    def press(self, key: str) -> None:
        steps = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.do("actions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    def resize(self, width: int, height: int) -> None:
        """Give the window another size, in pixels."""
        self.do("window/rect", width=width, height=height)

    def screen(self) -> str:
        """Return the text of the terminal that the page shows."""
        return "\n".join(self.script(_READ_SCREEN))

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the match of `pattern` as soon as it is on the screen."""
        match: re.Match[str] = eventually(lambda: re.search(pattern, self.screen()))
        return match

    def text(self) -> str:
        """Return the text of the page, without its terminal."""
        return str(self.script("return document.body.innerText"))

    def picture(self) -> bytes:
        """Return what the window shows, as PNG."""
        return base64.b64decode(request(f"{self.session}/screenshot", None))

    def connects(self, websocket: str) -> bool:
        """Return whether a script of the page can open the websocket."""
        return bool(self.script(_CONNECT % websocket))


def request(address: str, values: dict[str, Any] | None, method: str | None = None) -> Any:
    body = None if values is None else json.dumps(values).encode()
    asked = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
        return json.load(answer)["value"]


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Run a browser with an empty profile, in which evil.example is 127.0.0.1. Skips the test without Chromium."""
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            started = next(filter(None, (re.search(r"on port (\d+)\.", line) for line in process.stdout)))
            address = f"http://127.0.0.1:{started[1]}/session"
            wanted = {"browserName": "chrome", "goog:chromeOptions": {"binary": program, "args": FLAGS}}
            session = request(address, {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            browser = Chromium(f"{address}/{session}")
            browser.do(
                "goog/cdp/execute", cmd="Page.addScriptToEvaluateOnNewDocument", params={"source": _KEEP_TERMINAL}
            )
            try:
                yield browser
            finally:
                request(browser.session, None, "DELETE")
        finally:
            process.terminate()
