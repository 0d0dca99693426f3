"""`cbtop.live`: snapshots of the running processes, in the form of the JSON report."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.errors import CbtopError, NoDataError

if TYPE_CHECKING:  # imported for types only, because numpy and zmq load slowly
    from cbtop.feeds.feed import Feed

POLL_MS = 100


def live(
    interval_s: float = 1.0,
    *,
    source: Sequence[str] = (),
    connect: Sequence[str] = (),
    phase: str | None = None,
    timeout_s: float = 5.0,
) -> Iterator[dict[str, Any]]:
    """Yield a snapshot of the running processes every `interval_s` seconds, until none is running.

    A snapshot is the object of `cbtop --headless --format json`, with figures of the last ten seconds. `source`,
    `connect` and `phase` are as on the command line. The connection is closed when the loop ends or is left.

    Raises ValueError if `interval_s` is no time from 0, NoDataError if no process with data runs within `timeout_s`,
    and CbtopError if all daemons reject this process.
    """
    from cbtop.feeds.feed import Feed
    from cbtop.reports.json import json_report

    if not 0 <= interval_s < math.inf:
        raise ValueError(f"interval_s is {interval_s}; seconds from 0 are expected")
    # Snapshots show only the present, so a daemon in this process keeps no history.
    with Feed(connect, DEFAULT_WINDOW_S, selected=source, history_s=0.0) as feed:
        _wait(feed, timeout_s, phase)
        while keys := _running(feed, phase):
            views = [view for key in keys if (view := feed.view(key, phase, window=True)) is not None]
            yield json.loads(json_report(views))
            until_s = time.monotonic() + interval_s
            _poll(feed, interval_s)
            while (left_s := until_s - time.monotonic()) > 0:
                _poll(feed, left_s)


def _wait(feed: Feed, timeout_s: float, phase: str | None) -> None:
    """Wait until a process with data runs. Raises NoDataError after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not _running(feed, phase):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise NoDataError(
                f"no running process has recorded a step within {timeout_s:g} s; `cbtop ls` lists what runs"
            )
        _poll(feed, left_s)


def _poll(feed: Feed, most_s: float) -> None:
    feed.poll(min(POLL_MS, max(1, round(1e3 * most_s))))
    if feed.refused:
        raise CbtopError(feed.refused)


def _running(feed: Feed, phase: str | None) -> list[str]:
    """Return the keys of the running processes with data, the newest first."""
    from cbtop.viewmodels.selection import has_data, is_live

    seen = feed.seen()
    records = [seen[one.key].record for one in feed.sources()]
    return [record.key for record in records if is_live(record) and has_data(record, phase)]
