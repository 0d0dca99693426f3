"""Tests of a time range of a recording: the range contains exactly the steps that ended in it.

This holds however the range was selected.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.recording import FrameKind, RecordingReader, RecordingWriter, encode_frame, frame_bytes
from cbtop.text import range_text, time_text
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView
from tests.cbtop.feeds.test_replay import Hand, known, leaves
from tests.cbtop.made_recordings import made_recording
from tests.integration.hosts import cbtop
from tests.representatives import first_by_default

IMPERFECT = Path(__file__).parents[1] / "imperfect.cbtop"
SECONDS = 40
moment_ms = st.integers(0, SECONDS * 1000)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a recording that no test may change."""
    directory = tmp_path_factory.mktemp("made")
    made_recording(directory, directory / "run.cbtop", SECONDS)
    return directory / "run.cbtop"


@pytest.fixture
def feed(made: Path) -> Iterator[ReplayFeed]:
    with ReplayFeed(made, clock_s=Hand()) as opened:
        yield opened


def select(feed: ReplayFeed, one_s: float, other_s: float) -> SourceView:
    feed.select(one_s, other_s)
    assert feed.advance()
    view = feed.view(None, "decode")
    assert view is not None
    return view


@given(one_ms=moment_ms, other_ms=moment_ms)
def test_a_range_holds_the_steps_that_ended_in_it_from_either_end(one_ms: int, other_ms: int, made: Path) -> None:
    with ReplayFeed(made, clock_s=Hand()) as feed:
        feed.seek(17)
        begin_s, end_s = sorted((one_ms / 1e3, other_ms / 1e3))
        view = select(feed, one_ms / 1e3, other_ms / 1e3)
        assert view.steps is not None
        assert view.steps.count == int(2 * end_s) - int(2 * begin_s)
        assert sum(brick.count for brick in view.bricks) == view.steps.count
        assert feed.range_s == pytest.approx((begin_s, end_s))
        assert feed.at_s == pytest.approx(end_s)


def test_its_label_says_from_when_to_when_and_how_many_steps(feed: ReplayFeed) -> None:
    view = select(feed, 3, 11.5)
    assert view.window is not None
    assert view.window.range_s is not None
    begin_s, end_s = view.window.range_s
    assert end_s - begin_s == pytest.approx(8.5)
    began, ended = time_text.moment(begin_s)[11:-2], time_text.moment(end_s)[11:-2]
    assert range_text.shown_time(view) == f"{began}–{ended}, 17 steps"
    merged = feed.merged(MergeMode.SUM)
    assert merged is not None
    assert range_text.shown_time(merged) == f"{began}–{ended}, 17 steps"
    assert view.listed is not None
    assert [range_text.rates_since(row) for row in view.listed.rows()] == [f"{began}–{ended}"]


def test_rate_curve_trend_and_layers_are_of_the_range_alone(feed: ReplayFeed) -> None:
    view = select(feed, 10, 20)
    assert view.steps is not None
    assert view.steps.tokens_per_sec == pytest.approx(2)
    assert len(view.tokens_per_sec_history) == 10
    assert view.tokens_per_sec_history == pytest.approx((2.0,) * 10)
    assert len(view.bricks[0].trend_us) == 10
    assert [pace.steps for pace in view.pace] == [2] * 10
    assert view.time_range is not None
    assert view.time_range.wall_us == pytest.approx(10e6)


def test_trails_are_of_the_range_alone_and_the_same_after_a_jump() -> None:
    def trails(view: SourceView | None) -> dict[str, tuple[tuple[float, float] | None, ...]]:
        assert view is not None
        return {row.name: row.trail for row in view.bricks if row.trail}

    with ReplayFeed(IMPERFECT, clock_s=Hand()) as feed:
        feed.seek(20)
        played = trails(feed.view(None, "decode"))
        feed.seek(3)
        feed.seek(20)
        assert trails(feed.view(None, "decode")) == played
        of_range = trails(select(feed, 10, 20))
    assert of_range.keys() == played.keys() == {"DownProjection", "UpProjection", "QkvProjection", "LmHead"}
    for name, trail in of_range.items():
        assert len(trail) in (10, 11)
        # The first second of the range may be incomplete, so it is not compared.
        assert trail[1:] == played[name][1 - len(trail) :]


