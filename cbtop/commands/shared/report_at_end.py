"""Run a command as a child process, and write an HTML report of its recording when it has ended."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import BinaryIO

from cbtop.errors import CbtopError, UsageError
from cbtop.protocol.limits import reason

STDERR = 2
# A terminal sends these signals to the command, too. This process must outlive them, because it writes the report.
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
# These signals are sent to this process alone, so they are passed on.
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_with_report(become: Callable[[str, int], int], report: str, record: str | None) -> int:
    """Run a command, and write the file `report` when it has ended. Returns the exit code of the command.

    `become(recording, held)` is called in a child process, and replaces the child by the command. The recorder keeps
    the descriptor `held` open until the recording is complete. `record` is the path of the recording, or None for a
    temporary file. If the command ended by a signal, this process ends by the same signal.
    """
    with ExitStack() as opened:
        out = opened.enter_context(_created(report))
        if record is None:
            directory = opened.enter_context(TemporaryDirectory(prefix="cbtop-"))
            recording = os.path.join(directory, "run.cbtop")
        else:
            recording = record
        reading, held = os.pipe()
        status = _run(lambda: become(recording, held))
        os.close(held)
        with open(reading, "rb") as end:
            end.read()  # returns when the recorder and the summary have closed the other end
        _write(out, report, recording)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _end_by(-code)
    return code


def _created(path: str) -> BinaryIO:
    """Create the report before the command runs. Raises UsageError if that fails, or if the file exists."""
    try:
        return open(path, "xb")
    except FileExistsError:
        raise UsageError(f"{path} exists: choose another name, or remove it") from None
    except OSError as error:
        raise UsageError(f"--report {path}: {reason(error)}") from error


def _run(become: Callable[[], int]) -> int:
    """Run `become` in a child process, and pass signals on to it. Returns the status of the ended child."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {*FROM_TERMINAL, *PASSED_ON})
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            code = become()
        finally:
            os._exit(code)

    def pass_on(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for each in PASSED_ON:
        signal.signal(each, pass_on)
    for each in FROM_TERMINAL:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    _, status = os.waitpid(pid, 0)
    return status


def _write(out: BinaryIO, report: str, recording: str) -> None:
    """Write the report, and name the file in the last line. Remove the file if there is nothing to report."""
    # Imported here, because reports load slowly, and the command should not wait for them.
    from cbtop.commands.shared.html_file import document_of

    try:
        document, damage = document_of(Path(recording))
        out.write(document)
        out.flush()
    except (CbtopError, OSError) as error:
        os.unlink(report)
        why = reason(error) if isinstance(error, OSError) else "no process of the command has recorded a step"
        _say(f"{report} is not written: {why}")
        return
    if damage:
        _say(damage)
    _say(f"report: {report}")


def _say(line: str) -> None:
    """Write a line to stderr, if that is possible. A line in Python's buffer could change the exit code."""
    with suppress(OSError):
        os.write(STDERR, f"cbtop: {line}\n".encode(errors="replace"))


def _end_by(number: int) -> None:
    """End this process by the signal that has ended the command. The command has already dumped its core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
