"""Make timelines from the recording imperfect.cbtop, and processes with such a timeline."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from cbtop.feeds.replay import ReplayFeed
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.timeline import TimelineView
from tests.cbtop import samples

RECORDED = Path(__file__).with_name("imperfect.cbtop")


@lru_cache
def timeline_at(at_s: float) -> TimelineView:
    """Return the timeline of the last steps before `at_s`. Two calls with the same time return the same object."""
    with ReplayFeed(RECORDED) as feed:
        feed.is_playing = False
        feed.seek(at_s)
        feed.follow_records(True)
        view = feed.view(None, "decode")
    assert view is not None
    assert view.timeline is not None
    return view.timeline


def at(at_s: float) -> SourceView:
    return replace(samples.LIVE, timeline=timeline_at(at_s))
