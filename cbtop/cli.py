"""The command line. Finds the command and runs it. If it raises an error, the user gets one line and an exit code.

Exit codes: 0 ran, data seen · 1 runtime error · 2 usage or bad model · 3 no publisher or no data within the timeout ·
4 a check failed · 5 data not trustworthy · 129, 130, 143 hang-up, interrupt, terminate · 141 broken pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TextIO, cast

from cbtop.commands import COMMANDS, DEFAULT_COMMAND, NEED_ENGINE
from cbtop.compute.errors import ComputeError
from cbtop.errors import CbtopError
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.limits import memory_limit, reason
from cbtop.text import ascii_signs
from cbtop.version import __version__

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Command(Protocol):
    """The interface of the modules in `cbtop.commands`, one for each subcommand.

    If a module has the attribute TAKES_COMMAND, the words after `--` are passed to the module in `options.command`.
    The attribute is the end of the usage line, such as `[-- COMMAND …]`.
    """

    DESCRIPTION: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


STDOUT = "standard output"
HELP, HELP_OPTION = "help", "--help"
# as in `cbtop.protocol.recording.SUFFIX`; importing that would load msgpack
RECORDING_SUFFIX = ".cbtop"
DESCRIPTION = "Watch models that run or train, brick by brick. Each number is measured, or labelled as derived."
_FORMS = ("cbtop COMMAND …", f"cbtop FILE{RECORDING_SUFFIX} …")  # the forms of `cbtop` besides its own options


def main(argv: Sequence[str] | None = None) -> int:
    """Run `cbtop` with `argv` (default: the arguments of the process), and return the exit code."""
    if sys.stdout is None:
        return _fail("standard output is closed; there is nowhere to print to", 1)
    for stream in (sys.stdout, sys.__stderr__):  # Reports are written to stdout, and the screen is drawn on stderr.
        if isinstance(stream, io.TextIOWrapper):
            # Write special signs in ASCII only on a terminal. Text for a file or another program stays unchanged.
            is_ascii = stream.isatty() and ascii_signs.are_wanted()
            stream.reconfigure(encoding="ascii" if is_ascii else None, errors=ascii_signs.ERRORS)
    _name_errors_of(sys.stdout)
    debug = False
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        command, options = _parsed(arguments)
        options.arguments = arguments  # `--web` starts the same command again, once for each tab
        debug = options.debug
        logging.basicConfig(format="cbtop: %(message)s", level=logging.DEBUG if debug else logging.WARNING)
        # `cbtop run` restores the previous handlers of these signals before the process becomes the user's program.
        options.signals = {
            number: signal.signal(number, _exit_on_signal) for number in (signal.SIGTERM, signal.SIGHUP)
        }
        code = command.run(options)
        sys.stdout.flush()  # Write the buffered output now. An error in the flush at exit could not be reported.
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe. At exit, Python flushes stdout again, and this flush would fail. So replace
        # stdout by /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if debug:
            raise
        if error.filename == STDOUT:
            with contextlib.suppress(OSError):
                # At exit, Python flushes stdout again, and this flush would also fail. So replace stdout by
                # /dev/null.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _fail(f"{error.filename}: {reason(error)}" if error.filename else reason(error), 1)
    except MemoryError:
        if debug:
            raise
        return _fail(f"there is not enough memory for that{memory_limit()}", 1)
    except (CbtopError, ProtocolError, ComputeError) as error:
        if debug:
            raise
        return _fail(f"{error}{_nearest_file(error)}", error.exit_code if isinstance(error, CbtopError) else 1)


def _nearest_file(error: BaseException | None) -> str:
    """Return a hint to the recording with the name nearest to a missing one, or "" if no name is near."""
    while error is not None and not isinstance(error, FileNotFoundError):
        error = error.__cause__
    if error is None or not str(error.filename).endswith(RECORDING_SUFFIX):
        return ""
    # This module is imported only to report an error, because every import at the top of this file delays all
    # commands.
    from cbtop.commands.shared.names import nearest_recording

    found = nearest_recording(Path(error.filename))
    return f"; did you mean {found}?" if found else ""


def _name_errors_of(stdout: TextIO) -> None:
    """Give errors in writing to `stdout` the file name STDOUT, because Python gives them none."""
    buffer = getattr(stdout, "buffer", None)
    # If Python runs with -u (unbuffered), `buffer` is already the raw file.
    raw: Any = getattr(buffer, "raw", buffer)
    if not isinstance(raw, io.FileIO):
        return
    write = raw.write

    def named_write(data: Any) -> int | None:
        try:
            return write(data)
        except OSError as error:
            error.filename = STDOUT
            raise

    setattr(raw, "write", named_write)  # noqa: B010 - mypy does not allow assigning a method


def _fail(message: str, exit_code: int) -> int:
    print(f"cbtop: {_in_one_line(message)}", file=sys.stderr)  # noqa: T201
    return exit_code


def _in_one_line(message: str) -> str:
    """Return an error message with its unprintable characters escaped. A name in the message may contain such
    characters.
    """
    # This module is imported only to report an error, because the import takes 40 ms.
    from cbtop.profiler.analysis.graph.nodes import printable

    return printable(message)


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, with the `--help` command to try at its end. Raises an
    error if the help cannot be written.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {_in_one_line(message)}\ntry: {self.prog} --help\n")

    def options(self) -> list[str]:
        """Return the long options that the help shows."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings if name.startswith("--")]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for a wrong value, and name the nearest choice of `action`."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            # This module is imported only to report an error, because every import at the top of this file delays all
            # commands.
            from cbtop.commands.shared.names import nearest

            found = nearest(str(value), map(str, action.choices or ()))
            hint = f"; did you mean {found}? (choose" if found else " (choose"
            raise argparse.ArgumentError(action, error.message.replace(" (choose", hint, 1)) from error

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        (file or sys.stderr).write(message)
        sys.stdout.flush()


