"""The options that choose and merge processes, in live views and in replays."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cbtop.errors import UsageError
from cbtop.protocol.errors import RecordingError, VersionError
from cbtop.viewmodels.merge_mode import MergeMode

if TYPE_CHECKING:  # imported for types only, because numpy and zmq load slowly
    from cbtop.feeds.feed import Views
    from cbtop.viewmodels.source import SourceView


def add_source_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses processes. Its value is a list for `cbtop.viewmodels.source.is_selected`."""
    parser.add_argument(
        "--source", type=_source, action="append", default=[], metavar="WHICH",
        help="show only this process: its pid, rank=N or its key in `cbtop ls`; more than once for several",
    )  # fmt: skip


def add_merge_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that merges the figures of several processes."""
    parser.add_argument(
        "--merge",
        type=_mode,
        metavar="{" + ",".join(MergeMode) + "}",
        help="show all processes of a model as one: their sum, of each brick the slowest, or side by side",
    )


def judge_as_asked(feed: Views, options: argparse.Namespace) -> None:
    """Apply the user's options about verdicts and the baseline to `feed`.

    Raises UsageError for an invalid baseline.
    """
    feed.silenced = options.silence
    if options.baseline is None:
        return
    from cbtop.feeds.replay import baselines_in

    last_s = None if options.window in (None, math.inf) else options.window
    try:
        feed.baselines = baselines_in(options.baseline, last_s)
    except (RecordingError, VersionError) as error:
        raise UsageError(f"--baseline: {error}") from error
    if not feed.baselines:
        raise UsageError(
            f"--baseline {options.baseline}: no process has steps in 5 or more of its seconds; record for longer"
        )


def as_asked(feed: Views, keys: Iterable[str], options: argparse.Namespace, *, window: bool) -> list[SourceView]:
    """Return the views of the sources `keys`, merged if the options say so.

    With `window`, over the recent window, otherwise since the start of each source.
    """
    found: dict[str, SourceView] = {}
    for key in keys:
        if options.merge is None:
            view = feed.view(key, options.phase, window=window)
        elif any(other.merged and key in other.merged.keys for other in found.values()):
            continue
        else:
            view = feed.merged(options.merge, key, options.phase, window=window)
        if view is not None:
            found[key] = view
    return list(found.values())


def _source(text: str) -> str:
    kind, _, number = text.rpartition("=")
    if kind in ("", "rank") and number.isdecimal():
        return f"{kind}={int(number)}" if kind else str(int(number))
    if text.count(":") < 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pid, rank=N or key; `cbtop ls` prints pids and keys")
    return text


def _mode(text: str) -> MergeMode:
    try:
        return MergeMode(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(MergeMode)}") from None
