"""Options of reports, and the start of the screen. `cbtop` and `cbtop demo` share this module."""

from __future__ import annotations

import argparse
import gc
import io
import math
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.commands.shared.names import one_of, unknown
from cbtop.commands.shared.settings import SettingsKey, config_file, settle, yes_or_no
from cbtop.commands.shared.sort_memory import remember_orders, remembered_orders
from cbtop.errors import FailedCheckError, UsageError
from cbtop.protocol.endpoint import parse_endpoint
from cbtop.protocol.errors import EndpointError, KeysError
from cbtop.protocol.vocabulary import VIEWER_KEY
from cbtop.reports import OVERVIEW, REPORTS, VIEWS
from cbtop.text import ascii_signs
from cbtop.tui.in_browser import is_in_browser
from cbtop.viewmodels.merge_mode import MergeMode

# Imported for types only. Loading numpy and zmq would take longer than the rest of `cbtop --help`.
if TYPE_CHECKING:
    from cbtop.feeds.feed import Feed
    from cbtop.feeds.replay import ReplayFeed
    from cbtop.protocol.keys import ViewerKeys
    from cbtop.tui.app import CbtopApp
    from cbtop.tui.run_app import AppProgram
    from cbtop.viewmodels.source import SourceView
    from cbtop.viewmodels.time_travel import ReplayView

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.25, 5.0
MIN_WINDOW_S, MAX_WINDOW_S = 1.0, 3600.0
# Garbage is collected after this many new objects. A frame of the screen makes about 2,000, and the next frame frees
# them.
YOUNG_OBJECTS = 5_000
THEMES = ("dark", "light")
# Some views have a different name on a tab of the screen. The tab's name is accepted, too.
TABS = {"overview": OVERVIEW, "graph": "tree"}
ALL = math.inf  # length of a window that contains all data


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the content and the form of a report or the screen."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--headless",
        action="store_true",
        help="print text instead of opening the screen (as when stdout is no terminal)",
    )
    group.add_argument(
        "--view", type=_view, metavar="VIEW",
        help="contents of the text report, or first view of the screen: overview (the default, at most 60 lines), "
        f"{', '.join(VIEWS)}, or all; graph is another name of tree",
    )  # fmt: skip
    group.add_argument(
        "--sort", type=_column, metavar="COLUMN",
        help="sort bricks by this column of the screen, such as p95: largest numbers first, names from A to Z",
    )  # fmt: skip
    group.add_argument(
        "--filter", metavar="TEXT",
        help="list only bricks with TEXT in their name or category. TEXT may be a regular expression with at most "
        "two repetitions, and none of a group. JSON lists all bricks",
    )  # fmt: skip
    group.add_argument("--format", choices=list(REPORTS), default="text", help="format of the report (default: text)")
    group.add_argument(
        "--phase",
        metavar="NAME",
        help="show these steps: train, decode, prefill, … (default: train if it took most time, otherwise decode, "
        "otherwise the phase that took most time)",
    )
    group.add_argument(
        "--window", type=_window, metavar="SEC|all",
        help=f"time range of the figures: the last SEC seconds, or `all` (default: the last {DEFAULT_WINDOW_S:g} s "
        "of a running process, otherwise all; `r` switches on the screen)",
    )  # fmt: skip
    group.add_argument(
        "--silence", type=_verdict, action="append", metavar="ID",
        help="omit the verdict with this id, as in text and JSON; repeat for several",
    )  # fmt: skip
    _add_looks_arguments(group)
    group.add_argument(
        "--preset", metavar="NAME", help=f"options of the table [preset.NAME] in {_config_file_as_typed()}"
    )
    group.add_argument(
        "--baseline", type=Path, metavar="FILE",
        help="compare with this recording, or with its last SEC seconds if --window SEC is given (`b` sets the "
        "baseline on the screen)",
    )  # fmt: skip
    group.add_argument(
        "-i", "--interval", type=_interval, default=0.5, metavar="SEC",
        help=f"seconds between redraws, {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} (default: 0.5)",
    )  # fmt: skip


