"""`cbtop`: attach to whatever runs, on screen or as text."""

from __future__ import annotations

import argparse
import time

from cbtop.commands.show import add_show_arguments, check_phase, endpoint, is_headless, print_report, show_on_screen
from cbtop.errors import NoDataError
from cbtop.feed import Feed
from cbtop.viewmodels.model import SourceView

HELP = "attach to whatever runs"
DESCRIPTION = HELP
EPILOG = """\
examples:
  cbtop                              watch every instrumented process of yours
  cbtop --headless --once            print one report and exit: for CI and pipes
  cbtop --headless --once --format json | jq '.sources[0].steps.tokens_per_sec'
  cbtop demo                         something to watch, from the first minute

exit codes: 0 data seen, 1 runtime error, 2 usage, 3 nothing running or no data in time,
            129/130/143 hang-up, interrupt, terminate
"""

HOW_TO_START = (
    "start `cbtop demo --serve-only` for something to watch, or instrument a process of yours: "
    "`from cbtop import BrickProfiler, BrickId`"
)
POLL_MS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_show_arguments(parser)
    parser.add_argument(
        "--once",
        "-1",
        action="store_true",
        help="print one report as soon as there is data, and exit (no screen)",
    )
    parser.add_argument(
        "--duration",
        type=_positive,
        metavar="SEC",
        help="with --headless: watch this long, then print the report",
    )
    parser.add_argument(
        "--timeout", type=_positive, default=5.0, metavar="SEC", help="how long to wait for data (default: 5)"
    )
    parser.add_argument(
        "--connect",
        type=endpoint,
        metavar="ENDPOINT",
        help="a daemon's address (default: your own, started inside if none runs)",
    )


def run(options: argparse.Namespace) -> int:
    if not (options.once or options.duration or is_headless(options)):
        with Feed(options.connect) as feed:
            return show_on_screen(feed, options)
    with Feed(options.connect) as feed:
        _wait_for_data(feed, options.timeout)
        if not options.once and (options.headless or options.duration):
            _watch(feed, options.duration)
        return _report(feed, options)


def _wait_for_data(feed: Feed, timeout_s: float) -> None:
    """Until a live source has something to show, or what there is has ended, or time is up."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and not any(_has_data(view) for view in _live(feed)):
        feed.poll(POLL_MS)
        if feed.refused:
            raise NoDataError(feed.refused)


def _watch(feed: Feed, duration_s: float | None) -> None:
    """Until `duration_s` is over, or, without one, until nothing is live any more or Ctrl-C."""
    deadline_s = time.monotonic() + duration_s if duration_s else None
    try:
        while _live(feed) and (deadline_s is None or time.monotonic() < deadline_s):
            feed.poll(POLL_MS)
    except KeyboardInterrupt:
        return  # enough seen: print it


def _report(feed: Feed, options: argparse.Namespace) -> int:
    views = [view for source in feed.sources() if (view := feed.view(source.key, options.phase))]
    live = [view for view in views if view.state == "live"]
    # What has ended is only of interest where nothing runs, and then the last of it.
    with_data = [view for view in live if _has_data(view)] if live else [v for v in views if _has_data(v)][:1]
    if not with_data:
        busy = "".join(
            f"pid {view.pid} is {view.activity or 'there'} but has recorded no step yet; " for view in live
        )
        what = f"{busy}raise --timeout (now {options.timeout:g} s)" if busy else HOW_TO_START
        raise NoDataError(f"{'no data yet' if busy else 'nothing is running'} ({feed.status()}): {what}")
    check_phase(with_data, options)
    print_report(with_data, options)
    if not live and feed.is_daemon_inside and (options.once or not options.headless):
        ended = with_data[0]
        raise NoDataError(f"nothing is running; shown is pid {ended.pid}, {ended.state}. {HOW_TO_START}")
    return 0


def _live(feed: Feed) -> list[SourceView]:
    return [v for s in feed.sources() if s.state == "live" and (v := feed.view(s.key))]


def _has_data(view: SourceView) -> bool:
    return bool(view.bricks) and (view.phase is None or view.steps is not None)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a time above zero")
    return value
