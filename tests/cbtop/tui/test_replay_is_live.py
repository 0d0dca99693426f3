"""Tests of replays: at each moment, every view of the replay equals the live screen of that moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.widgets import ContentSwitcher

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.store import Store
from cbtop.feeds.feed import FeedEnd, StoreViews
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.messages import DaemonHello
from cbtop.protocol.recording import FrameKind, RecordingReader
from cbtop.tui.app import CbtopApp
from cbtop.tui.replay_app import ReplayApp
from cbtop.tui.views import VIEWS
from cbtop.viewmodels.time_travel import TimeView
from tests.cbtop.conftest import screen_text
from tests.cbtop.feeds.test_replay import IMPERFECT, Hand, leaves
from tests.representatives import first_by_default


class Watching(StoreViews):
    """A viewer that connected when the recording began and received all messages up to `until_s`."""

    is_complete, refused = True, ""

    def __init__(self, path: Path, *, until_s: float) -> None:
        super().__init__(())
        self._store = Store(DEFAULT_WINDOW_S)
        reader = RecordingReader(path)
        self._now_ns = reader.begin_ns + round(until_s * 1e9)
        self._store.keep_records(True)
        for frame in reader.frames(0, (FrameKind.KEYFRAME, FrameKind.LIVE, FrameKind.RECORDS)):
            is_join = frame.kind == FrameKind.KEYFRAME and self._store.daemon is None
            if frame.time_ns <= self._now_ns and (is_join or frame.kind != FrameKind.KEYFRAME):
                for message in frame.messages():
                    assert is_join or not isinstance(message, DaemonHello)
                    self._store.apply(message)
        reader.close()

    @property
    def store(self) -> Store:
        return self._store

    @property
    def now_ns(self) -> int:
        return self._now_ns

    def follow_records(self, on: bool) -> None:
        """Do nothing, because this viewer receives records from the start."""

    def watched(self) -> TimeView | None:
        return None

    def status(self) -> str:
        return "here"

    def finished(self) -> FeedEnd | None:
        return None


async def screens(app: CbtopApp, size: tuple[int, int]) -> dict[str, tuple[list[str], list[object]]]:
    """Return the text of each view (with its header), and all values that are drawn in the view."""
    found = {}
    app.window = True
    async with app.run_test(size=size) as pilot:
        for number, view in enumerate(VIEWS, 1):
            await pilot.press(str(number))
            await pilot.pause()
            body = app.query_one(ContentSwitcher).region
            lines = screen_text(app).splitlines()
            assert app.source is not None
            values = leaves(app.source.steps), leaves(app.source.bricks), leaves(app.source.verdicts)
            shown = [*lines[1 : app.query_one("#tabs").region.y], *lines[body.y : body.bottom]]
            found[view.title] = shown, [one for value in values for one in value]
    return found


@pytest.mark.usefixtures("known_cost")
@first_by_default(
    ("size", "at_s", "before_s"),
    [
        pytest.param((80, 24), 19.3, (22, 3), id="80x24"),
        pytest.param((120, 40), 11.2, range(11), id="120x40 played"),
        pytest.param((200, 60), 23.9, (23.9, 1, 20), id="200x60", marks=pytest.mark.slow),
    ],
)
async def test_the_screen_at_a_moment_of_a_replay_is_the_one_that_was_live(
    size: tuple[int, int], at_s: float, before_s: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await screens(CbtopApp(Watching(IMPERFECT, until_s=at_s), interval_s=60), size)
    with ReplayFeed(IMPERFECT, clock_s=Hand()) as replay:
        replay.is_playing = False
        replay.follow_records(True)
        # When a view is closed, the replay must continue to follow records, as the live viewer does.
        monkeypatch.setattr(replay, "follow_records", lambda _: None)
        for to_s in before_s:
            replay.seek(to_s)
        replay.seek(at_s)
        # The replay has a time bar, so its screen is one line higher.
        replayed = await screens(ReplayApp(replay, interval_s=60), (size[0], size[1] + 1))
    for title, (text, values) in live.items():
        assert replayed[title][1] == values, title
        assert replayed[title][0] == text, title
    assert len({"\n".join(text) for text, _ in live.values()}) == len(VIEWS)
