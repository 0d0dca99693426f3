"""Reads the examples of a command's help."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from itertools import takewhile

from cbtop.commands import COMMANDS, DEFAULT_COMMAND


def examples_of(name: str) -> list[list[str]]:
    """Return the arguments of each example in a command's help, without remarks, pipes and other programs."""
    epilog = import_module(f"cbtop.commands.{name.replace('-', '_')}").EPILOG
    _, _, examples = epilog.partition("examples:\n")
    lines = takewhile(str.strip, examples.splitlines())
    commands = (re.split(r"\s{2,}|\s[|>]", line.strip())[0] for line in lines)
    calls = (shlex.split(command)[1:] for command in commands if command.startswith("cbtop"))
    found = [(call[0] if call[:1] and call[0] in COMMANDS else DEFAULT_COMMAND, call) for call in calls]
    return [call for command, call in found if command == name]
