"""Tests of looking back with a real daemon: a past moment shows what was live then.

New data is still read while a past moment is shown.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from cbtop.client import stream_recorder
from cbtop.errors import CbtopError
from cbtop.feeds.feed import Feed
from cbtop.feeds.look_back import look_back
from cbtop.viewmodels.source import SourceView
from tests.integration.hosts import DEADLINE_S, daemon, eventually, host


def steps(view: SourceView | None) -> int:
    return view.steps.count if view and view.steps else 0


def test_what_the_daemon_remembers_ends_with_what_is_live_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(stream_recorder, "ANSWER_WITHIN_S", DEADLINE_S)
    with daemon(), Feed() as feed:
        feed.silenced = ("roof-unsure",)
        eventually(lambda: feed.poll(20) or feed.is_complete)
        with host(steps=200) as process:
            process.wait()
        eventually(lambda: feed.poll(20) or [one.state for one in feed.sources()] == ["ended"])
        live = feed.view()
        assert live is not None
        assert steps(live) == 200
        with host(steps=30) as other, look_back(feed)() as past:
            assert os.listdir(tmp_path) == []
            assert past.silenced == ("roof-unsure",)
            assert not past.is_playing
            assert past.replay().is_history
            past.seek(past.duration_s)
            view = past.view(live.key)
            assert view is not None
            assert (view.steps, view.bricks, view.books) == (live.steps, live.bricks, live.books)
            # Only the requested process is in the recording.
            assert [source.key for source in past.sources()] == [live.key]
            past.select(0, past.duration_s)
            past.advance()
            assert steps(past.view(live.key)) == 200  # number of all steps since the process began
            other.wait()
            eventually(lambda: feed.poll(20) or {steps(feed.view(one.key)) for one in feed.sources()} == {200, 30})
        watched = eventually(lambda: feed.poll(20) or ((found := feed.watched()) and found.at_s and found))
        assert watched.at_s == watched.duration_s


@pytest.mark.slow
def test_a_daemon_without_history_or_of_an_older_version_gives_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_recorder, "ANSWER_WITHIN_S", DEADLINE_S)
    with daemon("--history", "0"), Feed() as feed:
        eventually(lambda: feed.poll(20) or feed.is_complete)
        with pytest.raises(CbtopError, match="keeps no history"):
            look_back(feed)()
        monkeypatch.setattr(stream_recorder, "ANSWER_WITHIN_S", 0.2)
        monkeypatch.setattr(stream_recorder, "HISTORY_PREFIX", b"history-of-a-later-version")
        with pytest.raises(CbtopError, match="it is gone, or older than this cbtop"):
            look_back(feed)()
