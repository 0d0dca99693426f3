"""`cbtop daemon`: read every ring of this user and publish the data, until stopped."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from types import FrameType

from cbtop.commands.shared.show import endpoint
from cbtop.daemon.daemon import Daemon
from cbtop.daemon.history import MAX_HISTORY_BYTES, MAX_HISTORY_S
from cbtop.errors import UsageError
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import KeysError
from cbtop.protocol.keys import DaemonKeys, daemon_keys
from cbtop.protocol.vocabulary import DAEMON_KEY
from cbtop.telemetry import SERVICES, serving

DESCRIPTION = (
    "Find all your instrumented processes and publish their records, and the load of GPUs and processors while a "
    "viewer listens. If no daemon runs, a viewer starts one inside itself. This command starts a separate one: it "
    "serves up to 64 viewers, and keeps the data of ended processes."
)
EPILOG = """\
examples:
  cbtop daemon                               for your viewers, also through ssh -L here.sock:there.sock
  cbtop daemon --bind tcp://0.0.0.0:5555     for other machines whose keys are allowed: see cbtop keys
  cbtop daemon --bind tcp://127.0.0.1:5555   for every user of this machine, if there is no key pair
"""

PARENT_CHECK_S = 0.25
MAX_MINUTES = 60
# Seconds to go on after the parent process has ended, so that viewers receive its last state.
LAST_WORDS_S = 1.0


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
    parser.add_argument(
        "--history", type=_minutes, default=MAX_HISTORY_S / 60, metavar="MINUTES",
        help=f"length of the history that the key w of a viewer saves, at most {MAX_HISTORY_BYTES >> 20} MiB; "
        f"0: no history (default: {MAX_HISTORY_S / 60:g})",
    )  # fmt: skip
    for name, service in SERVICES.items():
        parser.add_argument(f"--{name}", type=service.address, metavar=service.METAVAR, help=service.HELP)
    # --parent is the id of a parent process. The daemon ends when that process ends.
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    address = options.bind or default_endpoint()
    stop = threading.Event()
    try:
        keys = daemon_keys(address, options.key)
        daemon = Daemon(address, keys=keys, history_s=60 * options.history)
    except KeysError as error:
        raise UsageError(str(error)) from error
    caught: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    with serving(daemon.endpoint, keys, {name: getattr(options, name) for name in SERVICES}) as lines:
        if options.parent is None:
            for line in (f"serving {daemon.endpoint}; Ctrl-C stops it", *_who_may_listen(address, keys), *lines):
                sys.stderr.write(f"cbtop daemon: {line}\n")
        else:
            _stay_beside(options.parent, stop)
        daemon.run(stop)
    return 128 + caught[0] if caught else 0


def _who_may_listen(address: str, keys: DaemonKeys | None) -> list[str]:
    if keys:
        return [f"viewers need --server-key {keys.own.public.hex()}"]
    if address.startswith("tcp://"):
        return ["without keys, every user of this machine can listen; cbtop keys new daemon ends that"]
    return []


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_MINUTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 0 to {MAX_MINUTES}")
    return value


def _stay_beside(host: int, stop: threading.Event) -> None:
    """Serve until the parent process has ended. `host` is the expected id of our parent. The daemon closes its copies
    of the stdin, stdout and stderr of `host`.
    """
    # Ctrl-C in a terminal reaches this process and its parent (the host). Only the parent decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Readers of the parent's stderr wait until every copy is closed, so close ours.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def watch() -> None:
        while os.getppid() == host:
            time.sleep(PARENT_CHECK_S)
        time.sleep(LAST_WORDS_S)
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
