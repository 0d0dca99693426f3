"""`cbtop run`: start an unchanged program and show its torch models.

Every import delays the program. For `--quiet` and options with a value, this module imports only os and modules that
Python has already loaded, and otherwise also argparse and the screen.
"""

from __future__ import annotations

import _signal  # The public module `signal` would import enum, which takes a third of Python's start time.
import errno
import os
import sys

import cbtop.profiler
from cbtop.errors import UsageError
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.packing import LENT_MSGPACK, msgpack_directory
from cbtop.protocol.process import RUNS_VARIABLE, is_running, pid_namespace, run_name
from cbtop.protocol.runtime_directory import runtime_directory
from cbtop.protocol.signals import suppressed

# Only type checkers treat `TYPE_CHECKING` as true. Importing the real constant from `typing` takes longer than
# starting Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import NoReturn

DESCRIPTION = (
    "Run COMMAND and let `cbtop` show every torch model that COMMAND or its children call: layers, bricks, steps, "
    "prefill and decode, tokens, roofline. No code is edited. COMMAND keeps its terminal, signals, output and exit "
    "code, because this process becomes COMMAND."
)
EPILOG = """\
examples:
  cbtop run -- python serve.py                   then `cbtop`, in another terminal
  cbtop run --watch -- python generate.py        open the screen in this terminal
  cbtop run -- torchrun --nproc-per-node 2 train.py
  cbtop run --record run.cbtop -- python eval.py
  cbtop run --report run.html -- python eval.py  a report for a browser at the end: one file, without scripts
  cbtop run --overhead 0.2% -- uvicorn app:app   with less overhead
  cbtop run --quiet -- python batch.py           without a summary at the end
  cbtop run --libraries numpy,scipy -- python job.py    FFTs, solvers, products as bricks
  cbtop run --guard=stop --overhead 100% -- python train.py    stop at the first NaN or Inf in any step
  CBTOP_RUN=0 python helper.py                   in a script under `cbtop run`: do not show this child

One step in four is recorded until the cost of recording is known, then as many steps as --overhead allows, up to
every step. Every view shows this share. When COMMAND ends, a summary of at most ten lines is printed on stderr:
rate, step times, the costliest bricks, verdicts. If nothing could be shown, one line says why.
If no roofs are known for the model's threads, they are measured once, in the first quiet second of the machine (not
with --quiet, and not in CI).
Not shown: Python with -I, -E or -S, and children with another environment (without PYTHONPATH and CBTOP_RUN).
Put `cbtop run` before a wrapper: cbtop run -- opentelemetry-instrument python app.py. If a shell script puts a
directory with a sitecustomize first on PYTHONPATH, Python does not load cbtop: append that directory instead.
"""
# The options of `cbtop run` that take a value. Each option has the value's name in the help, the default, and the
# help text.
OPTIONS: dict[str, tuple[str, str | None, str]] = {
    "--overhead": (
        "PERCENT", None,
        "the most by which the steps of its models may slow down (default: 3%%; with --record and without an NVIDIA "
        "GPU: 100%%, which records every step)",
    ),
    "--record": ("FILE", None, "record COMMAND and its children into FILE, such as run.cbtop"),
    "--libraries": (
        "NAMES", None,
        "also time the calls of these libraries: numpy, scipy, sklearn, cupy; several separated by commas",
    ),
}  # fmt: skip
# The libraries with a table of functions, and the variable that tells the import hook their names.
LIBRARIES, LIBRARIES_VARIABLE = ("numpy", "scipy", "sklearn", "cupy"), "CBTOP_LIBRARIES"
RESIDUALS, RESIDUALS_VARIABLE = "--residuals", "CBTOP_RESIDUALS"
COUNTERS, COUNTERS_VARIABLE = "--counters", "CBTOP_COUNTERS"
QUIET = "--quiet"
GUARD = "--guard"
DEFAULT_GUARD = "log"
GUARD_VARIABLE = "CBTOP_GUARD"
DEFAULT_OVERHEAD, EVERY_STEP = "3%", "100%"
# If one of these files exists, the machine may have an NVIDIA GPU.
NVIDIA_DRIVERS = ("/proc/driver/nvidia", "/dev/dxg")
HOOK = os.path.join(os.path.dirname(cbtop.profiler.__file__), "instrument", "import_hook")
# A shell ends with these exit codes if a command is not found, or if it may not be executed.
NOT_FOUND, NOT_ALLOWED = 127, 126
MAX_MARK_CHARS = 80
# The name of a run's FIFO ends with this suffix. The import hook and the module `launched` contain the same suffix.
END_SUFFIX = ".end"
SHELL = "/bin/sh"
PYTHONS_LOCALES = ("C.UTF-8", "C.utf8", "UTF-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "cbtop run [--watch] [--quiet] [--guard[=WHAT]] [--overhead PERCENT] [--record FILE] "
        "[--report FILE] [--counters] [--libraries NAMES [--residuals]] -- COMMAND …"
    )
    parser.add_argument(
        "--watch", action="store_true",
        help="open the screen in this terminal: one view shows the output of COMMAND, whose input is empty; Ctrl-C "
        "goes to COMMAND; `q` leaves the screen, and COMMAND continues",
    )  # fmt: skip
    parser.add_argument(QUIET, action="store_true", help="print no summary when COMMAND ends, and measure no roofs")
    parser.add_argument(
        GUARD, nargs="?", const=DEFAULT_GUARD, metavar="WHAT",
        help="in recorded steps (with --overhead 100%%: in every step), name the first brick and layer whose output "
        "is NaN or Inf. WHAT: log (default), stop (COMMAND ends with exit code 4), dump or dump:DIRECTORY (save the "
        "brick's inputs), abs<=NUMBER (limit values, too); several separated by commas",
    )  # fmt: skip
    for name, (value, default, says) in OPTIONS.items():
        parser.add_argument(name, default=default, metavar=value, help=says)
    parser.add_argument(
        "--report", metavar="FILE",
        help="when COMMAND has ended, write an HTML report of the whole run into FILE, such as run.html; COMMAND is "
        "then a child of this process, and --overhead is as with --record",
    )  # fmt: skip
    parser.add_argument(
        RESIDUALS, action="store_true",
        help="with --libraries: check results in recorded calls: residuals of solvers and decompositions, Parseval, "
        "moments of normal random numbers; costs up to 1%% of the time",
    )  # fmt: skip
    parser.add_argument(
        COUNTERS, action="store_true",
        help="count page faults, context switches and, if the system permits it, instructions per cycle, cache and "
        "branch misses in a part of the bricks; costs up to a tenth of --overhead",
    )  # fmt: skip
    parser.add_argument("command", nargs="...", metavar="-- COMMAND …", help="the program")


