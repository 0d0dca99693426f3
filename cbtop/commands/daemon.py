"""`cbtop daemon`: read every ring of this user and publish, until told to stop."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from types import FrameType

from cbtop.commands.show import endpoint
from cbtop.daemon import Daemon
from cbtop.protocol.endpoint import default_endpoint

HELP = "serve what runs to any number of viewers"
DESCRIPTION = (
    "Find every instrumented process of yours and publish what it records. Viewers start a daemon inside "
    "themselves where none runs; one of its own serves many viewers, and keeps what ended processes left."
)
EPILOG = ""

PARENT_CHECK_S = 0.25
LAST_WORDS_S = 1.0  # a sidecar outlives its host so long: viewers hear how it ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bind",
        type=endpoint,
        metavar="ENDPOINT",
        help="ipc:///path/to.sock or tcp://127.0.0.1:PORT (default: your own ipc socket)",
    )
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # serve until this process is no longer ours


def run(options: argparse.Namespace) -> int:
    address = options.bind or default_endpoint()
    stop = threading.Event()
    daemon = Daemon(address)
    caught: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    if options.parent is None:
        sys.stderr.write(f"cbtop daemon: serving {address}; Ctrl-C stops it\n")
    else:
        _stay_beside(options.parent, stop)
    daemon.run(stop)
    return 128 + caught[0] if caught else 0


def _stay_beside(host: int, stop: threading.Event) -> None:
    """Serve as long as the process `host` is our parent, and hold nothing of its terminal or pipes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both: the host decides
    # Whoever reads the host's stderr to its end must not wait for us.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def watch() -> None:
        while os.getppid() == host:
            time.sleep(PARENT_CHECK_S)
        time.sleep(LAST_WORDS_S)
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