def test_of_a_range_in_which_nothing_ended_nothing_is_shown(feed: ReplayFeed) -> None:
    view = select(feed, 10.1, 10.4)
    assert view.steps is not None
    assert (view.steps.count, view.bricks) == (0, ())
    assert range_text.shown_time(view).endswith(", 0 steps")


@pytest.mark.slow
def test_a_range_is_no_other_whichever_way_it_was_come_to() -> None:
    with ReplayFeed(IMPERFECT, clock_s=Hand()) as feed:
        found = []
        for before in ([], [feed.duration_s], [3, 9, 5], [12]):
            for at_s in before:
                feed.seek(at_s)
            select(feed, 4.3, 11.7)
            found.append(known(feed))
        assert all(one == found[0] for one in found)


def test_who_leaves_it_sees_what_was_seen_before(feed: ReplayFeed) -> None:
    feed.seek(20)
    before = known(feed)
    for ends in ((5, 9), (18, 22), (20, 30)):
        select(feed, *ends)
        feed.seek(20)
        assert feed.range_s is None
        assert [pair for pair in zip(known(feed), before, strict=True) if pair[0] != pair[1]] == []


def test_what_plays_stays_at_its_range(made: Path) -> None:
    hand = Hand()
    with ReplayFeed(made, clock_s=hand) as feed:
        select(feed, 5, 9)
        hand.now_s = 3
        feed.poll()
        assert (feed.range_s, feed.at_s) == ((5, 9), 9)


@pytest.mark.parametrize("is_followed", ["before", "after"])
def test_its_timeline_holds_the_records_of_its_steps_and_no_others(is_followed: str, made: Path) -> None:
    with ReplayFeed(made, clock_s=Hand()) as feed:
        feed.follow_records(is_followed == "before")
        feed.seek(30)
        select(feed, 12.2, 20.1)
        feed.follow_records(True)
        view = feed.view(None, "decode")
        assert view is not None
        assert view.steps is not None
        assert view.timeline is not None
        assert view.timeline.steps == view.steps.count == 16
        feed.seek(30)
        view = feed.view(None, "decode")
        assert view is not None
        assert view.timeline is not None
        assert view.timeline.newest_s is not None
        assert view.timeline.steps > 20  # The timeline is not limited to the range.


def test_two_ranges_side_by_side_hold_together_what_both_hold_as_one() -> None:
    with ReplayFeed(IMPERFECT, clock_s=Hand()) as feed:
        marks = [2.0, 5.5, 9.25, 14.0, feed.duration_s]

        def totals(*ends: float) -> dict[str, tuple[int, int, dict[str, int]]]:
            select(feed, *ends)
            views = [view for source in feed.sources() if (view := feed.view(source.key, "decode"))]
            return {
                view.key: (
                    view.steps.count,
                    view.steps.tokens,
                    {brick.name: brick.count for brick in view.bricks},
                )
                for view in views
                if view.steps
            }

        whole = totals(marks[0], marks[-1])
        parts = [totals(*both) for both in itertools.pairwise(marks)]
        assert sum(steps for steps, _, _ in whole.values()) > 100
        for key, (steps, tokens, bricks) in whole.items():
            found = [part[key] for part in parts if key in part]
            assert steps == sum(one[0] for one in found)
            assert tokens == sum(one[1] for one in found)
            names = set(bricks).union(*(one[2] for one in found))
            assert bricks == {name: sum(one[2].get(name, 0) for one in found) for name in names}


