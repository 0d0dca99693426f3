"""The states of a process for tests of screens and reports. If a real recording contains a state, it is used."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest

from cbtop.feeds.replay import ReplayFeed
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView
from tests.cbtop import samples
from tests.cbtop.conftest import KnownCost
from tests.cbtop.seen_timelines import RECORDED

# Seconds in the recording: at 20 the process runs again after a recent stall, at 13 it is stalled.
LIVE_S, STALLED_S = 20.0, 13.0


@cache
def states() -> dict[str, SourceView | None]:
    """Return views of the process in each state, by name of the state. None means that no process is shown.

    Each call returns the same objects.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cbtop.feeds.feed.OwnCost", KnownCost)
        live = seen_at(LIVE_S)
        return {
            "live": live,
            "paused": live,
            "empty": None,
            "getting ready": replace(samples.COMPILING, listed=samples.list_of(samples.row_of(samples.COMPILING))),
            "stalled": seen_at(STALLED_S),
            "ended": seen_at(LIVE_S, of="ended"),
            "drops": with_losses(),
            "merged": merged(),
        }


def seen_at(at_s: float, of: str = "live") -> SourceView:
    """Return the view of the recorded process at `at_s`, in the state with the name `of`."""
    with ReplayFeed(RECORDED) as feed:
        feed.is_playing = False
        feed.follow_records(True)
        feed.seek(at_s)
        key = next(source.key for source in feed.sources() if source.state == of)
        view = feed.view(key, window=of == "live")
    assert view is not None
    return view


def with_losses() -> SourceView:
    """Return the running process in a state in which its daemon has lost some of its records."""
    with ReplayFeed(RECORDED) as feed:
        feed.is_playing = False
        feed.follow_records(True)
        feed.seek(LIVE_S)
        record = feed.store.sources[feed.sources()[0].key]
        assert record.state is not None
        produced, overwritten = record.state.produced + 1_500, record.state.overwritten + 1_500
        record.state = replace(record.state, produced=produced, overwritten=overwritten)
        view = feed.view(record.key, window=True)
    assert view is not None
    return view


def merged() -> SourceView:
    """Return the merged view of two ranks. Both ranks have the data of the same recorded process."""
    with ReplayFeed(RECORDED) as feed:
        feed.is_playing = False
        feed.seek(LIVE_S)
        key = feed.sources()[0].key
        record = feed.store.sources[key]
        for rank in range(2):
            other = deepcopy(record)
            assert other.hello is not None
            other.key = f"{key[:-1]}{rank}"
            other.hello = replace(other.hello, rank=rank, local_rank=rank, world_size=2, pid=other.hello.pid + rank)
            feed.store.sources[other.key] = other
        view = feed.merged(MergeMode.SUM, key, window=True)
    assert view is not None
    return view