def _add_looks_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options for colours and for ASCII signs."""
    group.add_argument(
        "--theme",
        type=_theme,
        metavar="NAME",
        help=f"colours of the screen: {' or '.join(THEMES)} (default: from the terminal's background)",
    )
    group.add_argument(
        "--ascii", action=argparse.BooleanOptionalAction,
        help="draw with ASCII only (default: if the terminal's encoding is ASCII, or the locale is C)",
    )  # fmt: skip
    group.add_argument(
        "--color",
        action=argparse.BooleanOptionalAction,
        help="colours on the screen (default: unless NO_COLOR is set)",
    )


def settle_options(options: argparse.Namespace) -> None:
    """Set each option that is not on the command line from the settings. Raises UsageError for an invalid value."""
    settle(options, SETTINGS)


def add_connect_arguments(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """Add the options for the address of the daemon. With `many`, the user may give several addresses."""
    group = parser.add_argument_group("connection")
    address = "a daemon's address, ipc:///path or tcp://HOST:PORT"
    default = "(default: your own daemon; if none runs, one starts in this process)"
    if many:
        group.add_argument(
            "--connect", type=endpoint, action="append", default=[], metavar="ENDPOINT",
            help=f"{address}; repeat for several {default}",
        )  # fmt: skip
    else:
        group.add_argument("--connect", type=endpoint, metavar="ENDPOINT", help=f"{address} {default}")
    key = "with --connect tcp://…: the daemon's public key (see cbtop keys)"
    if many:
        group.add_argument(
            "--server-key", action="append", metavar="KEY|FILE", help=f"{key}; one for each, in the same order"
        )
    else:
        group.add_argument("--server-key", metavar="KEY|FILE", help=key)
    group.add_argument(
        "--key", metavar="NAME", help=f"with --server-key: the key pair of this viewer (default: {VIEWER_KEY})"
    )


def open_feed(
    options: argparse.Namespace,
    selected: Sequence[str] = (),
    window_s: float = DEFAULT_WINDOW_S,
    *,
    looks_back: bool = True,
) -> Feed:
    """Return the feed for the options of `add_connect_arguments`.

    With `looks_back`, a daemon that is started in this process keeps a history. Raises UsageError for invalid keys.
    """
    from cbtop.daemon.history import MAX_HISTORY_S
    from cbtop.feeds.feed import Feed

    try:
        history_s = MAX_HISTORY_S if looks_back else 0.0
        return Feed(options.connect, window_s, keys_of_daemons(options), selected, history_s)
    except KeysError as error:
        raise UsageError(str(error)) from error


def viewer_keys(options: argparse.Namespace) -> ViewerKeys | None:
    """Return the keys for the options of `add_connect_arguments` without `many`. Raises UsageError if they are
    invalid.
    """
    return next(iter(keys_of_daemons(options).values()), None)


def keys_of_daemons(options: argparse.Namespace) -> dict[str, ViewerKeys]:
    """Return the keys for each TCP address in the options of `add_connect_arguments`, or {} without `--server-key`.

    Raises UsageError if they are invalid.
    """
    from cbtop.protocol.keys import ViewerKeys, keys_dir, load_pair, parse_public_key

    addresses = [options.connect] if isinstance(options.connect, str) else options.connect or []
    tcp = list(dict.fromkeys(address for address in addresses if address.startswith("tcp://")))
    given = [options.server_key] if isinstance(options.server_key, str) else options.server_key or []
    if not given:
        if options.key is not None:
            raise UsageError("--key needs --server-key, the daemon's public key")
        return {}
    if not tcp:
        raise UsageError("--server-key needs --connect tcp://HOST:PORT")
    if len(tcp) != len(given):
        raise UsageError(
            f"{len(tcp)} --connect tcp://HOST:PORT and {len(given)} --server-key; pass one key for each, in the same "
            "order"
        )
    try:
        servers = [parse_public_key(key) for key in given]
        own = load_pair(keys_dir(), options.key or VIEWER_KEY)
        return {address: ViewerKeys(own, server) for address, server in zip(tcp, servers, strict=True)}
    except KeysError as error:
        raise UsageError(str(error)) from error


def is_headless(options: argparse.Namespace) -> bool:
    """Return whether to print a report instead of showing the screen: on request, or without a suitable terminal.

    The screen reads keys from stdin, and a user who redirects stdout wants text. Stderr may be redirected. In a
    browser, pipes connect the screen to the server.
    """
    if is_in_browser():
        return bool(options.headless)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return bool(options.headless) or not is_terminal


def print_report(views: Sequence[SourceView], options: argparse.Namespace, replay: ReplayView | None = None) -> None:
    """Print one report on stdout. `replay` is the shown position in the recording, or None without a recording."""
    from cbtop.text.row_filter import RowChoice

    settle_signs(options)
    sections = list(VIEWS) if options.view == "all" else [options.view]
    rows = RowChoice(options.sort or "", options.filter)
    sys.stdout.write(REPORTS[options.format](views, sections, replay, rows) + "\n")
    sys.stdout.flush()


def require_passed_checks(views: Iterable[SourceView]) -> None:
    """Raise FailedCheckError for the first failed check of a brick, if any check has failed."""
    failed = [(view, check) for view in views for check in view.failed_checks]
    if failed:
        view, check = failed[0]
        more = f", and {len(failed) - 1} more failed" if len(failed) > 1 else ""
        raise FailedCheckError(f"{check.about} of pid {view.pid} fails its check `{check.assertion}`{more}")


def check_phase(views: Sequence[SourceView], options: argparse.Namespace) -> None:
    """Raise UsageError if no source has the requested phase."""
    known = {steps.phase for view in views for steps in view.phases}
    if options.phase is not None and options.phase not in known:
        hint = f"choose {' or '.join(sorted(known))}" if known else "there are no steps at all"
        raise UsageError(f"--phase {options.phase}: there are no such steps; {hint}")


def show_on_screen(
    feed: Feed | ReplayFeed,
    options: argparse.Namespace,
    merge: MergeMode | None = None,
    program: AppProgram | None = None,
) -> int:
    """Open the screen on `feed`.

    The output of `program` is shown as a view. Returns the exit code when the screen closes.
    """
    settle_colours(options)
    # Existing modules and objects live as long as the screen, so exclude them from garbage collection. Searching them
    # would take a tenth of the start time, and later several frames every ten seconds.
    gc.disable()
    # Imported here, because Textual takes a fifth of a second to load. Reports and --help do not need it.
    from cbtop.client.stream_recorder import save_history
    from cbtop.feeds.look_back import look_back
    from cbtop.feeds.replay import ReplayFeed
    from cbtop.tui.app import CbtopApp
    from cbtop.tui.replay_app import ReplayApp
    from cbtop.tui.run_app import RunApp

    app: CbtopApp
    if isinstance(feed, ReplayFeed):
        app = ReplayApp(feed, interval_s=options.interval, section=options.view)
    else:
        # Several daemons have several histories, and the screen cannot save several histories as one.
        address = feed.links.endpoint
        save = partial(save_history, address, feed.keys.get(address), Path.cwd()) if address else None
        back = partial(look_back, feed) if address else None
        if program is None:
            app = CbtopApp(feed, interval_s=options.interval, section=options.view, save_history=save, look_back=back)
        else:
            app = RunApp(
                feed, program, interval_s=options.interval, section=options.view, save_history=save, look_back=back
            )
    app.phase, app.window, app.merge = options.phase, shows_window(options, by_default=app.window), merge
    dress(app, options)
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    gc.enable()
    code = app.run()
    remember_orders(app.chosen_orders)
    end = feed.finished()
    if end and end.message:
        sys.stderr.write(f"cbtop: {end.message}\n")
    return app.return_code or code or 0


def settle_colours(options: argparse.Namespace) -> None:
    """Set the environment variable that turns colours on or off. Call this before Textual is loaded."""
    if options.color is False:
        os.environ["NO_COLOR"] = "1"
    elif options.color or not os.environ.get("NO_COLOR"):
        # By convention an empty NO_COLOR has no meaning, but Textual would turn colours off. So remove it.
        os.environ.pop("NO_COLOR", None)


def dress(app: CbtopApp, options: argparse.Namespace) -> None:
    """Apply the user's options for the order and filter of rows and for the theme to the app."""
    from cbtop.text.row_filter import RowChoice

    app.rows = RowChoice(options.sort or "", options.filter)
    app.orders = remembered_orders()
    app.choose_theme(options.theme)
    settle_signs(options)