def _parsed(arguments: list[str]) -> tuple[Command, argparse.Namespace]:
    arguments = _in_full(arguments)
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    command = _load(name or DEFAULT_COMMAND)
    parser = _parser(command, name)
    words, own = arguments[1:] if name else arguments, []
    if getattr(command, "TAKES_COMMAND", False) and "--" in words:
        cut = words.index("--")
        words, own = words[:cut], words[cut + 1 :]
    options, unknown = parser.parse_known_args(words)
    if getattr(command, "TAKES_COMMAND", False):
        options.command = own
    if unknown:
        hint = _hint(parser, unknown) or ("" if name else f"; commands come first: {', '.join(COMMANDS)}")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if name in NEED_ENGINE:
        # This module is imported only if a command needs it, because every import at the top of this file delays all
        # commands.
        from cbtop.commands.shared.engine import require_engine

        require_engine(f"cbtop {name}")
    return command, options


def _hint(parser: _Parser, unknown: Sequence[str]) -> str:
    """Return a hint to the option that is nearest to the first unknown one, or "" if no option is near."""
    # This module is imported only to report an error, because every import at the top of this file delays all
    # commands.
    from cbtop.commands.shared.names import nearest

    option = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
    found = nearest(option, parser.options()) if option else ""
    return f"; did you mean {found}?" if found else ""


def _in_full(arguments: list[str]) -> list[str]:
    """Replace `help [COMMAND]` by `[COMMAND] --help`, a recording by its replay, and process ids by `--source`.

    Exits with an error if the command does not exist.
    """
    first, *rest = arguments or [""]
    if first == HELP:
        if len(rest) > 1:
            _Parser(prog="cbtop").error(f"unrecognized arguments: {' '.join(rest[1:])}")
        return [*_in_full(rest), HELP_OPTION]
    if first.endswith(RECORDING_SUFFIX):
        return ["replay", *arguments]
    if first.isdecimal():
        pids = list(takewhile(str.isdecimal, arguments))
        return [*(f"--source={pid}" for pid in pids), *arguments[len(pids) :]]
    if first and not first.startswith("-") and first not in COMMANDS:
        # This module is imported only to report an error, because every import at the top of this file delays all
        # commands.
        from cbtop.commands.shared.names import file_hint, unknown

        _Parser(prog="cbtop").error(file_hint(first) or unknown("command", first, [*COMMANDS, HELP]))
    return arguments


def _load(name: str) -> Command:
    return cast(Command, import_module(f"cbtop.commands.{name.replace('-', '_')}"))


def _parser(command: Command, name: str | None) -> _Parser:
    others = "\n".join(f"  {key:<13}{line}" for key, line in COMMANDS.items())
    parser = _Parser(
        prog=f"cbtop {name}" if name else "cbtop",
        description=textwrap.fill(command.DESCRIPTION if name else DESCRIPTION, _help_width()),
        epilog=command.EPILOG if name else f"commands (cbtop help COMMAND):\n{others}\n\n{command.EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"cbtop {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    command.add_arguments(parser)
    if parser.usage is None:
        options = parser.format_usage().removeprefix("usage: ").rstrip()
        ends = getattr(command, "TAKES_COMMAND", "")
        forms = [f"{options} {ends}".rstrip()] if name else [*_FORMS, options]
        parser.usage = "\n       ".join(forms).replace("%", "%%")
    return parser


def _help_width() -> int:
    """Return the width in cells of help texts. It is the width that argparse uses."""
    return max(11, shutil.get_terminal_size().columns - 2)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