def plain(arguments: Sequence[str]) -> tuple[list[str], float, str | None, bool, dict[str, str]] | None:
    """Parse a command line of options with a value, `--quiet`, `--guard=WHAT`, `--` and COMMAND, for `become`.

    None for any other command line, because that needs argparse.
    """
    given = {name: default for name, (_, default, _) in OPTIONS.items()}
    given[GUARD] = None
    quiet = residuals = counters = False
    words = iter(arguments)
    for word in words:
        if word == "--":
            break
        if word == QUIET:
            quiet = True
            continue
        if word == RESIDUALS:
            residuals = True
            continue
        if word == COUNTERS:
            counters = True
            continue
        name, has_value, value = word.partition("=")
        if name == GUARD and not has_value:
            return None  # `--guard` may have no value. Only argparse can parse that.
        value = value if has_value else next(words, "-")
        if name not in given or value.startswith("-"):
            return None
        given[name] = value
    command = list(words)
    try:
        record = given["--record"]
        settings = _settings(given[GUARD], given["--libraries"], residuals, counters)
        return (command, allowed_percent(given["--overhead"], record), record, quiet, settings) if command else None
    except UsageError:
        return None


def run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("run what? cbtop run -- python serve.py")
    overhead_percent = allowed_percent(options.overhead, options.report if options.record is None else options.record)
    settings = _settings(options.guard, options.libraries, options.residuals, options.counters)
    if options.watch:
        if options.report is not None:
            raise UsageError("--report and --watch exclude each other; watch with `cbtop` in another terminal")
        if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
            raise UsageError("--watch: the screen wants a terminal; watch it with `cbtop` in another one")
        # The modules of a screen are imported only here, because importing them takes a third of a second.
        from cbtop.commands.shared.program import Program
        from cbtop.commands.shared.show import settle_options

        settle_options(options)
        program = Program()
        if not program.is_child:
            from cbtop.commands.shared.watch import watch

            return watch(program, command[0], options)
    # This import costs nothing. The handlers in `options.signals` come from `signal`, so it is already loaded.
    import signal

    for number, found in options.signals.items():
        signal.signal(number, found)
    if options.report is not None:
        hold_standard_streams()
        # Imported here, because these modules load slowly.
        from cbtop.commands.shared.report_at_end import run_with_report

        def become_recorded(record: str, held: int) -> int:
            report = options.report if options.record is None else None
            return become(command, overhead_percent, record, options.quiet, settings, held, report=report)

        return run_with_report(become_recorded, options.report, options.record)
    return become(command, overhead_percent, options.record, options.quiet, settings)


