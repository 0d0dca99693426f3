"""`cbtop`: watch all running sources, on the screen or as text."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.commands import replay
from cbtop.commands.shared.browser import add_web_argument, is_for_browser, serve_screen
from cbtop.commands.shared.choose import add_merge_argument, add_source_argument, as_asked, judge_as_asked
from cbtop.commands.shared.engine import how_to_demo
from cbtop.commands.shared.interrupts import noted_interrupt
from cbtop.commands.shared.progress import ProgressLine
from cbtop.commands.shared.show import (
    add_connect_arguments,
    add_show_arguments,
    is_headless,
    keys_of_daemons,
    open_feed,
    positive_seconds,
    print_report,
    require_passed_checks,
    settle_options,
    show_on_screen,
    shows_window,
    window_s,
)
from cbtop.errors import CbtopError, NoDataError, UntrustedError
from cbtop.protocol.process import process_start
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports import DEVICES, HTML, SOURCES, TIMELINE

if TYPE_CHECKING:  # imported for types only, because numpy and zmq load slowly
    from cbtop.client.source_record import SourceRecord
    from cbtop.feeds.feed import Feed
    from cbtop.viewmodels.source import SourceView

DESCRIPTION = "attach to whatever runs"
EPILOG = """\
examples:
  cbtop                              watch every instrumented process of yours
  cbtop 4242                         watch only this process; more pids for several
  cbtop --headless --once            print one report and exit: for CI and pipes
  cbtop --headless --once --format json | jq '.sources[0].steps.tokens_per_sec'
  cbtop --headless --once --view sources    every process, and what cbtop itself costs
  cbtop --headless --once --view devices    GPUs, the CPU, and the processes on them
  cbtop --web                        the same screen in a browser of this machine
  cbtop --connect E1 --connect E2    watch the processes of two daemons
  cbtop ls                           list the processes to watch
  cbtop demo                         something to watch, from the first minute

exit codes: 0 data seen, 1 runtime error or refused, 2 usage, 3 nothing running or no data in time,
            4 a check of a brick failed, 5 data not trustworthy, 129/130/143 hang-up, interrupt, terminate,
            141 the reader of the output is gone
"""

POLL_MS = 100
# After the requested duration, wait this many more seconds for a complete window, because a daemon may send nothing.
MAX_LONGER_S = 5.0
RANKS_WATCH_S = 1.5  # Watch for this many seconds to find the slowest rank.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_show_arguments(parser)
    add_merge_argument(parser)
    add_length_arguments(parser)
    add_attach_arguments(parser)
    add_web_argument(parser)
    parser.add_argument("--replay", type=Path, metavar="FILE", help="show a recording (as `cbtop replay FILE`)")
    replay.add_replay_arguments(parser)


def add_length_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how long to watch before the report is printed."""
    replay.add_once_argument(
        parser, "print one report after the time range of --window (`all`: at once) and exit, without a screen"
    )
    parser.add_argument(
        "--duration",
        type=positive_seconds,
        metavar="SEC",
        help="with --headless: watch this long, then print the report",
    )


