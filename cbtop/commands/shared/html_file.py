"""Make the HTML report of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cbtop.errors import NoDataError, UsageError
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.errors import RecordingError, VersionError
from cbtop.reports.html import html_report


def document_of(path: Path, selected: Sequence[str] = ()) -> tuple[bytes, str, bool]:
    """Return the report of a recording at its end, a text about what a damaged recording has lost, and whether the
    recording was closed.

    `selected` limits the processes. Raises UsageError if the file is not a recording, and NoDataError if it has no
    data.
    """
    try:
        feed = ReplayFeed(path, selected=selected)
    except (RecordingError, VersionError) as error:
        raise UsageError(str(error)) from error
    with feed:
        feed.follow_records(True)
        feed.seek(feed.duration_s)
        views = [view for one in feed.sources() if (view := feed.view(one.key)) is not None and view.has_data]
        if not views:
            who = f" of --source {', '.join(selected)}" if selected else ""
            raise NoDataError(f"{path} holds no data{who}")
        damage = f"{feed.status()}: what they held is missing" if feed.damage else ""
        replay = feed.replay()
        return f"{html_report(views, replay, damage=damage)}\n".encode(), damage, replay.is_complete
