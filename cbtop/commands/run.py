"""`cbtop run`: start a program whose torch models are shown, without a change to it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import cbtop.profiler
from cbtop.errors import UsageError
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.process import pid_namespace, process_start

DESCRIPTION = (
    "Run COMMAND, and let every torch model that it or its children call be shown by `cbtop`: layers, bricks, steps, "
    "prefill and decode, tokens, roofline. Nothing of it is edited. COMMAND keeps its terminal, its signals, its "
    "output and its exit code: this process becomes it."
)
EPILOG = """\
examples:
  cbtop run -- python serve.py                   then `cbtop`, in another terminal
  cbtop run --watch -- python generate.py        the screen beside it, in this one
  cbtop run -- torchrun --nproc-per-node 2 train.py
  cbtop run --record run.cbtop -- python eval.py
  cbtop run --overhead 0.2% -- uvicorn app:app   for less of its time
  CBTOP_RUN=0 python helper.py                   in a script that runs under it: leave this child alone

One step in four is recorded until the process knows what recording costs it, then so few that it costs no more than
--overhead; every view says which share that is. Where nothing could be shown, a line on stderr says why at the end.
Not reached: Python under -I, -E or -S, and children whose environment is their own (without PYTHONPATH, CBTOP_RUN).
"""
HOOK = Path(cbtop.profiler.__file__).parent / "instrument" / "import_hook"
NOT_FOUND, NOT_ALLOWED = 127, 126  # as a shell says it
_PYTHON = re.compile(r"python[0-9.]*")
_MARK = re.compile(r"run-([0-9]{1,20})-([0-9]{1,20})-([0-9]{1,20})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "cbtop run [--watch] [--overhead PERCENT] [--record FILE] -- COMMAND …"
    parser.add_argument(
        "--watch", action="store_true",
        help="open the screen beside it, in this terminal: what it writes is one of the views, it reads nothing, and "
        "Ctrl-C goes to it; `q` leaves the screen, and it goes on",
    )  # fmt: skip
    parser.add_argument(
        "--overhead", type=_percent, default=1.0, metavar="PERCENT",
        help="how much slower its models' steps may become, at most (default: 1%%; 100%%: record every step)",
    )  # fmt: skip
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="record it and its children into FILE, such as run.cbtop"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="the program")


def run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("run what? cbtop run -- python serve.py")
    if options.watch:
        if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
            raise UsageError("--watch: the screen wants a terminal; watch it with `cbtop` in another one")
        from cbtop.commands.shared.program import Program  # what a screen needs takes a third of a second to load

        program = Program()
        if not program.is_child:
            from cbtop.commands.shared.watch import watch

            return watch(program, command[0])
    if isolating := isolating_option(command):
        _say(f"Python's {isolating} keeps it from what lies on PYTHONPATH: this runs uninstrumented")
    try:
        environment = os.environ | _additions(options.overhead)
    except (OSError, ProtocolError) as error:
        _say(f"this runs uninstrumented: {error}")
        environment = os.environ.copy()
    if options.record and not _record_beside(options.record):
        return 2  # the recorder has said why
    for number, found in options.signals.items():
        signal.signal(number, found)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would what it becomes
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        is_there = not isinstance(error, FileNotFoundError)
        _say(f"{command[0]}: {error.strerror}" if is_there else f"there is no command {command[0]!r}")
        return NOT_ALLOWED if is_there else NOT_FOUND


def _record_beside(path: Path) -> bool:
    """Start a recorder that ends when this process does, and wait until it has begun; False where it cannot.

    It is nobody's child, and in a session of its own: the command finds no process that it did not start, and what is
    typed does not reach the recorder.
    """
    command = [sys.executable, "-m", "cbtop", "record", "-o", str(path), "--beside", str(os.getpid())]
    begun, says = os.pipe()
    between = os.fork()
    if not between:
        try:
            os.setsid()
            os.dup2(says, 1)
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            if not os.fork():
                os.execv(command[0], command)
        finally:
            os._exit(0)
    os.close(says)
    os.waitpid(between, 0)
    with open(begun, "rb") as heard:
        return bool(heard.read(1))


def isolating_option(command: Sequence[str]) -> str:
    """The option of Python, in `command` or in the first line of a script, with which it imports nothing of ours.

    Python may stand behind others, as in `env A=B python -I`.
    """
    words = list(command)
    if not any(map(_is_python, words)):
        with suppress(OSError), open(shutil.which(command[0]) or command[0], "rb") as script:
            first_line = script.readline(1024).decode(errors="replace")
            words = first_line.removeprefix("#!").split() if first_line.startswith("#!") else []
    options = iter(words)
    if not any(map(_is_python, options)):
        return ""
    for option in options:
        if not option.startswith("-") or option.startswith("--"):
            break
        for at, letter in enumerate(option[1:], 2):
            if letter in "IES":
                return f"-{letter}"
            if letter in "cm":
                return ""
            if letter in "WX":  # what follows is its value
                _ = option[at:] or next(options, "")
                break
    return ""


def _is_python(word: str) -> bool:
    return _PYTHON.fullmatch(Path(word).name) is not None


def _additions(overhead_percent: float) -> dict[str, str]:
    """What the command and its children find beside our environment: how much we may cost, and the import hook."""
    directory = runtime_dir()
    namespace = pid_namespace() or 0
    for mark in directory.glob(f"run-{namespace}-*"):  # of runs that were killed
        if (ended := _MARK.fullmatch(mark.name)) and process_start(int(ended[2])) != int(ended[3]):
            mark.unlink(missing_ok=True)
    nothing_yet = directory.absolute() / f"run-{namespace}-{os.getpid()}-{process_start(os.getpid()) or 0}"
    nothing_yet.touch(mode=0o600)
    return {
        "CBTOP_RUN": f"{overhead_percent:g}",
        "CBTOP_RUN_ID": f"{os.getpid()}:{nothing_yet}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH")])),
    }


def _say(line: str) -> None:
    sys.stderr.write(f"cbtop: {line}\n")
    sys.stderr.flush()


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0
    if not 0 < percent <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no share above 0% and up to 100%")
    return percent