def add_attach_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for which daemons to read, how long to watch, and what to show."""
    add_source_argument(parser)
    parser.add_argument(
        "--timeout", type=positive_seconds, default=5.0, metavar="SEC", help="seconds to wait for data (default: 5)"
    )
    add_connect_arguments(parser, many=True)


def run(options: argparse.Namespace) -> int:
    if options.replay:
        return replay.run(options)
    settle_options(options)
    if is_for_browser(options):
        keys_of_daemons(options)  # Tell about invalid keys now, not in the browser.
        return serve_screen(options)
    return watch_live(options)


def watch_live(options: argparse.Namespace) -> int:
    """Show the screen or print a report of live processes. `options` must already be complete (`settle_options`)."""
    if not (options.once or options.duration or is_headless(options)):
        with open_feed(options, options.source, window_s(options)) as feed:
            judge_as_asked(feed, options)
            return show_on_screen(feed, options, options.merge)
    seconds = window_s(options) if options.window is not None else options.duration or DEFAULT_WINDOW_S
    with open_feed(options, options.source, seconds) as feed:
        judge_as_asked(feed, options)
        feed.follow_records(options.view == TIMELINE or options.format == HTML)
        _wait_for_data(feed, options)
        if options.view == TIMELINE or options.format == HTML:
            _wait_for_records(feed, options.timeout)
        if options.view in (SOURCES, DEVICES):
            _wait_for_devices(feed, options.timeout)
        was_live = bool(running(feed))
        if not options.once and (options.headless or options.duration):
            _watch(feed, options, options.duration)
        elif shows_window(options, by_default=options.view != DEVICES):
            _watch(feed, options, seconds)
        elif runs_ranks(feed):
            _watch(feed, options, RANKS_WATCH_S)
        return _report(feed, options, was_live)


def _wait_for_data(feed: Feed, options: argparse.Namespace) -> None:
    """Wait until every daemon has answered and a live source has data. Stop waiting at the timeout."""
    from cbtop.viewmodels.selection import has_data

    deadline_s = time.monotonic() + options.timeout
    while time.monotonic() < deadline_s and (
        feed.links.unanswered
        or feed.links.unread
        or not any(has_data(record, options.phase) for record in running(feed))
    ):
        feed.poll(POLL_MS)
        if feed.refused:
            raise CbtopError(feed.refused)


def _wait_for_devices(feed: Feed, timeout_s: float) -> None:
    """Wait until every device has two samples, because averages need two. Stop waiting at the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not feed.knows_devices and time.monotonic() < deadline_s:
        feed.poll(POLL_MS)


