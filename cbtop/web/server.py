"""The HTTP server of `cbtop --web`: a page, its files, and a websocket for each browser tab."""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from textual_serve.server import Server, to_int

from cbtop.errors import CbtopError
from cbtop.protocol.limits import reason
from cbtop.web.access import refusal
from cbtop.web.session import BrowserSession

HOST = "127.0.0.1"
TOKEN_BYTES = 32
MAX_PORT = 65535
HEARTBEAT_S = 15.0  # A tab that does not answer for this long is gone, and its process ends.
CLOSE_WITHIN_S = 1.0
FONT_SIZES, MAX_CELLS = range(6, 65), 1000
_PAGE, _SCRIPT = (Path(__file__).with_name(name) for name in ("page.html", "page.js"))
# The page loads only its own files. Its address is sent nowhere, and no page can show it in a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PAGE_MAY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self'; img-src 'self' data:; "
    "connect-src 'self' ws://{host}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def serve(arguments: Sequence[str], port: int, tell: Callable[[str], None]) -> int:
    """Serve the screen of `cbtop ARGUMENTS` until a signal arrives, and return the exit code.

    `tell` receives the address, with the token. Port 0 is any free port. Raises CbtopError if the port is taken.
    """
    command = [sys.executable, "-P", "-m", "cbtop", *arguments]
    logging.getLogger("aiohttp.server").addFilter(_is_of_ours)
    with _listening(port) as listener:
        return asyncio.run(BrowserServer(command).answer(listener, tell))


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other = port + 1 if port < MAX_PORT else port - 1
            way = f"choose another one, such as --web {other}, or --web 0 for any free port"
            raise CbtopError(f"port {port} is in use; {way}") from error
        raise CbtopError(f"port {port}: {reason(error)}; --web 0 takes any free port") from error


class BrowserServer(Server):
    """Serves the screen to browsers that know the token."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__("cbtop", HOST)
        self._arguments = command
        self._token = secrets.token_urlsafe(TOKEN_BYTES)
        self._sessions: set[BrowserSession] = set()
        self._files = {
            str(path.relative_to(self.statics_path)): path for path in self.statics_path.rglob("*") if path.is_file()
        }

    async def answer(self, listener: socket.socket, tell: Callable[[str], None]) -> int:
        """Answer requests until a signal arrives. Returns the exit code."""
        stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number, stopped)
        runner = web.AppRunner(await self._make_app(), access_log=None, shutdown_timeout=CLOSE_WITHIN_S)
        await runner.setup()
        site = web.SockSite(runner, listener)
        await site.start()
        tell(f"http://{HOST}:{listener.getsockname()[1]}/{self._token}/")
        exit_code = 128 + await stopped
        await site.stop()
        await asyncio.gather(*(session.stop() for session in self._sessions))
        await runner.cleanup()
        return exit_code

    def _on_signal(self, number: int, stopped: asyncio.Future[int]) -> None:
        """Stop the server. At a second signal, kill all processes instead of waiting for them."""
        if stopped.done():
            for session in self._sessions:
                session.kill()
        else:
            stopped.set_result(number)

    async def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        # The token is a parameter of the route, and only the guard compares it.
        app.add_routes(
            [
                web.get("/{token}", self._add_slash),
                web.get("/{token}/", self._page),
                web.get("/{token}/page.js", self._script),
                web.get("/{token}/ws", self.handle_websocket),
                web.get("/{token}/static/{name:.+}", self._file),
            ]
        )
        app.on_response_prepare.append(_add_headers)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = request.headers
        why = refusal(headers.getall("Host", []), headers.getall("Origin", []), request.path, self._token)
        if why is not None:
            return web.Response(status=403, text=f"cbtop: {why}\n")
        return await handler(request)

    async def _add_slash(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=308, headers={"Location": f"/{self._token}/"})

    async def _page(self, request: web.Request) -> web.StreamResponse:
        host = request.headers["Host"]
        size = to_int(request.query.get("fontsize", ""), 16)
        text = Template(_PAGE.read_text()).substitute(
            websocket=f"ws://{host}/{self._token}/ws",
            font_size=min(max(size, FONT_SIZES[0]), FONT_SIZES[-1]),
        )
        policy = {"Content-Security-Policy": _PAGE_MAY.replace("{host}", host)}
        return web.Response(text=text, content_type="text/html", headers=policy)

    async def _script(self, _request: web.Request) -> web.StreamResponse:
        return web.FileResponse(_SCRIPT)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = self._files.get(request.match_info["name"])
        if path is None:
            return web.Response(status=404, text="cbtop: there is no such file\n")
        return web.FileResponse(path)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run a process for this tab, until the tab is closed or the user quits."""
        websocket = web.WebSocketResponse(timeout=CLOSE_WITHIN_S, heartbeat=HEARTBEAT_S, compress=False)
        await websocket.prepare(request)
        session = BrowserSession(self._arguments, websocket)
        self._sessions.add(session)
        try:
            await session.start(_cells(request, "width", 80), _cells(request, "height", 24))
            await self._process_messages(websocket, session)
        finally:
            await session.stop()
            self._sessions.discard(session)
        return websocket


def _cells(request: web.Request, name: str, default: int) -> int:
    return min(max(to_int(request.query.get(name, ""), default), 1), MAX_CELLS)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


def _is_of_ours(record: logging.LogRecord) -> bool:
    """Return whether a message of aiohttp is about our code, not about an invalid request. An invalid request is
    answered with 400. Its message would quote it, and it may contain the token.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
