"""`cbtop post-mortem`: show the last activity of an ended process."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbtop import units
from cbtop.daemon.post_mortem import LAST_STEPS, EndedRecord, PostMortem, Unfinished, post_mortem
from cbtop.daemon.source import Source
from cbtop.errors import NoDataError
from cbtop.protocol.ended import MAX_ENDED, MAX_ENDED_BYTES, left_by, rings_of
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.errors import RingError
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports.tables import first_lines
from cbtop.text import time_text

if TYPE_CHECKING:  # imported for types only, because this import loads numpy
    from cbtop.viewmodels.source import SourceView

DESCRIPTION = (
    "Read what ended processes left: how they ended, their last steps and records, and the brick each thread was in: "
    "measured where the thread wrote it down itself (the compiled recorder does), else derived from the order of an "
    "earlier step, and labelled so. With a PID it may also still run: what is it stuck in?"
)
EPILOG = f"""\
What ended processes left is kept for ten minutes once a daemon knows that they ended, and until one does. The oldest
goes where that is more than {MAX_ENDED} processes, {MAX_ENDED_BYTES >> 20} MiB or a quarter of the disk.
"""
OVERVIEW, ALL = "overview", "all"
MAX_BRICKS = 5
MAX_OTHERS = 8
MAX_IN_FLIGHT = 8
SCHEMA = "cbtop.post-mortem/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", type=int, nargs="?", metavar="PID", help="which process (default: every ended one)")
    parser.add_argument("--steps", type=_count, default=LAST_STEPS, metavar="N", help="how many of the last steps")
    parser.add_argument(
        "--view", choices=(OVERVIEW, ALL), default=OVERVIEW,
        help="overview: the newest process with its bricks and verdicts, and a line for each other one, in at most "
        "60 lines unless --steps asks for more; all: the last steps and records of each (default: overview)",
    )  # fmt: skip
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(options: argparse.Namespace) -> int:
    directory = runtime_dir()
    rings = [directory / name for name in rings_of(os.listdir(directory))]
    if options.pid is not None:
        rings = [ring for ring in rings if ring.stem.startswith(f"{options.pid}-")]
    rings = [ring for ring in rings if ring.exists()]
    rings.sort(key=_newest_first)
    read = [(ring, each) for ring in rings if (each := _read(ring, options.steps))]
    if options.pid is None:
        # Processes that still run, or have no records, are shown only if `--pid` names them.
        read = [(ring, each) for ring, each in read if each.state is not SourceStatus.LIVE and each.produced]
    found = [each for _, each in read]
    if not found:
        who = "no process of yours" if options.pid is None else f"no process {options.pid}"
        raise NoDataError(f"{who} has left a record in {directory}")
    if options.format == "json":
        processes = [asdict(each) | {"sampled": _sampled(ring)} for ring, each in read]
        sys.stdout.write(json.dumps({"schema": SCHEMA, "processes": processes}) + "\n")
    elif options.view == OVERVIEW:
        sys.stdout.write(_overview(read[0][0], found) + "\n")
    else:
        sys.stdout.write("\n\n".join(_text(each) for each in found) + "\n")
    return 0


def _read(ring: Path, steps: int) -> PostMortem | None:
    try:
        return post_mortem(ring, steps)
    except RingError as error:
        sys.stderr.write(f"cbtop: {error}\n")
        return None


def _newest_first(ring: Path) -> float:
    left = left_by(ring)
    return -left.last_sign_s if left else 0.0


def _overview(newest: Path, found: list[PostMortem]) -> str:
    """Return text about the newest ended process with its bricks and verdicts, and a line for each other one."""
    # Imported here, because loading these modules takes 0.3 s. `--help` does not need them.
    from cbtop.reports.overview import bricks_and_verdicts

    first, *others = found
    lines = _text(first, MAX_IN_FLIGHT).splitlines()
    view = _view(newest)
    if view is not None and view.has_data:
        lines += ["", *bricks_and_verdicts(view, MAX_BRICKS)]
    if others:
        lines += ["", *first_lines([f"{_who(each)}, {_last(each)}" for each in others], MAX_OTHERS)]
    return "\n".join([*lines, "", "the rest: --view all"])


def _view(ring: Path) -> SourceView | None:
    """Return the view of the process of this ring with its verdicts, or None if it cannot be read."""
    from cbtop.commands.shared.ring_view import view_of  # here, as in `_overview`

    source = Source(ring)
    try:
        return view_of(source)
    finally:
        source.close()


def _sampled(ring: Path) -> list[dict[str, Any]]:
    """Return the functions that were sampled in time without bricks, grouped as in the JSON report."""
    view = _view(ring)
    return [] if view is None else [asdict(place) for place in view.sampled]


def _who(found: PostMortem) -> str:
    how = found.state.upper() + (f" ({found.reason})" if found.reason else "")
    return f"{found.program or 'a process'}, pid {found.pid} on {found.host or units.NOT_MEASURED}: {how}"


def _last(found: PostMortem) -> str:
    return (
        f"last record {units.NOT_MEASURED if found.last_record_s is None else time_text.moment(found.last_record_s)}"
    )


def _text(found: PostMortem, max_in_flight: int | None = None) -> str:
    lines = [_who(found)]
    lost = found.overwritten + found.rejected
    lines.append(
        f"{_last(found)} · {units.count(found.produced)} records, {units.count(lost)} of them overwritten or rejected"
    )
    lines += _section(f"last {len(found.steps)} steps", found.steps)
    lines += _section(f"last {len(found.records)} records", found.records)
    lines += ["", "in flight"]
    in_flight = [_unfinished(each, found) for each in found.in_flight]
    lines += first_lines(in_flight, max_in_flight or len(in_flight)) or ["  nothing that is known of"]
    return "\n".join(lines)


def _section(title: str, records: tuple[EndedRecord, ...]) -> list[str]:
    if not records:
        return []
    width = max(len(record.path) for record in records)
    return ["", title] + [
        f"  {_time(record.ended_s)}  {record.path:<{width}}  {units.duration(record.us):>10}"
        f"{'  failed' if record.failed else ''}"
        for record in records
    ]


def _unfinished(each: Unfinished, found: PostMortem) -> str:
    line = f"  {each.path} [{each.provenance}]"
    if each.thread_id is not None:
        line = f"  thread {each.thread_id}: {each.path} [{each.provenance}]"
    if each.began_s is not None:
        line += f", begun {_time(each.began_s)}"
        if found.last_record_s is not None:
            line += f", {units.duration(abs(found.last_record_s - each.began_s) * 1e6)} "
            line += "after the last record" if each.began_s >= found.last_record_s else "before the last record"
    return line + (f" ({each.note})" if each.note else "")


def _time(unix_s: float) -> str:
    return time_text.moment(unix_s)[11:]


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 10000")
    return value