def become(
    command: list[str],
    overhead_percent: float,
    record: str | None,
    quiet: bool,
    settings: dict[str, str],
    held: int | None = None,
    *,
    report: str | None = None,
) -> int:
    """Replace this process by `command`. If `record` is not None, the run is recorded into that file.

    Returns an exit code only if the command cannot be run. With `quiet`, no summary is printed when the command ends.
    `settings` has the variables for the guard and for libraries. A missing one is taken from the environment. The
    processes for the recording and the summary hold the descriptor `held` open until they are done. If the recording
    is temporary, they mention `report`, the file that is made of it, instead.
    """
    hold_standard_streams()
    said = []
    if isolating := isolating_option(command):
        said.append(f"Python's {isolating} keeps it from what lies on PYTHONPATH: this runs uninstrumented")
    additions: dict[str, str] = {}
    try:
        additions = _additions(overhead_percent)
        additions |= settings
    except (OSError, ProtocolError) as error:
        said.append(f"this runs uninstrumented: {error}")
    try:
        if record is not None and os.path.exists(record):
            _say(f"{record} exists: choose another name, or remove it")
            return 2
        if record is not None and not _record_beside(record, held, is_temporary=report is not None):
            return 2  # The recorder has already printed why it could not start.
    except OSError as error:
        _say(f"no recorder could be started: {error.strerror}")
        return 1
    if additions and not quiet:
        # Without a free descriptor, process or disk space, there is no process for the summary. Run the command
        # without one.
        with suppressed(OSError):
            mark = additions["CBTOP_RUN_ID"].partition(":")[2]
            _summarize_at_end(mark, _next_command(record, report), held)
    for line in said:  # Print these lines only now, because nothing can keep the command from running any longer.
        _say(line)
    # Python ignores SIGPIPE and SIGXFSZ. An ignored signal would stay ignored in the command, so restore the
    # defaults.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    os.environ.update(additions)
    if _has_pythons_locale():
        del os.environ["LC_CTYPE"]
    try:
        _execute(command)
    except OSError as error:
        is_there = not isinstance(error, FileNotFoundError)
        _say(f"{command[0]}: {error.strerror}" if is_there else f"there is no command {command[0]!r}")
        return NOT_ALLOWED if is_there else NOT_FOUND


def _execute(command: list[str]) -> NoReturn:
    """Replace this process by `command` with its environment, as execvp(3) does. Raises OSError if that fails."""
    if not command[0]:
        raise FileNotFoundError
    path = _found(command[0]) or command[0]
    try:
        os.execvp(path, command)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        os.execv(SHELL, [SHELL, path, *command[1:]])  # The file has no `#!` line, so run it with a shell.


