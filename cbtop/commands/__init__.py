"""The subcommands, in the order `cbtop --help` lists them. Each is a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
from typing import Protocol

from cbtop.commands import daemon, demo, doctor, export, keys, ls, overhead, post_mortem, record, replay, top


class Command(Protocol):
    """What `cbtop.cli` needs of a command module."""

    HELP: str
    DESCRIPTION: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


COMMANDS: dict[str, Command] = {
    "demo": demo,
    "ls": ls,
    "record": record,
    "replay": replay,
    "export": export,
    "post-mortem": post_mortem,
    "daemon": daemon,
    "keys": keys,
    "overhead": overhead,
    "doctor": doctor,
}
DEFAULT_COMMAND: Command = top
