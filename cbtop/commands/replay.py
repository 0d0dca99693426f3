"""`cbtop replay`: show a recording on the same screens as live data, or as text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.commands.shared.browser import add_web_argument, is_for_browser, serve_screen
from cbtop.commands.shared.choose import add_merge_argument, add_source_argument, as_asked, judge_as_asked
from cbtop.commands.shared.show import (
    add_show_arguments,
    check_phase,
    is_headless,
    positive_seconds,
    print_report,
    require_passed_checks,
    settle_options,
    show_on_screen,
    shows_window,
    window_s,
)
from cbtop.errors import NoDataError, UntrustedError, UsageError
from cbtop.protocol.errors import RecordingError, VersionError
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports import HTML, TIMELINE

if TYPE_CHECKING:  # imported for types only, because this import loads numpy
    from cbtop.feeds.replay import ReplayFeed

DESCRIPTION = (
    "Show a recording on the same screens as running processes, labelled REPLAY with its date. Keys: [ ] move by a "
    "step and { } by ten, and pause; ← → move by 5 seconds, ( ) by 10, PgUp PgDn by a minute, Home and End to the "
    "ends; Space pauses. v chooses a range, and w writes the range to a file."
)
EPILOG = """\
examples:
  cbtop replay run.cbtop                         on screen
  cbtop replay run.cbtop --speed 10              ten times as fast
  cbtop replay run.cbtop --headless --at 30      a report on what was known after 30 s
  cbtop --headless --replay run.cbtop            the same, at its end
  cbtop run.cbtop                                short for cbtop replay run.cbtop
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("replay", type=Path, metavar="FILE", help="a recording")
    add_replay_arguments(parser)
    add_once_argument(parser, "print a report and exit, as --headless")
    add_source_argument(parser)
    add_merge_argument(parser)
    add_web_argument(parser)
    add_show_arguments(parser)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options of a replay, but not the argument for the recording."""
    parser.add_argument(
        "--at", type=_moment, metavar="SEC",
        help="moment to show (default: the first data on the screen, the end in a report, or a whole saved range)",
    )  # fmt: skip
    parser.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="play X times as fast (default: 1)")


def add_once_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option that prints one report instead of opening the screen. `what` is its help."""
    parser.add_argument("--once", "-1", action="store_true", help=what)


def run(options: argparse.Namespace) -> int:
    from cbtop.feeds.replay import ReplayFeed

    settle_options(options)
    in_browser = is_for_browser(options)
    headless = not in_browser and (options.once or is_headless(options))
    try:
        feed = ReplayFeed(options.replay, _window_s(options, headless=headless), options.speed, options.source)
    except (RecordingError, VersionError) as error:
        raise UsageError(str(error)) from error
    if in_browser:  # The recording can be read. Each tab opens it again.
        feed.close()
        return serve_screen(options)
    with feed:
        judge_as_asked(feed, options)
        feed.follow_records(options.view == TIMELINE or options.format == HTML)
        if options.at is not None:
            feed.seek(options.at)
        elif feed.range_s is None:
            feed.seek(feed.duration_s if headless else feed.search.first_data_s(feed.search.main_source))
        return _report(feed, options) if headless else show_on_screen(feed, options, options.merge)


def _window_s(options: argparse.Namespace, *, headless: bool) -> float:
    """Return how many seconds of the recording a report is about. With a baseline it needs the whole recording."""
    if not headless or options.baseline is None or shows_window(options, by_default=False):
        return window_s(options)
    from cbtop.feeds.replay import ReplayFeed

    with ReplayFeed(options.replay) as feed:
        return max(feed.duration_s, DEFAULT_WINDOW_S)


def _report(feed: ReplayFeed, options: argparse.Namespace) -> int:
    views = [view for source in feed.sources() if (view := feed.view(source.key, options.phase))]
    shown = [view for view in views if view.has_data]
    if not shown and feed.damage:
        raise UntrustedError(f"{feed.status()}: nothing is left to show")
    if not shown and not feed.search.holds_data():
        raise NoDataError(f"{options.replay} holds no data: it ends before any process had recorded anything")
    if not shown:
        who = f"that is --source {' or '.join(options.source)} " if options.source else ""
        raise NoDataError(f"{options.replay}: no process {who}has recorded anything by then; try another --at")
    check_phase(shown, options)
    window = shows_window(options, by_default=False)
    print_report(as_asked(feed, (view.key for view in shown), options, window=window), options, feed.replay())
    if feed.left_out:
        sys.stderr.write(f"cbtop: {feed.left_out}\n")
    if faulty := [view for view in views if view.state is SourceStatus.FAULTY]:
        raise UntrustedError(
            "; ".join(f"pid {view.pid} is not to be trusted: {view.state_reason}" for view in faulty)
        )
    if feed.damage:
        raise UntrustedError(f"{feed.status()}: what they held is missing")
    require_passed_checks(shown)
    return 0


def _speed(text: str) -> float:
    try:
        return positive_seconds(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero") from None


def _moment(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else positive_seconds(text)
