"""Get runs to compare from a recording, a file of runs, a running process or a command."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from cbtop.commands.shared.interrupts import noted_interrupt
from cbtop.commands.shared.process_group import end_group
from cbtop.commands.shared.progress import ProgressLine
from cbtop.commands.shared.show import add_connect_arguments, positive_seconds, viewer_keys
from cbtop.errors import CbtopError, NoDataError, UsageError
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.errors import KeysError, RecordingError

if TYPE_CHECKING:  # imported for types only, because numpy and zmq load slowly
    from cbtop.client.stream_recorder import StreamRecorder
    from cbtop.comparison.runs import Run

RUNTIME_VARIABLE = "CBTOP_RUNTIME_DIR"
POLL_MS = 100
ANSWER_WITHIN_S = 5.0
READ_ON_S = 5.0  # Read for at most this many seconds after a command has ended. The daemon reads four times a second.
MAX_LIVE_BYTES = 1 << 30
DEFAULT_LIVE_S = 10.0
WHERE = "a recording, a file of runs, or the pid of a process that runs"


class OverdueError(CbtopError):
    """A command was ended because it had reached its time limit."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a command.

    By default, the command runs in the current directory and environment, with its output on stderr and without a
    time limit.
    """

    directory: Path | None = None
    # environment variables that the command gets in addition to this process's variables
    environment: Mapping[str, str] = field(default_factory=dict)
    without: Collection[str] = ()  # environment variables of this process that the command does not get
    output: int | None = None  # file descriptor for the command's stdout and stderr
    # Whether the command has its own session and no input. Ctrl-C then reaches only cbtop, which ends the command.
    is_apart: bool = False
    until_s: float = inf  # The command is ended at this time on the monotonic clock, in seconds.


HERE = Launch()


def add_source_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses one of several recorded processes."""
    parser.add_argument(
        "--source", metavar="WHICH",
        help="of several processes this one: its pid, rank=N or its key in `cbtop ls`",
    )  # fmt: skip


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the recordings or processes to compare, and choose the runs in them."""
    add_source_argument(parser)
    parser.add_argument(
        "--duration", type=positive_seconds, default=DEFAULT_LIVE_S, metavar="SEC",
        help=f"of a process that runs record so long (default: {DEFAULT_LIVE_S:g})",
    )  # fmt: skip
    add_connect_arguments(parser)


def runs_of(where: str, options: argparse.Namespace) -> list[Run]:
    """Return the runs in `where`. A file of runs may contain several runs.

    Raises UsageError if `where` is invalid, or if a recording has several processes and the options name none. Raises
    NoDataError if nothing was recorded.
    """
    from cbtop.feeds.run_reader import only_run, saved_runs

    path = Path(where)
    if where.isdecimal() and not path.exists():
        with TemporaryDirectory(prefix="cbtop-") as directory:
            live = Path(directory) / f"pid {where}"
            _record(live, options, options.duration)
            return [only_run(live, options.source or where)]
    return saved_runs(path, options.source)


def run_of_command(
    command: Sequence[str], title: str, options: argparse.Namespace, name: str, launch: Launch = HERE
) -> Run:
    """Run `command` and record all of it, without other processes.

    The machine's pace is measured before and after. Output goes to stderr by default, because stdout is for the
    report. Raises CbtopError with `title` if the command fails, and OverdueError at its time limit.
    """
    from cbtop.commands.shared.machine_pace import machine_pace
    from cbtop.feeds.run_reader import only_run

    with TemporaryDirectory(prefix="check-", dir=runtime_dir()) as directory:
        before = os.environ.get(RUNTIME_VARIABLE)
        os.environ[RUNTIME_VARIABLE] = directory
        try:
            path = Path(directory) / name
            before_it = machine_pace()
            _record_command(command, title, options, path, launch)
            return replace(only_run(path, options.source), paces=(before_it, machine_pace()))
        finally:
            if before is None:
                del os.environ[RUNTIME_VARIABLE]
            else:
                os.environ[RUNTIME_VARIABLE] = before


def _record_command(
    command: Sequence[str], title: str, options: argparse.Namespace, path: Path, launch: Launch
) -> None:
    """Run `command`, and record all processes into `path` until the command has ended.

    Raises CbtopError, with `title` in the message, if the command fails.
    """
    own = {name: value for name, value in os.environ.items() if name not in launch.without}
    output = sys.stderr.fileno() if launch.output is None else launch.output
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL if launch.is_apart else None, stdout=output, stderr=launch.output,
        cwd=launch.directory, env={**own, **launch.environment}, start_new_session=launch.is_apart,
    )  # fmt: skip
    try:
        _record(path, options, None, process, launch.until_s)
    finally:
        if launch.is_apart:
            end_group(process)
        elif process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    if process.returncode:
        raise CbtopError(f"{title} ended with exit code {process.returncode}: there is no run to judge")


def _record(
    path: Path,
    options: argparse.Namespace,
    seconds: float | None,
    process: subprocess.Popen[bytes] | None = None,
    overdue_s: float = inf,
) -> None:
    """Record all sources into `path`, for `seconds` or until `process` has ended and all its data was read.

    Raises OverdueError when the monotonic clock reaches `overdue_s`.
    """
    from cbtop.client.stream_recorder import StreamRecorder

    try:
        recorder = StreamRecorder(path, options.connect, MAX_LIVE_BYTES, keys=viewer_keys(options))
    except (KeysError, RecordingError) as error:
        raise UsageError(str(error)) from error
    line = ProgressLine(sys.stderr)
    begun_s = time.monotonic()
    until_s = None if seconds is None else begun_s + seconds
    try:
        with noted_interrupt() as is_interrupted:
            while until_s is None or time.monotonic() < until_s:
                if is_interrupted():
                    raise KeyboardInterrupt
                recorder.poll(POLL_MS)
                if time.monotonic() > overdue_s:
                    raise OverdueError(f"{path.name}: the time is over")
                if recorder.refused:
                    raise CbtopError(recorder.refused)
                if recorder.is_full:
                    raise CbtopError(f"more than {MAX_LIVE_BYTES >> 30} GiB of records: record less of it")
                if not recorder.has_begun and time.monotonic() - begun_s > ANSWER_WITHIN_S:
                    raise NoDataError(f"no answer from {recorder.unanswered}")
                if process and process.poll() is not None:
                    until_s = until_s or time.monotonic() + READ_ON_S
                    # If the command failed, do not wait for its data, because this data is not used.
                    if process.returncode or _is_read(recorder):
                        break
                line.show(f"recording {path.name}: {time.monotonic() - begun_s:.0f} s")
            if is_interrupted():  # Ctrl-C in a terminal reaches `process`, too, and ends it.
                raise KeyboardInterrupt
    finally:
        line.clear()
        recorder.close()


def _is_read(recorder: StreamRecorder) -> bool:
    """Return whether all processes have ended and the daemon has read all of their data."""
    sources = recorder.store.sources.values()
    return bool(sources) and all(one.has_ended and not one.is_unread for one in sources)
