"""`cbtop daemon`: read every ring of this user and publish, until told to stop."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from types import FrameType

from cbtop.commands.show import endpoint
from cbtop.daemon import Daemon
from cbtop.errors import UsageError
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import KeysError
from cbtop.protocol.keys import DAEMON_KEY, daemon_keys

HELP = "serve what runs to any number of viewers"
DESCRIPTION = (
    "Find every instrumented process of yours and publish what it records. Viewers start a daemon inside "
    "themselves where none runs; one of its own serves many viewers, and keeps what ended processes left."
)
EPILOG = """\
examples:
  cbtop daemon                               your own viewers, on this machine
  cbtop daemon --bind tcp://0.0.0.0:5555     viewers elsewhere whose keys are allowed: see cbtop keys
  cbtop daemon --bind tcp://127.0.0.1:5555   through ssh -L; without a key pair, every user of this machine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bind",
        type=endpoint,
        metavar="ENDPOINT",
        help="ipc:///path/to.sock or tcp://HOST:PORT (default: your own ipc socket)",
    )
    parser.add_argument(
        "--key", metavar="NAME", help=f"with tcp: the key pair to serve with (default: {DAEMON_KEY}; see cbtop keys)"
    )


def run(options: argparse.Namespace) -> int:
    address = options.bind or default_endpoint()
    stop = threading.Event()
    try:
        keys = daemon_keys(address, options.key)
        daemon = Daemon(address, keys=keys)
    except KeysError as error:
        raise UsageError(str(error)) from error
    caught: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    sys.stderr.write(f"cbtop daemon: serving {daemon.endpoint}; Ctrl-C stops it\n")
    if keys:
        sys.stderr.write(f"cbtop daemon: viewers need --server-key {keys.own.public.hex()}\n")
    elif address.startswith("tcp://"):
        sys.stderr.write(
            "cbtop daemon: without keys, every user of this machine can listen; cbtop keys new daemon ends that\n"
        )
    daemon.run(stop)
    return 128 + caught[0] if caught else 0
