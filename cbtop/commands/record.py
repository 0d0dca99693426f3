"""`cbtop record`: write all messages and records of the running processes into a file."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

from cbtop import units
from cbtop.client.collector import SILENT_AFTER_S
from cbtop.client.stream_recorder import StreamRecorder
from cbtop.commands.shared.interrupts import noted_interrupt
from cbtop.commands.shared.progress import ProgressLine
from cbtop.commands.shared.show import add_connect_arguments, positive_seconds, viewer_keys
from cbtop.errors import CbtopError, NoDataError, UntrustedError, UsageError
from cbtop.protocol.ended import rings_of
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.errors import KeysError, RecordingError
from cbtop.protocol.process import is_running, process_start
from cbtop.protocol.recording import SUFFIX
from cbtop.protocol.vocabulary import SourceStatus

DESCRIPTION = (
    "Record all your instrumented processes, or those of the daemon at --connect, until the duration is over, the "
    "file is full, or you press Ctrl-C. If cbtop is killed, the file can still be opened."
)
EPILOG = """\
examples:
  cbtop record -o run.cbtop                      until Ctrl-C
  cbtop record -o run.cbtop --duration 60        one minute
  cbtop replay run.cbtop                         the same screens
  cbtop export run.cbtop --format perfetto -o run.pftrace
"""
POLL_MS = 100
DEFAULT_MAX_BYTES = 1 << 30
ANSWER_WITHIN_S = 5.0
# Most seconds to read after the recorded process has ended. Usually a quarter is enough, because the daemon reads
# four times a second. An overloaded machine may need longer.
READ_ON_S = 60.0
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=f"such as run{SUFFIX}")
    parser.add_argument("--duration", type=positive_seconds, metavar="SEC", help="stop then (default: at Ctrl-C)")
    parser.add_argument(
        "--max-size", type=_size, default=DEFAULT_MAX_BYTES, metavar="BYTES",
        help="stop when the file has this size, such as 500M; units are K, M and G (default: 1G)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    # A hidden option for `cbtop run`, with the value PID:DESCRIPTOR. `cbtop record` then records new processes until
    # the process PID has ended, and writes a byte to DESCRIPTOR when it begins.
    parser.add_argument("--beside", help=argparse.SUPPRESS)
    # A hidden option for `cbtop run --report`, whose recording is temporary. The recorder does not mention the file.
    parser.add_argument("--temporary", action="store_true", help=argparse.SUPPRESS)
    add_connect_arguments(parser)


def run(options: argparse.Namespace) -> int:
    there_before = set[str]() if options.beside is None else _rings()
    try:
        keys = viewer_keys(options)
        recorder = StreamRecorder(
            options.output, options.connect, options.max_size,
            keys=keys, overwrite=options.force, left_out=there_before,
        )  # fmt: skip
    except (KeysError, RecordingError) as error:
        raise UsageError(str(error)) from error
    begun_s = time.monotonic()
    line = ProgressLine(sys.stderr)
    beside = None if options.beside is None else _Beside(options.beside, there_before)
    try:
        # Ctrl-C is the usual way to stop a recording, so the end must not look like an error.
        with noted_interrupt() as is_interrupted:
            while not recorder.is_full and not is_interrupted():
                if options.duration and time.monotonic() - begun_s >= options.duration:
                    break
                recorder.poll(POLL_MS)
                if recorder.refused:
                    raise CbtopError(recorder.refused)
                if beside and beside.is_over(recorder):
                    break
                if not recorder.has_begun and time.monotonic() - begun_s > ANSWER_WITHIN_S:
                    raise NoDataError(f"no answer from {recorder.unanswered}")
                if not beside:
                    line.show(
                        f"recording: {time.monotonic() - begun_s:.0f} s, {units.size_bytes(recorder.size_bytes)}"
                    )
    finally:
        silent_s = recorder.silent_s
        line.clear()
        recorder.close()
    if options.temporary and recorder.has_begun:
        return 0  # `cbtop run` reads the recording, and reports what is missing in it.
    sys.stderr.write(_summary(recorder, options, time.monotonic() - begun_s))
    if recorder.is_full and not recorder.tallies:
        raise UsageError(
            f"--max-size {options.max_size} is too small for the first data of the daemon; pass a larger size"
        )
    if silent_s > SILENT_AFTER_S:
        raise UntrustedError(
            f"the daemon sent nothing in the last {silent_s:.1f} s, so they are not recorded; check that it runs"
        )
    if not recorder.has_begun:
        raise NoDataError(f"no answer from {recorder.unanswered}")
    if not recorder.tallies:
        nothing = "the command has recorded nothing yet" if beside else "no process was running"
        way_out = "let it run until its first steps have ended" if beside else "start one with cbtop run"
        raise NoDataError(f"{nothing}, so {options.output} contains no process; {way_out}")
    if recorder.has_only_ended and not beside:
        raise NoDataError(
            f"every process had ended before, so {options.output} has no records; start one with cbtop run, or read "
            "what ended ones left with cbtop post-mortem"
        )
    return 0


class _Beside:
    """The `cbtop run --record` process that started this recorder, and waits until the recording begins."""

    def __init__(self, beside: str, there_before: set[str]) -> None:
        self._pid, begun = map(int, beside.split(":"))
        self._start = process_start(self._pid)
        self._there_before = there_before
        self._ended_s: float | None = None
        os.write(begun, b"begun\n")
        os.close(begun)

    def is_over(self, recorder: StreamRecorder) -> bool:
        """Return whether the recorder may stop: the watched process has ended, and the data of all new processes was
        read.

        Also returns True if the watched process ended at least READ_ON_S ago.
        """
        if process_start(self._pid) == self._start:
            return False
        self._ended_s = self._ended_s or time.monotonic()
        read = {
            (source.hello.pid, source.hello.process_start)
            for source in recorder.store.sources.values()
            if source.hello and source.state and source.state.state is not SourceStatus.LIVE
        }
        left = [ring.split("-")[:2] for ring in _rings() - self._there_before]
        is_read = all((int(pid), int(start)) in read or is_running(int(pid), int(start)) for pid, start in left)
        return is_read or time.monotonic() - self._ended_s > READ_ON_S


def _rings() -> set[str]:
    return rings_of(os.listdir(runtime_dir()))


def _summary(recorder: StreamRecorder, options: argparse.Namespace, lasted_s: float) -> str:
    tallies = recorder.tallies.values()
    taken, missed, dropped = (sum(getattr(t, name) for t in tallies) for name in ("taken", "missed", "dropped"))
    lost = f", {units.count(missed)} missed" if missed else ""
    lost += f", {units.count(dropped)} dropped before they could be read" if dropped else ""
    lost += f", {recorder.damaged} damaged message(s) left out" if recorder.damaged else ""
    full = f"cbtop: {options.output} has reached --max-size; recording ends here\n" if recorder.is_full else ""
    processes = "1 process" if len(tallies) == 1 else f"{len(tallies)} processes"
    return (
        f"{full}cbtop: {options.output}: {lasted_s:.1f} s, {processes}, {units.count(taken)} records{lost}, "
        f"{units.size_bytes(recorder.size_bytes)}\n"
    )


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if size < 1 << 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of 1K or more, such as 500M")
    return size
