"""`cbtop man`: print the manual page, made of the help of every command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType

from cbtop.commands import COMMANDS, DEFAULT_COMMAND
from cbtop.commands.shared.names import one_of
from cbtop.version import __version__

DESCRIPTION = (
    "Print the manual page, for `man cbtop`. It has every command with its options and examples. With COMMAND, print "
    "the page of this command."
)
EPILOG = """\
examples:
  cbtop man | man -l -                                   read it
  cbtop man run | man -l -                               read the page of one command
  cbtop man > ~/.local/share/man/man1/cbtop.1            then `man cbtop`
"""
SUMMARY = "a live profiler for LLM inference and training, like top, in the terminal"
FILES = (
    ("~/.config/cbtop/config.toml", "permanent options"),
    ("~/.local/state/cbtop/sort.json", "the order of rows that was last chosen on the screen"),
    ("$XDG_RUNTIME_DIR/cbtop", "rings and catalogs of processes, and the daemon's socket; or $CBTOP_RUNTIME_DIR"),
)


class _Listed(argparse.ArgumentParser):
    """A parser that lists its arguments."""

    def listed(self) -> list[argparse.Action]:
        """Return the arguments that the help shows."""
        return [action for action in self._actions if action.help != argparse.SUPPRESS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "of", nargs="?", type=one_of("command", COMMANDS), metavar="COMMAND", help="a command, such as run"
    )


def run(options: argparse.Namespace) -> int:
    lines = _page() if options.of is None else _page_of(options.of)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _page() -> Iterator[str]:
    yield from _head("cbtop", SUMMARY)
    for words in ("[OPTION …]", "PID …", "FILE.cbtop", "COMMAND …"):
        yield from (f".B cbtop\n{_text(words)}", ".br")
    top = _command(DEFAULT_COMMAND)
    yield from (".SH DESCRIPTION", "Without a command, show what runs. A PID shows this process, a file its replay.")
    yield from (".SH OPTIONS", *_options(top), *_epilog(top.EPILOG), ".SH COMMANDS")
    for name, line in COMMANDS.items():
        command = _command(name)
        yield from (f".SS cbtop {_text(name)}", f"{_text(line[0].upper() + line[1:])}.", ".PP")
        yield from (_text(command.DESCRIPTION), *_options(command), *_epilog(command.EPILOG))
    yield ".SH FILES"
    for path, what in FILES:
        yield from (".TP", f".I {_text(path)}", _text(what))


def _page_of(name: str) -> Iterator[str]:
    command = _command(name)
    yield from _head(f"cbtop-{name}", COMMANDS[name])
    parser = argparse.ArgumentParser(prog=f"cbtop {name}", add_help=False)
    command.add_arguments(parser)
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    yield from (_text(usage), ".SH DESCRIPTION", _text(command.DESCRIPTION))
    yield from (".SH OPTIONS", *_options(command), *_epilog(command.EPILOG))
    yield from (".SH SEE ALSO", ".BR cbtop (1)")


def _head(name: str, summary: str) -> Iterator[str]:
    yield f'.TH {_text(name.upper())} 1 "" "cbtop {__version__}" "User Commands"'
    yield from (".SH NAME", f"{_text(name)} \\- {_text(summary)}", ".SH SYNOPSIS")


def _command(name: str) -> ModuleType:
    return import_module(f"cbtop.commands.{name.replace('-', '_')}")


def _options(command: ModuleType) -> Iterator[str]:
    parser = _Listed(add_help=False)
    command.add_arguments(parser)
    for action in parser.listed():
        yield from (".TP", f".B {_text(_signature(action))}", _text(_help(action)))


def _signature(action: argparse.Action) -> str:
    """Return an argument as a user writes it: `--format {text,json}`."""
    names: Sequence[str] = action.option_strings
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices and not action.metavar else metavar
    if not names:
        return value
    if not isinstance(action.nargs, int) and action.nargs == "?":
        value = f"[{value}]"
    takes_value = action.nargs != 0
    return ", ".join(names) + (f" {value.upper() if value == action.dest else value}" if takes_value else "")


def _help(action: argparse.Action) -> str:
    fields = {name: value for name, value in vars(action).items() if value != argparse.SUPPRESS}
    if action.choices:
        fields["choices"] = ", ".join(map(str, action.choices))
    return (action.help or "") % fields


def _epilog(text: str) -> Iterator[str]:
    if text:
        yield from (".PP", ".nf", *(_text(line) for line in text.rstrip().splitlines()), ".fi")


def _text(words: str) -> str:
    """Return a text for roff. A backslash, a minus sign and a leading dot or quote are escaped."""
    escaped = words.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped)