def _wait_for_records(feed: Feed, timeout_s: float) -> None:
    """Wait until every running source has recorded something. Stop waiting at the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not all(len(record.recent) for record in running(feed)) and time.monotonic() < deadline_s:
        feed.poll(POLL_MS)


def _watch(feed: Feed, options: argparse.Namespace, duration_s: float | None) -> None:
    """Wait for the requested duration, or without one until all sources have ended. Ctrl-C ends the wait.

    A daemon sends a few times a second, so the window may be complete a moment later.
    """
    begun_s, line = time.monotonic(), ProgressLine(sys.stderr)

    def is_over() -> bool:
        if duration_s is None:
            return False
        has_watched = all(record.window.has_watched for record in running(feed))
        return time.monotonic() >= begun_s + duration_s + (0 if has_watched else MAX_LONGER_S)

    try:
        with noted_interrupt() as is_interrupted:
            while running(feed) and not is_over():
                if duration_s is not None and sys.stderr.isatty():
                    line.show("watching", (time.monotonic() - begun_s) / duration_s)
                feed.poll(POLL_MS)
                if feed.refused:
                    raise CbtopError(feed.refused)
                if is_interrupted():
                    return  # After Ctrl-C, print the report with the data received until now.
    finally:
        line.clear()


def _report(feed: Feed, options: argparse.Namespace, was_live: bool) -> int:
    """Print the report of `cbtop`. `was_live` tells whether a source was running when this command began to watch."""
    from cbtop.viewmodels.selection import has_data, is_live, state_of

    records = known(feed)
    live = [record for record in records if is_live(record)]
    # If no process runs, show the newest ended process. Otherwise show only running processes.
    if live:
        shown = [record for record in live if has_data(record, options.phase)]
    else:
        shown = _last_with_data(feed, records, options)
    views: Sequence[SourceView] = ()
    if shown:
        if options.merge and (left := _wait_for_members(feed, shown, options.timeout)):
            sys.stderr.write(f"cbtop: time is up, and what {left} that ended left is not read\n")
        window = shows_window(options, by_default=bool(live or options.duration))
        views = as_asked(feed, (record.key for record in shown), options, window=window)
        print_report(views, options)
    if shown and feed.links.unanswered:
        sys.stderr.write(f"cbtop: {unanswered(feed)}; what runs there is not shown\n")
    if shown and feed.links.unread:
        sys.stderr.write(f"cbtop: {unread(feed)}; not all that runs there is shown\n")
    waiting = [str(pid_of(record)) for record in live if not has_data(record, options.phase)]
    if shown and waiting:
        sys.stderr.write(f"cbtop: not shown, for no {_wanted(options)} has come yet: pid {', '.join(waiting)}\n")
    if feed.left_out:
        sys.stderr.write(f"cbtop: {feed.left_out}\n")
    faulty = [record for record in records if record.state and record.state.state is SourceStatus.FAULTY]
    if faulty:
        what = "; ".join(f"pid {pid_of(one)} is not to be trusted: {one.state.reason}" for one in faulty if one.state)
        raise UntrustedError(what)
    require_passed_checks(views)
    if not shown:
        raise NoDataError(_why_nothing(feed, live, options))
    if not was_live:
        state = shown[0].state
        how = state_of(shown[0]) + (f" ({state.reason})" if state and state.reason else "")
        raise NoDataError(f"nothing is running; shown is pid {pid_of(shown[0])}, {how}; {how_to_start()}")
    return 0


def how_to_start() -> str:
    """Return a text with ways to start a process to watch."""
    return (
        f"start {how_to_demo()} for something to watch, `cbtop run -- python …` for a torch program of yours, "
        "or instrument a process of yours: `from cbtop import BrickProfiler, BrickId`"
    )


def _last_with_data(feed: Feed, ended: list[SourceRecord], options: argparse.Namespace) -> list[SourceRecord]:
    """Return a list with the newest ended source that has data. The list is empty if no ended source has data."""
    from cbtop.viewmodels.selection import has_data

    deadline_s = time.monotonic() + options.timeout
    for record in ended:
        while record.is_unread and time.monotonic() < deadline_s:
            feed.want(record.key)
            feed.poll(POLL_MS)
        if has_data(record, options.phase):
            return [record]
    return []


def _wait_for_members(feed: Feed, shown: Sequence[SourceRecord], timeout_s: float) -> int:
    """Read the data of all sources that may be merged with the shown ones, until all is read or the timeout.

    Returns how many sources still lack data.
    """
    deadline_s = time.monotonic() + timeout_s
    while (left := set[str]().union(*(feed.read_alike(one.key) for one in shown))) and time.monotonic() < deadline_s:
        feed.poll(POLL_MS)
    return len(left)


def _why_nothing(feed: Feed, live: list[SourceRecord], options: argparse.Namespace) -> str:
    if feed.links.unanswered:
        return unanswered(feed)
    if feed.links.unread:
        return f"{unread(feed)}; raise --timeout (now {options.timeout:g} s)"
    if not live and options.source:
        asked = " or ".join(f"pid {one}" if one.isdecimal() else one for one in options.source)
        return (
            f"no instrumented process is {asked}; `cbtop ls` lists what there is, and `cbtop run -- COMMAND` "
            f"instruments a torch program{_attach_hint(options.source)}"
        )
    if not live:
        return f"nothing is running: {how_to_start()}"
    busy = ", ".join(f"pid {pid_of(one)} is {one.activity.name or 'there'}" for one in live)
    return f"{busy}, but no {_wanted(options)} has come yet; raise --timeout (now {options.timeout:g} s)"


def _attach_hint(asked: Sequence[str]) -> str:
    """Return a hint to `cbtop attach` if one of the sources is the id of a process of this user's machine."""
    pid = next((one for one in asked if one.isdecimal() and process_start(int(one)) is not None), "")
    return f"; `cbtop attach {pid}` instruments a Python process that runs already" if pid else ""


def _wanted(options: argparse.Namespace) -> str:
    return f"{options.phase} step" if options.phase else "step"


def unanswered(feed: Feed) -> str:
    """Return a text with the addresses at which no daemon has answered."""
    return f"no answer from {', '.join(feed.links.unanswered)}"


def unread(feed: Feed) -> str:
    """Return a text with the daemons that have sent more data than this viewer could apply in time."""
    return f"time is up, and there is more to read from {', '.join(feed.links.unread)}"


def known(feed: Feed) -> list[SourceRecord]:
    """Return all sources. The newest running source comes first."""
    seen = feed.seen()
    return [seen[source.key].record for source in feed.sources()]


def running(feed: Feed) -> list[SourceRecord]:
    """Return the sources that are known to run."""
    from cbtop.viewmodels.selection import is_live

    return [record for record in known(feed) if is_live(record)]


def runs_ranks(feed: Feed) -> bool:
    """Return whether several ranks of a job run, so that they can be compared."""
    return sum(record.hello is not None and record.hello.rank is not None for record in running(feed)) > 1


def pid_of(record: SourceRecord) -> int:
    """Return the process id of a source, or 0 if it is not yet known."""
    return record.hello.pid if record.hello else 0
