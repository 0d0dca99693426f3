"""Open a daemon's history as a recording while the live feed goes on."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from cbtop.client.source_record import HISTORY_S
from cbtop.client.stream_recorder import save_history
from cbtop.errors import CbtopError
from cbtop.feeds.feed import Feed
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.keys import ViewerKeys


def look_back(feed: Feed) -> Callable[[], ReplayFeed]:
    """Return a function that fetches the history of the sources in `feed`, which must have exactly one daemon.

    It blocks, so call it in a thread. It raises CbtopError, ProtocolError or OSError with the reason.
    """
    assert feed.links.endpoint is not None

    ask = partial(_opened, feed.links.endpoint, feed.keys.get(feed.links.endpoint), feed.window_s, tuple(feed.seen()))
    silenced, baselines, marks = feed.silenced, feed.baselines, deepcopy(feed.marks)

    def fetch() -> ReplayFeed:
        found = ask()
        found.is_playing = False
        found.silenced, found.baselines = silenced, baselines
        if marks is not None:
            found.playback.marks.take(marks)
        return found

    return fetch


def remembered(feed: Feed) -> list[ReplayFeed]:
    """Return the history of each daemon of `feed`, limited to the sources in `feed`, at its last moment and without
    curves.

    Blocks for some time if a daemon does not answer. The caller must close the results.
    """
    found = []
    for endpoint in feed.links.answered:
        try:
            past = _opened(endpoint, feed.keys.get(endpoint), feed.window_s, tuple(feed.seen()), curves_s=0)
        except (CbtopError, ProtocolError, OSError):
            continue  # This daemon has an older version, or stores no history.
        past.is_playing = False
        past.seek(past.duration_s)
        found.append(past)
    return found


def _opened(
    endpoint: str,
    keys: ViewerKeys | None,
    window_s: float,
    selected: tuple[str, ...],
    curves_s: float = HISTORY_S,
) -> ReplayFeed:
    """Open a daemon's history from a temporary file, which is deleted at once, so that it does not remain after an
    error.
    """
    with TemporaryDirectory(prefix="cbtop-") as directory:
        saved = save_history(endpoint, keys, Path(directory))
        return ReplayFeed(saved.path, window_s, selected=selected, is_history=True, curves_s=curves_s)
