"""One browser tab: a process that draws the screen, and its bytes to and from the websocket."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

from aiohttp import web
from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

DRIVER = "cbtop.tui.browser_driver:BrowserDriver"
# The process must have ended this many seconds after the request. Then it is killed.
LEAVE_WITHIN_S = 5.0
_READY = b"__GANGLION__\n"  # printed by Textual's WebDriver before its packets
_DATA, _META = b"D", b"M"
_CHUNK_BYTES = 1 << 16


class BrowserSession(AppService):
    """Runs one process for one websocket."""

    def __init__(self, command: Sequence[str], websocket: web.WebSocketResponse) -> None:
        super().__init__(
            "cbtop",
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=self._close,
            download_manager=DownloadManager(),
        )
        self._arguments = command
        self._websocket = websocket
        self._stopping = asyncio.Lock()

    async def _close(self) -> None:
        await self._websocket.close()

    async def _open_app_process(self, width: int = 80, height: int = 24) -> Process:
        """Start the process. Its stderr is ours, so that its errors appear in the terminal of `cbtop --web`."""
        environment = self._build_environment(width, height) | {"TEXTUAL_DRIVER": DRIVER}
        environment.pop("COLORFGBG", None)  # the background of our terminal, not of the page
        # In a session of its own, the process does not receive the Ctrl-C of our terminal. `stop` ends it.
        process = await asyncio.create_subprocess_exec(
            *self._arguments, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
        )
        self._process, self._stdin = process, process.stdin
        return process

    async def run(self) -> None:
        """Send the packets of the process to the browser until the process ends or the browser is gone."""
        output = self._output()
        try:
            while await output.readline() not in (_READY, b""):
                pass
            while True:
                kind, size = await output.readexactly(1), await output.readexactly(4)
                payload = await output.readexactly(int.from_bytes(size, "big"))
                if kind == _DATA:
                    await self.on_data(payload)
                elif kind == _META:
                    await self.on_meta(payload)
        except asyncio.IncompleteReadError:
            await self._close()
        except ConnectionError:
            return  # The browser is gone. The handler of the websocket stops this session.

    def _output(self) -> asyncio.StreamReader:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout

    async def stop(self) -> None:
        """End the process, and return when it has ended. It may be called several times, also at the same time."""
        async with self._stopping:
            if self._process is None or self._task is None or self._process.returncode is not None:
                return
            try:
                async with asyncio.timeout(LEAVE_WITHIN_S):
                    await self._leave(self._process, self._task)
            except TimeoutError:
                self.kill()
            await self._process.wait()

    async def _leave(self, process: Process, task: asyncio.Task[None]) -> None:
        await self.send_meta({"type": "quit"})
        self.stdin.close()
        task.cancel()
        await asyncio.wait([task])
        await self._close()
        while await self._output().read(_CHUNK_BYTES):  # A full pipe would block the process.
            pass
        await process.wait()

    def kill(self) -> None:
        """Kill the process, and all processes that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