def test_books_and_stretch_of_a_range_close() -> None:
    with ReplayFeed(IMPERFECT, clock_s=Hand()) as feed:
        view = select(feed, 6, 13)
        books, time_range = view.books, view.time_range
        assert books is not None
        assert time_range is not None
        assert books.wall_us == pytest.approx(books.bricks_us + books.gaps_us + books.unattributed_us)
        parts = (time_range.in_steps_us, time_range.between_us, time_range.since_last_us)
        assert time_range.wall_us == pytest.approx(sum(part or 0.0 for part in parts))
        assert replace(view, graph=tuple(view.graph)).window is not None


# --- saved --------------------------------------------------------------------------------------------------


def saved(feed: ReplayFeed, directory: Path) -> Path:
    with closing(feed.playback.cut_out()) as cut:
        done = cut.save(directory)
    assert done.size_bytes <= done.path.stat().st_size
    return done.path


@first_by_default(
    "ends", [(4.3, 11.7), (0, 3), *(pytest.param(ends, marks=pytest.mark.slow) for ends in ((20, 24), (9.05, 9.95)))]
)
def test_a_saved_range_opens_as_that_range_with_the_same_numbers(ends: tuple[float, float], tmp_path: Path) -> None:
    with ReplayFeed(IMPERFECT, clock_s=Hand()) as feed:
        select(feed, *ends)
        feed.follow_records(True)
        path = saved(feed, tmp_path)
        with ReplayFeed(path, clock_s=Hand()) as again:
            again.follow_records(True)
            assert again.range_s is not None
            there = {source.key for source in again.sources()}
            assert {source.key for source in feed.sources() if source.state == "live"} <= there
            for key in there:
                one, other = feed.view(key), again.view(key)
                assert one is not None
                assert other is not None
                assert figures(one) == figures(other)
                assert figures(one)


def figures(view: SourceView) -> list[tuple[str, object]]:
    """Return all shown values of a source, except for the list of other sources.

    This list may or may not contain sources that ended before the range.
    """
    return [*leaves(replace(view, graph=tuple(view.graph), listed=None))]


def test_a_report_on_a_saved_range_covers_it_and_all_of_it_can_be_replayed(made: Path, tmp_path: Path) -> None:
    with ReplayFeed(made, clock_s=Hand()) as feed:
        select(feed, 12.2, 20.1)
        path = saved(feed, tmp_path)
    document = json.loads(cbtop("replay", str(path), "--format", "json").stdout)
    assert document["sources"][0]["steps"]["count"] == 16
    begin_s, end_s = document["sources"][0]["range_s"]
    # The shown range begins at the last message before the saved range, and ends at the last message in the saved
    # range.
    assert end_s - begin_s == pytest.approx(8.0)
    assert ", 16 steps" in cbtop("replay", str(path)).stdout
    document = json.loads(cbtop("replay", str(path), "--at", "1000", "--format", "json").stdout)
    assert document["sources"][0]["steps"]["count"] == 40
    with ReplayFeed(path, clock_s=Hand()) as again:
        again.seek(again.duration_s)
        assert again.range_s is None


def test_a_range_that_names_no_moment_of_its_recording_is_a_plain_recording(tmp_path: Path) -> None:
    for at_ns in (-5, 0, 1 << 62):
        path = tmp_path / f"{at_ns}.cbtop"
        reader = RecordingReader(IMPERFECT)
        writer = RecordingWriter(path, reader.origin, 1 << 30)
        writer.append(encode_frame(FrameKind.RANGE, at_ns, ()))
        for frame in reader.frames(0, (FrameKind.LIVE, FrameKind.KEYFRAME)):
            writer.append(frame_bytes(frame.kind, frame.time_ns, frame.payload))
        writer.close()
        with ReplayFeed(path, clock_s=Hand()) as feed:
            assert feed.range_s is None
            feed.seek(10)
            assert feed.view() is not None
