"""`cbtop --web` shows the screen in a real browser that has the token, and in no other one."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.browser import chromium
from tests.integration.hosts import CBTOP, DEADLINE_S, cbtop, eventually
from tests.representatives import first_by_default

aiohttp = pytest.importorskip("aiohttp", reason="the extra `web` is not installed: pip install textual-serve")
pytest.importorskip("textual_serve", reason="the extra `web` is not installed: pip install textual-serve")

# The program counts its tokens and its time itself, with the clock of Python.
COUNTING = """
import time
from cbtop import BrickProfiler, BrickId
profiler = BrickProfiler()
with profiler.step("decode", tokens=0): pass
begun = time.perf_counter()
for _ in range(300):
    with profiler.step("decode", tokens=3), profiler.layer(0), profiler.brick(BrickId.DOWN_PROJECTION, 64):
        time.sleep(0.002)
print(900 / (time.perf_counter() - begun))
"""
# A text that only the view of this key shows. The program has ended before, so its timeline is not there.
SHOWN_BY = {
    "1": "the costliest bricks", "2": "incl avg µs +incl p50 .*% of roof", "3": "read here +\n +no layer has three",
    "4": "it has ended, and none of its records", "5": "FLOP/B +GB/s", "6": "layer → brick → kernel",
    "7": "before attach", "8": "busy, 0–100 %",
}  # fmt: skip


@dataclass
class Served:
    """A running `cbtop --web`."""

    process: subprocess.Popen[str]
    address: str

    @property
    def port(self) -> int:
        return int(self.address.split(":")[2].split("/")[0])

    @property
    def token(self) -> str:
        return self.address.split("/")[3]

    def children(self) -> list[psutil.Process]:
        """The processes that draw the screen, one for each tab."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    command = [*CBTOP, *arguments, "--web", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield Served(process, process.stdout.readline().strip())
        finally:
            process.terminate()


@asynccontextmanager
async def tab(address: str, until: bytes = b"quit") -> AsyncIterator[bytes]:
    """Open the websocket of a tab without a browser, and wait until it draws the word `until`.

    Yields the bytes that it has drawn until then.
    """
    async with aiohttp.ClientSession() as client, client.ws_connect(f"{address}ws?width=100&height=30") as websocket:
        drawn = b""
        while until not in drawn:
            drawn += await websocket.receive_bytes(timeout=DEADLINE_S)
        yield drawn