def _has_pythons_locale() -> bool:
    """Return whether LC_CTYPE was set by Python at its start (PEP 538), not by the user."""
    if os.environ.get("LC_CTYPE") not in PYTHONS_LOCALES:
        return False
    with suppressed(OSError), open("/proc/self/environ", "rb") as given:
        return not any(variable.startswith(b"LC_CTYPE=") for variable in given.read().split(b"\0"))
    return False


def _record_beside(path: str, held: int | None = None, *, is_temporary: bool = False) -> bool:
    """Start a recorder that ends with this process, and wait until the recording has begun.

    It is detached, so that the command has no unexpected child. It has its own session, so that typed keys do not
    reach it. It reports its start on a separate descriptor, because stdout may have text of a `sitecustomize` or a
    .pth file.
    """
    begun, says = os.pipe()
    os.set_inheritable(says, True)
    command = [sys.executable, "-m", "cbtop", "record", "-o", path, "--beside", f"{os.getpid()}:{says}"]
    command += ["--temporary"] * is_temporary
    if _is_detached_child():
        if held is not None:
            os.set_inheritable(held, True)
        try:
            os.execv(command[0], command)
        finally:
            os._exit(0)
    os.close(says)
    with open(begun, "rb") as heard:
        return bool(heard.read(1))


