"""`cbtop ls`: what there is to watch, one line each."""

from __future__ import annotations

import argparse
import sys
import time

from cbtop.client.feed import Feed
from cbtop.client.store import SourceRecord
from cbtop.commands.show import open_feed
from cbtop.commands.top import (
    HOW_TO_START,
    POLL_MS,
    RANKS_WATCH_S,
    add_attach_arguments,
    known,
    running,
    runs_ranks,
    unanswered,
    unread,
)
from cbtop.errors import CbtopError, NoDataError, UntrustedError
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports.sources import sources_json, sources_text
from cbtop.viewmodels.model import SourceView
from cbtop.viewmodels.source import has_data

DESCRIPTION = (
    "List every instrumented process: rank, model, state, speed and losses, how far its host's clock is from ours, "
    "and the rank that is slower than the others."
)
EPILOG = """\
examples:
  cbtop ls                                     what runs here
  cbtop ls --connect E1 --connect E2           what two daemons serve
  cbtop ls --format json | jq '.stragglers'

exit codes: as of cbtop --headless
"""
FORMATS = {"text": sources_text, "json": sources_json}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=list(FORMATS), default="text", help="of the list (default: text)")
    add_attach_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with open_feed(options, options.source) as feed:
        _wait_for_answers(feed, options.timeout)
        if runs_ranks(feed):
            _poll_until(feed, time.monotonic() + RANKS_WATCH_S)
        views = _views(feed)
        if views:
            sys.stdout.write(FORMATS[options.format](views) + "\n")
            sys.stdout.flush()
        if views and feed.unanswered:
            sys.stderr.write(f"cbtop: {unanswered(feed)}; what runs there is not listed\n")
        if views and feed.unread:
            sys.stderr.write(f"cbtop: {unread(feed)}; not all that runs there is listed\n")
        if left := len(_left_unread(feed)):
            sys.stderr.write(f"cbtop: time is up, and what {left} that ended left is not read\n")
        if feed.left_out:
            sys.stderr.write(f"cbtop: {feed.left_out}\n")
        return _exit_code(feed, views)


def _wait_for_answers(feed: Feed, timeout_s: float) -> None:
    """Until every daemon has said what it knows, and each live source its first step, or time is up."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and (
        feed.unanswered or feed.unread or _left_unread(feed) or not all(map(has_data, running(feed)))
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


def _exit_code(feed: Feed, views: list[SourceView]) -> int:
    if faulty := [view for view in views if view.state is SourceStatus.FAULTY]:
        raise UntrustedError("; ".join(f"pid {v.pid} is not to be trusted: {v.state_reason}" for v in faulty))
    if not _live(views):
        raise NoDataError(unanswered(feed) if feed.unanswered else f"nothing is running: {HOW_TO_START}")
    return 0


def _views(feed: Feed) -> list[SourceView]:
    """By host and rank."""
    views = [view for source in feed.sources() if (view := feed.view(source.key))]
    return sorted(views, key=lambda view: (view.state is not SourceStatus.LIVE, view.rank or 0, view.host, view.pid))


def _live(views: list[SourceView]) -> list[SourceView]:
    return [view for view in views if view.state is SourceStatus.LIVE]
