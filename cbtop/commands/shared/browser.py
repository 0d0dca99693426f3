"""The option `--web`: the same screen in a browser of this machine."""

from __future__ import annotations

import argparse
import sys

from cbtop.errors import UsageError
from cbtop.tui.in_browser import is_in_browser

DEFAULT_PORT, MAX_PORT = 8642, 65535


def add_web_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--web", nargs="?", type=_port, const=DEFAULT_PORT, metavar="PORT",
        help="show the screen in a browser of this machine: print its address, with a token that it needs "
        f"(default: {DEFAULT_PORT}; 0: any free port)",
    )  # fmt: skip


def is_for_browser(options: argparse.Namespace) -> bool:
    """Return whether this process has to serve the screen to a browser.

    False in the processes that the server starts, because they draw the screen. Raises UsageError if another option
    asks for a report.
    """
    if options.web is None or is_in_browser():
        return False
    reports = {"headless": "--headless", "once": "--once", "duration": "--duration"}
    if asked := [option for name, option in reports.items() if getattr(options, name, None)]:
        raise UsageError(f"--web shows the screen, and {asked[0]} prints a report; leave out one of them")
    return True


def serve_screen(options: argparse.Namespace) -> int:
    """Serve the screen until a signal arrives. Returns the exit code. Raises UsageError without the extra `web`."""
    try:
        # Imported here, because only this option needs it. It takes a third of a second.
        from cbtop.web.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("aiohttp", "textual_serve"):
            raise
        raise UsageError("--web needs textual-serve; pip install 'cbtop[web]'") from error
    return serve(options.arguments, options.web, _tell)


def _tell(address: str) -> None:
    sys.stdout.write(f"{address}\nOpen this address in a browser of this machine. Ctrl-C ends it.\n")
    sys.stdout.flush()


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to {MAX_PORT}")
    return int(text)
