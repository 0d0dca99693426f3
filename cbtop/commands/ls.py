"""`cbtop ls`: list the sources that can be watched, one per line."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from cbtop.client.source_record import SourceRecord
from cbtop.commands.shared.show import open_feed
from cbtop.commands.top import (
    POLL_MS,
    RANKS_WATCH_S,
    add_attach_arguments,
    how_to_start,
    known,
    running,
    runs_ranks,
    unanswered,
    unread,
)
from cbtop.errors import CbtopError, NoDataError, UntrustedError
from cbtop.feeds.feed import Feed
from cbtop.feeds.look_back import remembered
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports.sources import sources_json, sources_text
from cbtop.viewmodels.selection import has_data
from cbtop.viewmodels.sources import SourceRow

DESCRIPTION = (
    "List every instrumented process: rank, model, state, device, speed, lost records and lag, the offset of its "
    "host's clock, the cost of profiling, and the slowest rank."
)
EPILOG = """\
examples:
  cbtop ls                                     the processes of this machine
  cbtop ls --connect E1 --connect E2           the processes of two daemons
  cbtop ls --format json | jq '.stragglers'

exit codes: as of cbtop --headless
"""
FORMATS = {"text": sources_text, "json": sources_json}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=list(FORMATS), default="text", help="format of the list (default: text)")
    add_attach_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with open_feed(options, options.source, looks_back=False) as feed:
        _wait_for_answers(feed, options.timeout)
        if runs_ranks(feed):
            _poll_until(feed, time.monotonic() + RANKS_WATCH_S)
        rows = _rows(feed)
        if rows:
            sys.stdout.write(FORMATS[options.format](rows) + "\n")
            sys.stdout.flush()
        if rows and feed.links.unanswered:
            sys.stderr.write(f"cbtop: {unanswered(feed)}; what runs there is not listed\n")
        if rows and feed.links.unread:
            sys.stderr.write(f"cbtop: {unread(feed)}; not all that runs there is listed\n")
        if left := len(_left_unread(feed)):
            sys.stderr.write(f"cbtop: time is up, and what {left} that ended left is not read\n")
        if feed.left_out:
            sys.stderr.write(f"cbtop: {feed.left_out}\n")
        return _exit_code(feed, rows)


def _wait_for_answers(feed: Feed, timeout_s: float) -> None:
    """Wait until every daemon has answered and each live source has ended a step. Stop waiting at the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and (
        feed.links.unanswered or feed.links.unread or _left_unread(feed) or not all(map(has_data, running(feed)))
    ):
        for record in _left_unread(feed):
            feed.want(record.key)
        feed.poll(POLL_MS)
        if feed.refused:
            raise CbtopError(feed.refused)


def _left_unread(feed: Feed) -> list[SourceRecord]:
    return [record for record in known(feed) if record.is_unread]


def _poll_until(feed: Feed, deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        feed.poll(POLL_MS)


def _exit_code(feed: Feed, rows: list[SourceRow]) -> int:
    if faulty := [row for row in rows if row.state is SourceStatus.FAULTY]:
        raise UntrustedError("; ".join(f"pid {row.pid} is not to be trusted: {row.state_reason}" for row in faulty))
    if not any(row.state is SourceStatus.LIVE for row in rows):
        if feed.links.unanswered:
            raise NoDataError(unanswered(feed))
        raise NoDataError(f"nothing is running: {how_to_start()}")
    return 0


def _rows(feed: Feed) -> list[SourceRow]:
    """Return one row for each source, sorted by host and rank.

    If the daemon keeps a history, the rates of running sources cover only the last seconds.
    """
    found = {row.key: row for row in feed.listed().rows()}
    if any(row.state is SourceStatus.LIVE for row in found.values()):
        for past in remembered(feed):
            with past:
                for row in past.listed(window=True).rows():
                    if row.state is SourceStatus.LIVE and row.window and row.key in found:
                        found[row.key] = _with_rates(found[row.key], row)
    return sorted(
        found.values(),
        key=lambda row: (row.state is not SourceStatus.LIVE, row.rank or 0, row.host, row.pid),
    )


def _with_rates(row: SourceRow, recent: SourceRow) -> SourceRow:
    """Return a copy of `row` (of the source list) with the step times and rates from `recent`. An unknown value has a
    reason.
    """
    of_steps = ("steps_per_sec", "tokens_per_sec")
    unknown = [one for one in row.unknown if one.figure not in of_steps]
    unknown += [one for one in recent.unknown if one.figure in of_steps]
    return replace(
        row,
        phase=recent.phase,
        steps=recent.steps,
        steps_per_sec=recent.steps_per_sec,
        window=recent.window,
        since_s=recent.since_s,
        wall_us=recent.wall_us,
        unknown=tuple(unknown),
    )
