"""`cbtop daemon`: read every ring of this user and publish, until told to stop."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from types import FrameType

from cbtop.commands.show import endpoint
from cbtop.daemon import Daemon
from cbtop.protocol.endpoint import default_endpoint
from cbtop.telemetry import EXPORTERS, exporting

HELP = "serve what runs to any number of viewers"
DESCRIPTION = (
    "Find every instrumented process of yours and publish what it records. Viewers start a daemon inside "
    "themselves where none runs; one of its own serves many viewers, and keeps what ended processes left."
)
EPILOG = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bind",
        type=endpoint,
        metavar="ENDPOINT",
        help="ipc:///path/to.sock or tcp://127.0.0.1:PORT (default: your own ipc socket)",
    )
    for name, exporter in EXPORTERS.items():
        parser.add_argument(f"--{name}", type=exporter.address, metavar=exporter.METAVAR, help=exporter.HELP)


def run(options: argparse.Namespace) -> int:
    address = options.bind or default_endpoint()
    stop = threading.Event()
    caught: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    with exporting(address, {name: getattr(options, name) for name in EXPORTERS}) as lines:
        daemon = Daemon(address)
        for line in (f"serving {address}; Ctrl-C stops it", *lines):
            sys.stderr.write(f"cbtop daemon: {line}\n")
        daemon.run(stop)
    return 128 + caught[0] if caught else 0