def all_end(processes: Sequence[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]


def test_a_browser_shows_every_view_and_the_rate_of_the_program() -> None:
    counted = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, check=True)
    with served("--window=all") as web, chromium() as browser:
        browser.open(web.address)
        shown = browser.wait_for(r"tokens/s .*\n +([\d,]+(?:\.\d+)?) ")[1]
        assert float(shown.replace(",", "")) == pytest.approx(float(counted.stdout), rel=0.02)
        for key in "23456781":
            browser.press(key)
            browser.wait_for(SHOWN_BY[key])
        width = len(browser.screen().splitlines()[0])
        browser.resize(900, 600)
        eventually(lambda: len(browser.screen().splitlines()[0]) < width)
        browser.wait_for("quit *$")  # The last line is drawn for the new size.
        # The page has loaded nothing from another server.
        loaded = browser.script("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert [name for name in loaded if not name.startswith(web.address)] == []
        assert web.token not in browser.script("return document.title + document.body.innerText")
        browser.press("q")
        assert all_end(web.children())
        eventually(lambda: "open it again" in browser.text())


def test_a_browser_without_the_token_or_a_page_of_another_site_is_refused() -> None:
    with served() as web, chromium() as browser:
        root = f"http://127.0.0.1:{web.port}"
        for path in ("/", "/ws", "/static/js/textual.js", f"/{web.token[:-1]}A_/", f"/{web.token[:-1]}A_/page.js"):
            browser.open(root + path)
            assert "token" in browser.text()
        assert not browser.connects(f"ws://127.0.0.1:{web.port}/ws")
        # `evil.example` now resolves to loopback, as if its owner had changed its address after the page was loaded.
        browser.open(f"http://evil.example:{web.port}/{web.token}/")
        assert "127.0.0.1 or localhost" in browser.text()
        browser.open("data:text/html,<title>another site</title>")
        assert not browser.connects(f"{web.address.replace('http', 'ws')}ws")
        assert web.children() == []


async def test_only_with_the_token_is_there_a_page_a_file_or_a_socket() -> None:
    with served() as web:
        root = f"http://127.0.0.1:{web.port}"
        async with aiohttp.ClientSession() as client:
            for path in ("", "static/js/textual.js", "static/css/xterm.css", "page.js"):
                assert (await client.get(web.address + path)).status == 200
                for refused in (f"{root}/{path}", f"{root}/0/{path}"):
                    assert (await client.get(refused)).status == 403
                assert (await client.get(web.address + path, headers={"Host": "evil.example"})).status == 403
            for path in (
                "static/../server.py",
                "static/%2e%2e/server.py",
                "static//etc/passwd",
                "static/",
                "download/x",
            ):
                assert (await client.get(web.address + path)).status == 404
            for address, origin in ((f"{root}/", None), (f"{root}/0/", None), (web.address, "http://evil.example")):
                with pytest.raises(aiohttp.WSServerHandshakeError) as error:
                    await client.ws_connect(f"{address}ws", origin=origin)
                assert error.value.status == 403
        assert web.children() == []


@first_by_default("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_no_process_is_left_when_the_server_ends(number: signal.Signals) -> None:
    with served() as web:
        async with tab(web.address), tab(web.address):
            children = web.children()
            assert len(children) == 2
            web.process.send_signal(number)
            exit_code = await asyncio.to_thread(web.process.wait, DEADLINE_S)
            assert exit_code == (-number if number is signal.SIGKILL else 128 + number)
            assert all_end(children)


@pytest.mark.slow
async def test_a_screen_that_hangs_is_killed_when_its_tab_is_closed() -> None:
    with served() as web:
        async with tab(web.address):
            (child,) = web.children()
            child.suspend()
        assert all_end([child])
        async with tab(web.address):  # The server still works.
            assert len(web.children()) == 1


async def test_the_token_is_in_no_log_and_in_no_argument_of_a_process() -> None:
    with served("--debug") as web:
        async with tab(web.address):
            (child,) = web.children()
            assert [web.token in " ".join(one) for one in (child.cmdline(), child.environ().values())] == [False] * 2
            with socket.create_connection(("127.0.0.1", web.port)) as raw:
                raw.sendall(f"NONSENSE {web.address}\r\n\r\n".encode())
                assert b"400" in raw.recv(64)
            web.process.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(web.process.communicate, timeout=DEADLINE_S)
            assert web.process.returncode == 128 + signal.SIGINT
            assert all_end([child])
    assert web.token not in out + err
    assert "Traceback" not in err


def test_a_port_in_use_names_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cbtop("--web", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"cbtop: port {port} is in use; choose another one, such as --web ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--web", "run.cbtop"], "'run.cbtop' is not a port from 0 to 65535"),
        (["--web", "65536"], "'65536' is not a port from 0 to 65535"),
        (["--web", "--once"], "--web shows the screen, and --once prints a report; leave out one of them"),
        (["replay", "missing.cbtop", "--web", "0"], "missing.cbtop"),
    ],
)
def test_a_wrong_use_is_refused_before_the_server_starts(arguments: list[str], text: str) -> None:
    done = cbtop(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_without_textual_serve_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("cbtop.web", "textual_serve")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual_serve", None)
    done = cbtop("--web")
    expected = "cbtop: --web needs textual-serve; pip install 'cbtop[web]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


async def test_a_recording_is_shown_in_a_browser_and_in_ascii_if_asked() -> None:
    recording = Path(__file__).parents[1] / "cbtop" / "h100.cbtop"
    with served("replay", str(recording), "--ascii") as web:
        async with tab(web.address, until=b"REPLAY") as drawn:
            assert drawn.isascii()
            assert len(web.children()) == 1
