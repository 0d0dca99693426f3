"""What a daemon remembers, opened as a recording to look back in while it is still listened to."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from cbtop.client.feed import Feed
from cbtop.client.replay import ReplayFeed
from cbtop.client.store import HISTORY_S
from cbtop.client.stream_recorder import save_history
from cbtop.errors import CbtopError
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.keys import ViewerKeys


def look_back(feed: Feed) -> Callable[[], ReplayFeed]:
    """What asks the daemon of `feed`, its only one, for what it remembers of the sources that are there now.

    It waits for that: a thread is to call it. It raises CbtopError, ProtocolError or OSError, with the reason.
    """
    assert feed.endpoint is not None

    ask = partial(_opened, feed.endpoint, feed.keys, feed.window_s, tuple(feed.seen()))
    silenced, baselines, marks = feed.silenced, feed.baselines, deepcopy(feed.marks)

    def fetch() -> ReplayFeed:
        found = ask()
        found.is_playing = False
        found.silenced, found.baselines = silenced, baselines
        if marks is not None:
            found.take_marks(marks)
        return found

    return fetch


def remembered(feed: Feed) -> list[ReplayFeed]:
    """What each daemon of `feed` remembers of the sources that are there now, at its end and without their curves.

    It waits for that, a while of each that does not answer. They are to be closed.
    """
    found = []
    for endpoint in feed.answered:
        try:
            past = _opened(endpoint, feed.keys, feed.window_s, tuple(feed.seen()), curves_s=0)
        except (CbtopError, ProtocolError, OSError):
            continue  # older, or it keeps none
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
    """In a file without a name: nothing is left of it once it is closed."""
    with TemporaryDirectory(prefix="cbtop-") as directory:
        saved = save_history(endpoint, keys, Path(directory))
        return ReplayFeed(saved.path, window_s, selected=selected, is_history=True, curves_s=curves_s)
