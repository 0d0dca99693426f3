"""What `cbtop` and `cbtop demo` share: the options of a report, and opening the screen."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence

from cbtop.errors import UsageError
from cbtop.feed import Feed
from cbtop.protocol.endpoint import parse_endpoint
from cbtop.protocol.errors import EndpointError
from cbtop.reports import REPORTS, SECTIONS
from cbtop.viewmodels.model import MergeMode, SourceView
from cbtop.window import DEFAULT_WINDOW_S

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.25, 5.0
MIN_WINDOW_S, MAX_WINDOW_S = 1.0, 3600.0


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose what is shown, and how."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--headless",
        action="store_true",
        help="print text instead of opening the screen (as when stdout is no terminal)",
    )
    group.add_argument(
        "--view", choices=[*SECTIONS, "all"], default="all", help="what a text report holds (default: all)"
    )
    group.add_argument("--format", choices=list(REPORTS), default="text", help="of a report (default: text)")
    group.add_argument("--phase", metavar="NAME", help="which steps: decode, prefill, … (default: decode)")
    group.add_argument(
        "--window", type=_window, metavar="SEC",
        help=f"show only the last SEC seconds (default: the whole life; on screen `r` shows the last "
        f"{DEFAULT_WINDOW_S:g} s)",
    )  # fmt: skip
    group.add_argument(
        "-i", "--interval", type=_interval, default=0.5, metavar="SEC",
        help=f"seconds between redraws, {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} (default: 0.5)",
    )  # fmt: skip


def is_headless(options: argparse.Namespace) -> bool:
    """Whether to print instead of opening the screen: asked for, or there is no terminal to open it on.

    Textual reads keys from stdin and draws on stderr; who redirects stdout wants text.
    """
    return bool(options.headless) or not all(s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr))


def print_report(views: Sequence[SourceView], options: argparse.Namespace) -> None:
    """One report on stdout."""
    sections = list(SECTIONS) if options.view == "all" else [options.view]
    sys.stdout.write(REPORTS[options.format](views, sections) + "\n")
    sys.stdout.flush()


def check_phase(views: Sequence[SourceView], options: argparse.Namespace) -> None:
    """Raises UsageError when no source has the phase that was asked for."""
    known = {steps.phase for view in views for steps in view.phases}
    if options.phase is not None and options.phase not in known:
        raise UsageError(f"--phase {options.phase}: no such steps; there are {', '.join(sorted(known)) or 'none'}")


def show_on_screen(feed: Feed, options: argparse.Namespace, merge: MergeMode | None = None) -> int:
    """Open the screen on `feed` and give the exit code when it closes."""
    if not os.environ.get("NO_COLOR"):
        os.environ.pop("NO_COLOR", None)  # an empty NO_COLOR asks for nothing, but Textual takes it as set
    # Textual takes a fifth of a second to load; reports and --help should not pay for it.
    from cbtop.app import CbtopApp

    app = CbtopApp(feed, interval_s=options.interval)
    app.phase, app.window, app.merge = options.phase, options.window is not None, merge
    code = app.run()
    end = feed.finished()
    if end and end.message:
        sys.stderr.write(f"cbtop: {end.message}\n")
    return app.return_code or code or 0


def endpoint(text: str) -> str:
    """An address, as argparse checks it."""
    try:
        return parse_endpoint(text)
    except EndpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def window_s(options: argparse.Namespace) -> float:
    """How long a window to keep in store: what was asked for, or what the screen's key will ask for."""
    return DEFAULT_WINDOW_S if options.window is None else float(options.window)


def _interval(text: str) -> float:
    return _seconds(text, MIN_INTERVAL_S, MAX_INTERVAL_S)


def _window(text: str) -> float:
    return _seconds(text, MIN_WINDOW_S, MAX_WINDOW_S)


def _seconds(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not between {least:g} and {most:g} seconds")
    return value
