"""`cbtop`: attach to whatever runs, on screen or as text."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cbtop.client.feed import Feed
from cbtop.commands import replay
from cbtop.commands.shared.choose import add_merge_argument, add_source_argument, as_asked
from cbtop.commands.show import (
    add_connect_arguments,
    add_show_arguments,
    is_headless,
    open_feed,
    positive_seconds,
    print_report,
    show_on_screen,
    window_s,
)
from cbtop.errors import CbtopError, NoDataError, UntrustedError
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.viewmodels.model import SourceView

DESCRIPTION = "attach to whatever runs"
EPILOG = """\
examples:
  cbtop                              watch every instrumented process of yours
  cbtop --headless --once            print one report and exit: for CI and pipes
  cbtop --headless --once --format json | jq '.sources[0].steps.tokens_per_sec'
  cbtop --connect E1 --connect E2    watch what two daemons serve
  cbtop ls                           list what there is to watch
  cbtop demo                         something to watch, from the first minute

exit codes: 0 data seen, 1 runtime error or not let in, 2 usage, 3 nothing running or no data in time, 5 data not
            trustworthy, 129/130/143 hang-up, interrupt, terminate, 141 nobody reads the output
"""

HOW_TO_START = (
    "start `cbtop demo --serve-only` for something to watch, or instrument a process of yours: "
    "`from cbtop import BrickProfiler, BrickId`"
)
POLL_MS = 100
RANKS_WATCH_S = 1.5  # long enough to tell which of several ranks is slower than the others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_show_arguments(parser)
    add_merge_argument(parser)
    parser.add_argument(
        "--once",
        "-1",
        action="store_true",
        help="print one report as soon as there is data, and exit (no screen)",
    )
    parser.add_argument(
        "--duration",
        type=positive_seconds,
        metavar="SEC",
        help="with --headless: watch this long, then print the report",
    )
    add_attach_arguments(parser)

    parser.add_argument("--replay", type=Path, metavar="FILE", help="show a recording (as `cbtop replay FILE`)")
    replay.add_replay_arguments(parser)


def add_attach_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which daemons to listen to, how long, and what to show of it."""
    add_source_argument(parser)
    parser.add_argument(
        "--timeout", type=positive_seconds, default=5.0, metavar="SEC", help="how long to wait for data (default: 5)"
    )
    add_connect_arguments(parser, many=True)


def run(options: argparse.Namespace) -> int:
    if options.replay:
        return replay.run(options)
    if not (options.once or options.duration or is_headless(options)):
        with open_feed(options, options.source, window_s(options)) as feed:
            return show_on_screen(feed, options, options.merge)
    with open_feed(options, options.source, window_s(options)) as feed:
        _wait_for_data(feed, options)
        was_live = bool(_live(feed, options))
        if not options.once and (options.headless or options.duration):
            _watch(feed, options, options.duration)
        elif options.window is not None:
            _watch(feed, options, options.window)
        elif sum(view.rank is not None for view in _live(feed, options)) > 1:
            _watch(feed, options, RANKS_WATCH_S)
        return _report(feed, options, was_live)


def _wait_for_data(feed: Feed, options: argparse.Namespace) -> None:
    """Until every daemon has answered and a live source has something to show, or time is up."""
    deadline_s = time.monotonic() + options.timeout
    while time.monotonic() < deadline_s and (
        feed.unanswered or not any(_has_data(view, options) for view in _live(feed, options))
    ):
        feed.poll(POLL_MS)
        if feed.refused:
            raise CbtopError(feed.refused)


def _watch(feed: Feed, options: argparse.Namespace, duration_s: float | None) -> None:
    """Until the duration is over, or, without one, until nothing is live any more or Ctrl-C."""
    deadline_s = time.monotonic() + duration_s if duration_s else None
    try:
        while _live(feed, options) and (deadline_s is None or time.monotonic() < deadline_s):
            feed.poll(POLL_MS)
            if feed.refused:
                raise CbtopError(feed.refused)
    except KeyboardInterrupt:
        return  # enough seen: print it


def _report(feed: Feed, options: argparse.Namespace, was_live: bool) -> int:
    """Print what there is; `was_live`: something ran when we began to watch."""
    views = [view for source in feed.sources() if (view := feed.view(source.key, options.phase))]
    live = [view for view in views if view.state is SourceStatus.LIVE]
    # What has ended is only of interest where nothing runs, and then the last of it.
    shown = [v for v in live or views if _has_data(v, options)][: None if live else 1]
    if shown:
        print_report(as_asked(feed, shown, options), options)
    if shown and feed.unanswered:
        sys.stderr.write(f"cbtop: {unanswered(feed)}; what runs there is not shown\n")
    if feed.left_out:
        sys.stderr.write(f"cbtop: {feed.left_out}\n")
    faulty = [view for view in views if view.state is SourceStatus.FAULTY]
    if faulty:
        what = "; ".join(f"pid {view.pid} is not to be trusted: {view.state_reason}" for view in faulty)
        raise UntrustedError(what)
    if not shown:
        raise NoDataError(_why_nothing(feed, live, options))
    if not was_live:
        how = shown[0].state + (f" ({shown[0].state_reason})" if shown[0].state_reason else "")
        raise NoDataError(f"nothing is running; shown is pid {shown[0].pid}, {how}. {HOW_TO_START}")
    return 0


def _why_nothing(feed: Feed, live: list[SourceView], options: argparse.Namespace) -> str:
    if feed.unanswered:
        return unanswered(feed)
    if not live and options.source:
        return f"nothing that runs is --source {' or '.join(options.source)}; `cbtop ls` lists what there is"
    if not live:
        return f"nothing is running: {HOW_TO_START}"
    wanted = f"{options.phase} step" if options.phase else "step"
    busy = ", ".join(f"pid {v.pid} is {v.activity or 'there'} but has recorded no {wanted} yet" for v in live)
    return f"{busy}; raise --timeout (now {options.timeout:g} s)"


def unanswered(feed: Feed) -> str:
    """Where nobody answers, in words."""
    return f"no daemon answers at {', '.join(feed.unanswered)}"


def _live(feed: Feed, options: argparse.Namespace) -> list[SourceView]:
    live = [source.key for source in feed.sources() if source.state is SourceStatus.LIVE]
    return [view for key in live if (view := feed.view(key, options.phase))]


def _has_data(view: SourceView, options: argparse.Namespace) -> bool:
    if options.phase is not None and view.phase != options.phase:
        return False
    return view.has_data