def settle_signs(options: argparse.Namespace) -> None:
    """With `--ascii`, replace each special sign by an ASCII character, on stdout and on the screen.

    With `--no-ascii`, print special signs in every locale.
    """
    if options.ascii is None:
        return
    for stream in (sys.stdout, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="ascii" if options.ascii else "utf-8", errors=ascii_signs.ERRORS)


def endpoint(text: str) -> str:
    """Parse the address of a daemon, for argparse."""
    try:
        return parse_endpoint(text)
    except EndpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_seconds(text: str) -> float:
    """Parse a time in seconds above zero, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds above zero")
    return value


def window_s(options: argparse.Namespace) -> float:
    """Return the length of the window in seconds, by default the one that the screen uses."""
    return DEFAULT_WINDOW_S if options.window in (None, ALL) else float(options.window)


def shows_window(options: argparse.Namespace, *, by_default: bool) -> bool:
    """Return whether reports show the figures of the recent window. If False, reports show the figures of all
    data.
    """
    return by_default if options.window is None else options.window != ALL


def _config_file_as_typed() -> str:
    home, path = os.path.expanduser("~"), str(config_file())
    typed = f"~{path.removeprefix(home)}" if path.startswith(f"{home}/") else path
    return typed.replace("%", "%%")  # argparse formats help texts with %, so each % of the text must be doubled.


def _view(text: str) -> str:
    return one_of("view", [OVERVIEW, *VIEWS, "all"])(TABS.get(text.casefold(), text))


def _column(text: str) -> str:
    from cbtop.text.row_filter import SORT_COLUMNS, SORT_NAMES, bare

    if bare(text) not in SORT_NAMES:
        raise argparse.ArgumentTypeError(unknown("column", text, SORT_COLUMNS, SORT_NAMES))
    return SORT_NAMES[bare(text)]


def _verdict(text: str) -> str:
    from cbtop.viewmodels.verdicts import VERDICTS  # imported here, because this import loads numpy

    return one_of("verdict", [rule.id for rule in VERDICTS])(text)


def _theme(text: str) -> str:
    return one_of("theme", THEMES)(text)


def _interval(text: str) -> float:
    return _seconds(text, MIN_INTERVAL_S, MAX_INTERVAL_S)


def _window(text: str) -> float:
    return ALL if text == "all" else _seconds(text, MIN_WINDOW_S, MAX_WINDOW_S)


def _seconds(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not between {least:g} and {most:g} seconds")
    return value


# The keys of config.toml. Each key sets the command-line option of the same name.
SETTINGS = {
    "view": SettingsKey(_view, OVERVIEW),
    "window": SettingsKey(_window),
    "sort": SettingsKey(_column),
    "filter": SettingsKey(str, ""),
    "theme": SettingsKey(_theme),
    "ascii": SettingsKey(yes_or_no),
    "color": SettingsKey(yes_or_no),
    "silence": SettingsKey(_verdict, (), is_list=True),
}