def hold_standard_streams() -> None:
    """Open /dev/null for each closed standard stream, so that no other file gets its number.

    It is close-on-exec, so that the stream is closed in the command, too.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `number`


def _next_command(record: str | None, report: str | None) -> str:
    """Return what the summary of a run advises to do next."""
    if report is not None:
        return f"open {report} in a browser"
    return "cbtop" if record is None else f"cbtop replay {record}"


def _summarize_at_end(mark: str, next_command: str, held: int | None = None) -> None:
    """Start a process that prints a summary of the run when the command ends. Raises OSError if it cannot be started.

    It is not a child of the command. It waits on a FIFO next to the file that marks the run. It imports no module
    until a process of the run has recorded a step.
    """
    path, pid = mark + END_SUFFIX, os.getpid()
    os.mkfifo(path, 0o600)
    # `fifo` and `command` are close-on-exec.
    fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        command = os.pidfd_open(pid)
    except (AttributeError, OSError):  # The kernel is too old for `pidfd_open`, or the system is not Linux.
        command = None
    if _is_detached_child():
        try:
            from cbtop.commands.shared.run_end import summarize_at_end

            summarize_at_end(fifo, command, path, pid, next_command, held)
        finally:
            os._exit(0)


def _is_detached_child() -> bool:
    """Fork a process that is not our child and has its own session. Returns True in the new process. It has an empty
    stdin and stdout.

    A short-lived child of this process makes it and ends at once. Meanwhile SIGCHLD is ignored, so that the child's
    CPU time does not count as time of our children.
    """
    before = _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
    try:
        if between := os.fork():
            # SIGCHLD is ignored, so waitpid raises this error when the child has ended.
            with suppressed(ChildProcessError):
                os.waitpid(between, 0)
            return False
    finally:
        _signal.signal(_signal.SIGCHLD, before)
    is_detached = False
    try:
        os.setsid()
        with open(os.devnull, "r+b", buffering=0) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(nothing.fileno(), 1)
        os.set_inheritable(2, True)  # If stderr was closed, it is our /dev/null.
        is_detached = not os.fork()
    finally:
        if not is_detached:
            os._exit(0)
    return True


def isolating_option(command: Sequence[str]) -> str:
    """Return the option that keeps Python from importing cbtop, such as `-I`, or "".

    It may be in `command` or in the first line of its script. Python need not be the first word (`env A=B python
    -I`).
    """
    words = list(command)
    if not any(map(_is_python, words)):
        with suppressed(OSError), open(_found(command[0]) or command[0], "rb") as script:
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
            # The options -W and -X have a value. The value is the rest of this word, or the next word.
            if letter in "WX":
                _ = option[at:] or next(options, "")
                break
    return ""


def _is_python(word: str) -> bool:
    name = os.path.basename(word)
    return name.startswith("python") and not name.removeprefix("python").strip("0123456789.")


def _found(name: str) -> str:
    """Return the path of the command `name`, found as a shell does, or "" if it does not exist."""
    if os.path.dirname(name):
        return name
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def _additions(overhead_percent: float) -> dict[str, str]:
    """Return the variables to add to the command's environment.

    These variables contain the allowed overhead, the identity of the run, and the import hook.
    """
    directory = os.path.realpath(runtime_directory())
    namespace = pid_namespace() or 0
    for name in os.listdir(directory):
        if _is_of_a_killed_run(name, namespace):
            with suppressed(FileNotFoundError):  # Another `cbtop run` has already removed the file of the killed run.
                os.unlink(os.path.join(directory, name))
    name = run_name(os.getpid())
    nothing_yet = os.path.join(directory, name)
    os.close(os.open(nothing_yet, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return {
        "CBTOP_RUN": f"{overhead_percent:g}",
        "CBTOP_RUN_ID": f"{os.getpid()}:{nothing_yet}",
        RUNS_VARIABLE: " ".join([*os.environ.get(RUNS_VARIABLE, "").split(), name]),
        LENT_MSGPACK: msgpack_directory() or "",
        "PYTHONPATH": os.pathsep.join(filter(None, [HOOK, os.environ.get("PYTHONPATH")])),
    }


def _is_of_a_killed_run(name: str, namespace: int) -> bool:
    """Return whether this is a file that a killed run left in the runtime directory: its mark or its FIFO."""
    kind, *numbers = name.removesuffix(END_SUFFIX).split("-") if len(name) <= MAX_MARK_CHARS else [""]
    if kind != "run" or len(numbers) != 3 or not all([each.isascii() and each.isdecimal() for each in numbers]):
        return False
    in_namespace, pid, start = map(int, numbers)
    return in_namespace == namespace and not is_running(pid, start)


def _say(line: str) -> None:
    # The command must run even if the disk is full or nothing reads stderr, so ignore an error.
    with suppressed(OSError):
        if sys.stderr is not None:
            sys.stderr.write(f"cbtop: {line}\n")
            sys.stderr.flush()


def allowed_percent(overhead: str | None, record: str | None) -> float:
    """Return the allowed overhead in percent. Raises UsageError if `overhead` is not valid."""
    if overhead is None:
        overhead = DEFAULT_OVERHEAD if record is None else recorded_overhead()
    return _percent(overhead)


def _settings(guard: str | None, libraries: str | None, residuals: bool, counters: bool) -> dict[str, str]:
    """Return the variables for the guard (the check for wrong values such as NaN), for libraries and for counters.

    Raises UsageError if either is not valid.
    """
    settings = {}
    if guard is not None:
        # Imported here, because this import loads dataclasses, which takes 10 ms.
        from cbtop.profiler.guard_setting import guard_setting

        try:
            guard_setting(guard)
        except ValueError as error:
            raise UsageError(f"--{error}") from None
        settings[GUARD_VARIABLE] = guard
    if libraries is not None:
        names = libraries.split(",")
        unknown = [name for name in names if name not in LIBRARIES]
        if unknown:
            raise UsageError(
                f"--libraries: {unknown[0]!r} has no table of functions; expected {', '.join(LIBRARIES)}"
            )
        settings[LIBRARIES_VARIABLE] = libraries
    if residuals:
        if libraries is None:
            raise UsageError("--residuals checks calls of libraries: name them with --libraries numpy")
        settings[RESIDUALS_VARIABLE] = "1"
    if counters:
        settings[COUNTERS_VARIABLE] = "1"
    return settings


def recorded_overhead() -> str:
    """Return the overhead that a recording may have by default. Without a GPU, every step is recorded.

    On a GPU, recording every step of an eager model needs extra timestamps (stamps), which make the model wait for
    the host. With the smaller overhead, steps are recorded by their kernels.
    """
    return DEFAULT_OVERHEAD if any([os.path.exists(driver) for driver in NVIDIA_DRIVERS]) else EVERY_STEP


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0
    if not 0 < percent <= 100:
        raise UsageError(f"--overhead: {text!r} is no share above 0% and up to 100%")
    return percent
