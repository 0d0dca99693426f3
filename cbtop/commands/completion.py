"""`cbtop completion`: print the script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from cbtop.commands import COMMANDS, DEFAULT_COMMAND
from cbtop.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = "Print a script that completes commands, options and files. It needs `pip install 'cbtop[completion]'`."
EPILOG = """\
examples:
  cbtop completion bash > ~/.local/share/bash-completion/completions/cbtop
  cbtop completion zsh > ~/.zfunc/_cbtop       with `fpath+=~/.zfunc` before compinit in ~/.zshrc
  cbtop completion fish > ~/.config/fish/completions/cbtop.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise UsageError("cbtop completion needs shtab; pip install 'cbtop[completion]'") from error
    parser = argparse.ArgumentParser(prog="cbtop")
    _add_command(parser, DEFAULT_COMMAND, shtab.FILE)
    commands = parser.add_subparsers()
    for name, line in COMMANDS.items():
        _add_command(commands.add_parser(name, help=line), name, shtab.FILE)
    script = shtab.complete(parser, options.shell)
    if options.shell == "zsh":
        # After a command, only its own options count. shtab leaves the options of `cbtop` valid, so `cbtop export
        # --format` would complete the formats of `cbtop --format`.
        script = re.sub(r"\(': (:_shtab_cbtop\w*_commands')", r"('(-): \1", script)
    sys.stdout.write(script + "\n")
    return 0


def _add_command(parser: argparse.ArgumentParser, name: str, file: Mapping[str, object]) -> None:
    """Add the arguments of `cbtop completion`. `file` is the completion of arguments that are paths."""
    import_module(f"cbtop.commands.{name.replace('-', '_')}").add_arguments(parser)
    for action in parser._actions:
        if action.type is Path or str(action.metavar).startswith("FILE"):
            action.complete = file  # type: ignore[attr-defined]  # shtab reads this attribute
