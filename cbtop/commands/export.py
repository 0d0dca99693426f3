"""`cbtop export`: write the records of a recording or of a process's ring in formats that other tools read."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from cbtop import units
from cbtop.errors import CbtopError, NoDataError, UntrustedError, UsageError
from cbtop.exporters import EXPORTERS
from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.recorded import checked_processes, not_closed, process_of_files
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.errors import RecordingError, VersionError
from cbtop.protocol.limits import reason
from cbtop.protocol.recording import RecordingReader
from cbtop.reports import HTML

DESCRIPTION = (
    "Write the records of a recording, or of the ring of a running or ended process, in a format of another tool. If "
    "the format can hold several processes, the file has all of them, unless --source chooses one. An export takes "
    "at most 300 MiB of memory. If steps overlap, speedscope files also need temporary files."
)
EPILOG = """\
examples:
  cbtop export run.cbtop --format perfetto -o run.pftrace      open it at ui.perfetto.dev
  cbtop export run.cbtop --format speedscope -o run.json       open it at speedscope.app
  cbtop export run.cbtop --format folded | flamegraph.pl --countname ns > run.svg
  cbtop export run.cbtop --format parquet -o run.parquet       for polars, DuckDB and pandas
  cbtop export run.cbtop --format html -o run.html             a report to send: one file, without scripts
  cbtop export run.cbtop --format csv --source 4242 | head
  cbtop export --pid 4242 --format dot | dot -Tsvg -o graph.svg
"""

STDOUT = Path("-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a recording")
    parser.add_argument("--pid", type=int, help="export the ring of this process, instead of a recording")
    parser.add_argument("--format", choices=[*EXPORTERS, HTML], required=True, help="format of the output")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="output file (default, and -: stdout)")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--source", metavar="PID|KEY", help="only this process of the recording")


def run(options: argparse.Namespace) -> int:
    if options.output == STDOUT:
        options.output = None
    if (options.file is None) == (options.pid is None):
        raise UsageError("a recording or --pid is wanted, and not both")
    if options.format == HTML:
        return _export_html(options)
    if options.output is None and EXPORTERS[options.format].is_binary and sys.stdout.isatty():
        raise UsageError(f"{options.format} is binary: choose a file with -o")
    with ExitStack() as opened:
        reader = None if options.file is None else _recording(options.file, opened)
        found = _of_ring(options.pid) if reader is None else checked_processes(reader)
        processes = _chosen(found, options)
        out = opened.enter_context(_opened(options))
        EXPORTERS[options.format].write(processes, out)
    if options.output or any(_lost(recorded) for recorded in processes):
        sys.stderr.write("".join(f"cbtop: {_summary(recorded)}\n" for recorded in processes))
    if reader is not None and not reader.is_closed:
        sys.stderr.write(f"cbtop: {not_closed(options.file)}\n")
    if reader is not None and reader.damaged:
        raise UntrustedError(f"{options.file} has damaged frames, {reader.damaged}: what they held is missing")
    return 0


def _export_html(options: argparse.Namespace) -> int:
    """Write an HTML report that shows a recording at its end."""
    # Imported here, because reports load slowly.
    from cbtop.commands.shared.html_file import document_of

    if options.file is None:
        raise UsageError(f"{HTML} needs a recording; `cbtop --headless --format {HTML}` reports on what runs")
    document, damage, is_closed = document_of(options.file, () if options.source is None else (options.source,))
    with ExitStack() as opened:
        opened.enter_context(_opened(options)).write(document)
    if not is_closed:
        sys.stderr.write(f"cbtop: {not_closed(options.file)}\n")
    if damage:
        raise UntrustedError(damage)
    return 0


def _recording(path: Path, opened: ExitStack) -> RecordingReader:
    try:
        reader = RecordingReader(path)
    except (RecordingError, VersionError) as error:
        raise UsageError(str(error)) from error
    opened.callback(reader.close)
    return reader


def _of_ring(pid: int) -> dict[str, RecordedProcess]:
    rings = sorted(runtime_dir().glob(f"{pid}-*.ring"))
    if not rings:
        raise NoDataError(f"no process {pid} has recorded anything in {runtime_dir()}")
    return {ring.stem: process_of_files(ring, ring.with_suffix(".catalog")) for ring in rings}


def _chosen(processes: dict[str, RecordedProcess], options: argparse.Namespace) -> Sequence[RecordedProcess]:
    holds_many, chosen = EXPORTERS[options.format].holds_many, processes
    if options.source is not None:
        chosen = {key: recorded for key, recorded in processes.items() if options.source in (key, str(recorded.pid))}
    elif not holds_many:
        # The recording has no records of processes that ended before it began.
        chosen = {key: recorded for key, recorded in processes.items() if len(recorded.records)} or processes
    if not chosen or (len(chosen) > 1 and not holds_many):
        known = "; ".join(f"{key} ({one.process}, pid {one.pid})" for key, one in (chosen or processes).items())
        wrong = f"{len(chosen)} processes in one {options.format} file" if chosen else f"--source {options.source}"
        raise UsageError(f"{wrong}: choose one with --source of {known}")
    return list(chosen.values())


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[BinaryIO]:
    if options.output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    # If the path of the output is a symbolic link, replace the link's target and not the link.
    output = options.output.resolve()
    if output.exists() and not output.is_file():
        raise UsageError(f"{options.output}: not a regular file")
    if output.exists() and not options.force:
        raise UsageError(f"{options.output} exists; pass --force to overwrite it")
    # Write under a temporary name, so that an interrupted export leaves no partial file under the final one.
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(f"{options.output}: {reason(error)}") from error
    try:
        with open(descriptor, "wb") as file:
            yield file
        unfinished.replace(output)
    except OSError as error:
        raise CbtopError(f"{error.filename or options.output}: {reason(error)}; nothing is exported") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _lost(recorded: RecordedProcess) -> int:
    return recorded.overwritten + recorded.rejected + recorded.missed


def _summary(recorded: RecordedProcess) -> str:
    lost = ", ".join(
        f"{units.count(number)} {what}"
        for number, what in (
            (recorded.missed, "not in the recording (before it began, or lost on the way)"),
            (recorded.overwritten, "overwritten before they were read"),
            (recorded.rejected, "rejected"),
        )
        if number
    )
    return f"{recorded.process}, pid {recorded.pid}: {units.count(len(recorded.records))} records" + (
        f"; {lost}" if lost else ""
    )
