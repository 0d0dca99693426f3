"""Run a command as a child process, and write an HTML report of its recording when it has ended."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from cbtop.errors import CbtopError, UsageError
from cbtop.protocol.limits import reason

STDERR = 2
# This process must outlive these signals, because it writes the report. It passes them on to the command. A terminal
# sends its signals to the command, too, so these are not passed on.
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
PASSED_ON = (*FROM_TERMINAL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
    # Children of a process that ignores SIGCHLD leave no status.
    usual = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.signal(signal.SIGCHLD, usual)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            code = become()
        finally:
            os._exit(code)
    status = _wait(pid)
    for each in PASSED_ON:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return status


def _wait(pid: int) -> int:
    """Pass signals on to the child `pid` until it ends, and return its status. The signals must be blocked."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        number = _next_to_pass_on()
        if number is not None:
            os.kill(pid, number)


def _next_to_pass_on() -> int | None:
    """Wait for a signal, and return its number. Returns None if the command has received it, too, or has ended."""
    if not hasattr(signal, "sigwaitinfo"):  # as on macOS, where the sender of a signal is unknown
        number = signal.sigwait({*PASSED_ON, signal.SIGCHLD})
        return None if number in (*FROM_TERMINAL, signal.SIGCHLD) else number
    signal_info = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
    # The code of a signal from a process is at most 0. Signals from a terminal are sent by the kernel to all of its
    # processes.
    is_to_pass_on = signal_info.si_code <= 0 and signal_info.si_signo != signal.SIGCHLD
    return signal_info.si_signo if is_to_pass_on else None


def _write(out: BinaryIO, report: str, recording: str) -> None:
    """Write the report, and name the file in the last line. Remove the file if there is nothing to report."""
    # Imported here, because reports load slowly, and the command should not wait for them.
    from cbtop.commands.shared.html_file import document_of
    from cbtop.exporters.recorded import not_closed

    try:
        document, damage, is_closed = document_of(Path(recording))
        out.write(document)
        out.flush()
    except (CbtopError, OSError) as error:
        os.unlink(report)
        why = reason(error) if isinstance(error, OSError) else "no process of the command has recorded a step"
        _say(f"{report} is not written: {why}")
        return
    if not is_closed:
        _say(not_closed(recording))
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
