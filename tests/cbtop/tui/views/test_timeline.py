"""Tests of the timeline: the timeline follows the newest step until a key moves it. No record is left out."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
from textual.pilot import Pilot

from cbtop import units
from cbtop.feeds.replay import ReplayFeed
from cbtop.text import ascii_signs
from cbtop.tui.app import CbtopApp
from cbtop.tui.replay_app import ReplayApp
from cbtop.tui.views import VIEWS
from cbtop.tui.views.timeline import Timeline
from cbtop.tui.views.timeline_lanes import like_newest, longest, row_blocks
from cbtop.tui.views.timeline_map import HELD, TimelineMap
from cbtop.tui.widgets.lines import plain, width_of
from cbtop.tui.widgets.time_row import Scale
from cbtop.viewmodels.lanes import Lane, TimelineSpan
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.merged import MergedView
from cbtop.viewmodels.on_demand import LazyValue, with_parts
from cbtop.viewmodels.source import SourceView
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text
from tests.cbtop.seen_timelines import RECORDED, at, timeline_at
from tests.representatives import first_by_default

KEY = str(1 + VIEWS.index(Timeline))
SIZES = [(80, 24), (120, 40), (200, 60)]
SIZES_BY_DEFAULT = [(80, 24), *(pytest.param(size, marks=pytest.mark.slow) for size in SIZES[1:])]
AT_S = 20.0
MARKED_S = 8.0


pytestmark = pytest.mark.usefixtures("utc")


async def opened(pilot: Pilot[int], *keys: str) -> str:
    await pilot.press(KEY)
    await pilot.pause()
    for key in keys:
        await pilot.press(key)
    await pilot.pause()
    assert isinstance(pilot.app, CbtopApp)
    return screen_text(pilot.app)


def map_of(app: CbtopApp) -> TimelineMap:
    return app.query_one(TimelineMap)


def lines_of(app: CbtopApp) -> list[str]:
    """Return the lines of the timeline on the screen."""
    return screen_text(app).splitlines()[map_of(app).region.y : map_of(app).region.bottom]


def length_ns(drawn: TimelineMap) -> int:
    """Return the length of the visible time range."""
    begin_ns, end_ns = drawn.in_sight_ns
    return end_ns - begin_ns


@pytest.mark.parametrize("size", SIZES_BY_DEFAULT, ids="{0[0]}x{0[1]}".format)
async def test_a_recording_shows_its_newest_step_with_lanes_gaps_and_sums(
    size: tuple[int, int], golden: Callable[[str, str], None]
) -> None:
    with ReplayFeed(RECORDED) as feed:
        feed.is_playing = False
        feed.seek(AT_S)
        app = ReplayApp(feed, interval_s=60)
        async with app.run_test(size=size) as pilot:
            text = await opened(pilot)
            golden(f"timeline-recorded-{size[0]}x{size[1]}", text)
            assert "follows the newest step" in text
            assert re.search(r"steps  +\d.* = bricks .* \+ between steps ", text)
            held = await opened(pilot, "l", "l", "z", "z", "z")
            golden(f"timeline-zoomed-{size[0]}x{size[1]}", held)


def test_the_longest_blocks_in_sight_are_listed_by_length() -> None:
    timeline = timeline_at(20.0)
    row = next(row for row in row_blocks(timeline.lanes) if row.title == "bricks")
    begin_ns, end_ns = row.parts[0].start_ns, row.parts[40].end_ns
    lines = longest(row, Scale(begin_ns, end_ns, 100), begin_ns, 30, 100)[2:]
    took_us = [float(plain(line).split(" µs")[1].replace(",", "")) for line in lines]
    assert len(took_us) > 5
    assert took_us == sorted(took_us, reverse=True)


async def test_records_are_received_only_while_it_is_shown() -> None:
    feed = ScriptedFeed(samples.LIVE)
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert not feed.follows_records
        assert "no records of steps are here: they are received while this view is open" in await opened(pilot)
        assert feed.follows_records
        await pilot.press("1")
        assert not feed.follows_records


async def test_it_follows_the_newest_step_until_a_key_moves_it_and_again_after_g() -> None:
    feed = ScriptedFeed(at(18.0))
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        first = await opened(pilot)
        feed.seen = [at(19.0)]
        app.tick()
        await pilot.pause()
        second = screen_text(app)
        assert second != first
        assert "follows the newest step" in second
        held = await opened(pilot, "z")
        assert HELD in held
        shown = lines_of(app)[1:-1]
        feed.seen = [at(20.0)]
        app.tick()
        await pilot.pause()
        assert lines_of(app)[1:-1] == shown
        newest = await opened(pilot, "G")
        assert HELD not in newest
        assert map_of(app).shown is timeline_at(20.0)


async def test_following_makes_only_the_newest_steps_lanes_and_a_key_makes_all() -> None:
    made: list[str] = []

    def make(name: str, lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
        made.append(name)
        return lanes

    known = timeline_at(20.0)
    later = {name: LazyValue(partial(make, name, getattr(known, name))) for name in ("lanes", "newest_lanes")}
    app = CbtopApp(ScriptedFeed(with_parts(at(20.0), timeline=with_parts(known, **later))), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        app.tick()
        await pilot.pause()
        assert made == ["newest_lanes"]
        in_sight = lines_of(app)[1:-1]
        await opened(pilot, "l")
        assert made == ["newest_lanes", "lanes"]
        await opened(pilot, "G")
        assert lines_of(app)[1:-1] == in_sight


@pytest.mark.parametrize(
    "keys",
    [
        # z zooms, l selects the next step, L moves in time, and g goes to the end. The tests of all other keys are
        # slow tests.
        ["z"],
        ["l"],
        ["L"],
        ["g"],
        *(pytest.param([key], marks=pytest.mark.slow) for key in "Z0hH"),
    ],
)
async def test_every_key_that_moves_it_holds_it(keys: list[str]) -> None:
    app = CbtopApp(ScriptedFeed(at(20.0)), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        assert HELD in await opened(pilot, *keys)


@first_by_default(
    "keys",
    [
        ["left"],
        ["2", "left", KEY],
        ["v", "left", "v"],
        *(pytest.param([key], marks=pytest.mark.slow) for key in ("right", "home")),
    ],
)
async def test_who_goes_elsewhere_in_time_sees_the_timeline_of_there(keys: list[str]) -> None:
    with ReplayFeed(RECORDED, clock_s=lambda: 0.0) as feed:
        feed.seek(AT_S - 1)
        app = ReplayApp(feed, interval_s=60)
        async with app.run_test(size=(120, 40)) as pilot:
            assert HELD in await opened(pilot, "z")
            app.show()  # the replay continues
            assert HELD in screen_text(app)
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            assert HELD not in screen_text(app)
            assert app.source is not None
            assert map_of(app).shown is app.source.timeline


async def test_another_process_or_phase_is_not_held() -> None:
    feed = ScriptedFeed(at(20.0))
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        assert HELD in await opened(pilot, "z")
        feed.seen = [replace(at(20.0), key="another:1:1")]
        app.selection.key = None
        app.tick()
        await pilot.pause()
        assert HELD not in screen_text(app)


async def test_the_cursor_goes_through_every_block_and_names_it_to_the_nanosecond() -> None:
    app = CbtopApp(ScriptedFeed(at(20.0)), interval_s=60)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot, "l")
        row = map_of(app).row
        assert row is not None
        (first,) = map(int, re.findall(r"(\d+) of \d+ in its row", screen_text(app)))
        zero_ns = timeline_at(20.0).newest.start_ns  # type: ignore[union-attr]
        for number in range(first, first + 6):
            await pilot.press("l")
            await pilot.pause()
            part, text = row.parts[number], screen_text(app)
            assert f"{number + 1} of {len(row.parts)} in its row" in text
            assert f"{part.name}  {units.exact(part.duration_ns)}" in text
            assert f"from {units.exact(part.start_ns - zero_ns)}" in text
            if isinstance(part, TimelineSpan):
                assert " · ".join(part.where) in text
            begin_ns, end_ns = map_of(app).in_sight_ns
            assert begin_ns <= part.start_ns
            assert part.end_ns <= end_ns
        assert f"{first + 5} of {len(row.parts)} in its row" in await opened(pilot, "h")


@pytest.mark.slow
async def test_zoom_keeps_what_is_under_the_cursor_where_it_is_and_ends_somewhere() -> None:
    app = CbtopApp(ScriptedFeed(at(20.0)), interval_s=60)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot, "l", "l")
        drawn, whole_ns = map_of(app), (0, timeline_at(20.0).length_ns)
        for key, compare in (("z", operator.lt), ("Z", operator.gt)):
            lengths_ns = [length_ns(drawn)]
            while len(lengths_ns) < 2 or lengths_ns[-1] != lengths_ns[-2]:
                await pilot.press(key)
                block, (begin_ns, end_ns) = drawn.block, drawn.in_sight_ns
                assert block is not None
                assert block.start_ns < end_ns
                assert block.end_ns > begin_ns
                lengths_ns.append(length_ns(drawn))
            assert all(compare(after, one) for one, after in pairwise(lengths_ns[:-1]))
            assert lengths_ns[-1] > 0
        assert drawn.in_sight_ns == whole_ns
        await pilot.press("enter")
        block = drawn.block
        assert block is not None
        assert drawn.in_sight_ns == (block.start_ns, block.end_ns)
        await pilot.press("0")
        assert drawn.in_sight_ns == whole_ns


@pytest.mark.slow
async def test_rows_are_chosen_at_the_same_time_and_panning_stops_at_the_ends() -> None:
    app = CbtopApp(ScriptedFeed(at(20.0)), interval_s=60)
    async with app.run_test(size=(120, 30)) as pilot:
        assert "▸ layers" in await opened(pilot, "l", "k")
        drawn = map_of(app)
        layer = drawn.block
        assert layer is not None
        await pilot.press("j")
        brick = drawn.block
        assert brick is not None
        assert layer.start_ns <= brick.end_ns
        assert brick.start_ns <= layer.end_ns
        await pilot.press("g", "H")
        assert drawn.in_sight_ns[0] == 0
        await pilot.press(*["L"] * 3)
        assert drawn.in_sight_ns[0] == 3 * (length_ns(drawn) // 2)
        for _ in range(3):
            await pilot.press("0", "L")
        assert drawn.in_sight_ns[1] == timeline_at(20.0).length_ns


def hostile() -> SourceView:
    """Return a timeline whose spans and parents have hostile names."""
    found = timeline_at(20.0)
    names = samples.HOSTILE_NAMES
    lanes = tuple(
        replace(
            lane,
            backends=(names[4],),
            rows=tuple(
                replace(
                    row,
                    spans=tuple(
                        span._replace(name=names[number % len(names)], where=names[:3], backend=names[5])
                        for number, span in enumerate(row.spans)
                    ),
                )
                for row in lane.rows
            ),
        )
        for lane in found.lanes
    )
    return replace(samples.LIVE, timeline=replace(found, lanes=lanes, newest=lanes[0].rows[0].spans[-1]))


EVERY_SIZE = list(product((20, 40, 61, 99, 151, 300), (1, 4, 9, 20, 60)))
# This selection contains each width and each height at least once.
A_FEW_SIZES = [(20, 1), (40, 60), (61, 4), (99, 20), (151, 9), (300, 60)]


@pytest.mark.parametrize("sizes", [A_FEW_SIZES, pytest.param(EVERY_SIZE, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(at(20.0), id="run", marks=pytest.mark.slow),
        pytest.param(at(0.5), id="begin"),
        pytest.param(hostile(), id="hostile"),
        pytest.param(samples.SLOWEST, id="none", marks=pytest.mark.slow),
    ],
)
async def test_it_is_drawn_at_any_size_and_no_line_is_too_long(
    source: SourceView, sizes: list[tuple[int, int]]
) -> None:
    app = CbtopApp(ScriptedFeed(source), interval_s=60)
    async with app.run_test(size=(80, 24)) as pilot:
        text = await opened(pilot)
        drawn = map_of(app)
        for keys in ([], ["l"], ["0"], ["enter"]):
            await pilot.press(*keys)
            for width, height in sizes:
                lines = drawn.draw(width, height)
                assert len(lines) <= height
                assert max(map(width_of, lines), default=0) <= width
                assert "\x1b" not in "".join(map(plain, lines))
    if source is samples.SLOWEST:
        assert "several processes" in text


async def test_a_merge_has_no_timeline_and_says_how_to_get_one() -> None:
    merged = replace(samples.LIVE, merged=MergedView(MergeMode.SUM, ("rank 0", "rank 1"), (), left_out=0))
    app = CbtopApp(ScriptedFeed(merged), interval_s=60)
    async with app.run_test(size=(100, 30)) as pilot:
        assert "n/a: of several processes merged there is no timeline; m shows one" in await opened(pilot)


async def test_in_ascii_blocks_gaps_and_clusters_are_told_apart() -> None:
    app = CbtopApp(ScriptedFeed(at(20.0)), interval_s=60)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot, "l", "z", "z")
        unicode = lines_of(app)
    drawn = [line.encode("ascii", ascii_signs.ERRORS).decode() for line in unicode]
    bricks = next(at for at, line in enumerate(unicode) if line.startswith("▸ bricks"))
    assert len(drawn[bricks]) == len(unicode[bricks])
    assert re.search(r"[#*^][A-Z][a-z]+", drawn[bricks])
    assert not re.search(r"\\[ux]", drawn[bricks])


async def test_its_export_has_what_is_in_sight_with_exact_times() -> None:
    app = CbtopApp(ScriptedFeed(at(20.0)), interval_s=60)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        cells = app.query_one(Timeline).cells()
        newest = timeline_at(20.0).newest
        assert newest is not None
        assert ("steps", "steps", "0.000", units.exact(newest.duration_ns)[:-3], "decode", "") in cells.rows
        assert {row[4] for row in cells.rows} >= {"between steps", "inside layers", "LmHead", "Layer 8"}


@first_by_default("size", [(40, 10), *SIZES_BY_DEFAULT], ids="{0[0]}x{0[1]}".format)
async def test_the_step_and_block_under_the_cursor_have_the_median_of_the_baseline(
    size: tuple[int, int], golden: Callable[[str, str], None]
) -> None:
    with ReplayFeed(RECORDED) as feed:
        feed.is_playing = False
        feed.seek(MARKED_S)
        assert feed.mark_baseline(feed.sources()[0].key)
        feed.seek(AT_S)
        app = ReplayApp(feed, interval_s=60)
        async with app.run_test(size=size) as pilot:
            text = await opened(pilot)
            assert " Δ decode 6.00 ms, was 6.00 ms (+0.1 %)" in text
            golden(f"timeline-with-baseline-{size[0]}x{size[1]}", await opened(pilot, "l", "l", "l"))
            if size[0] >= 120:
                assert "baseline's median" in screen_text(app).split("under the cursor")[1]


async def test_of_what_does_not_compare_the_timeline_says_why() -> None:
    app = CbtopApp(ScriptedFeed(replace(at(AT_S), baseline=samples.UNLIKE.baseline)), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        assert "Δ decode n/a: another batch: 1.00 sequences a step, the baseline has 4.00" in await opened(pilot)


async def test_a_wide_terminal_shows_the_last_steps_of_a_phase_and_marks_slow_ones() -> None:
    shown = timeline_at(AT_S)
    assert shown is not None
    assert shown.newest is not None
    lasted_ns = [
        span.duration_ns for lane in shown.lanes for span in lane.rows[0].spans if span.node == shown.newest.node
    ]
    assert shown.like_newest_ns == tuple(lasted_ns)
    app = CbtopApp(ScriptedFeed(replace(samples.LIVE, timeline=shown)), interval_s=60)
    async with app.run_test(size=(200, 60)) as pilot:
        text = await opened(pilot)
        assert f"the last {len(lasted_ns)} steps of decode" in text
        assert f"longest {units.duration(max(lasted_ns) / 1e3)}" in text
    slow = with_parts(shown, like_newest_ns=(1_000,) * 9 + (1_300, 1_100))
    assert [role for text, role in like_newest(slow, 10, 99)[-2] if "█" in text] == [
        "accent",
        "strong warn",
        "accent",
    ]
    assert like_newest(with_parts(shown, like_newest_ns=(1_000,) * 7), 10, 99) == []
    assert like_newest(slow, 6, 99) == []


@pytest.mark.slow
def test_a_step_is_shown_once_a_second_unless_none_follows_or_a_user_moved() -> None:
    moments = [timeline_at(AT_S + more_s) for more_s in (0.0, 0.4, 0.8, 1.2, 1.6)]
    assert len({id(one) for one in moments}) == len(moments)
    source, now_s = replace(samples.LIVE, timeline=moments[0]), 100.0
    drawn = TimelineMap(clock_s=lambda: now_s)
    drawn.show_source(source)

    def shows(at: int) -> int:
        drawn.show_source(replace(source, timeline=moments[at]))
        return next(number for number, one in enumerate(moments) if one is drawn.shown)

    assert [shows(at) for at in (1, 2, 3, 4)] == [0, 0, 3, 3]
    assert shows(4) == 4  # no newer data has arrived
    assert [shows(at) for at in (2, 3)] == [2, 2]  # backwards and forwards
    drawn.let_go()
    assert shows(3) == 3
    now_s += 0.9
    assert shows(4) == 3
    now_s += 0.1  # The replay is slow: time passes for the user, but the replay stays at the same second.
    assert shows(3) == 3
    assert shows(4) == 3
    now_s += 1
    assert shows(4) == 4


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_click_selects_the_block_there_and_holds_the_timeline(size: tuple[int, int]) -> None:
    source = replace(samples.LIVE, timeline=timeline_at(AT_S))
    app = CbtopApp(ScriptedFeed(source), interval_s=60)
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        lines = screen_text(app).splitlines()
        y = next(at for at, line in enumerate(lines) if re.match(r".  ?layers ", line))
        x = lines[y].index("Layer") + 1
        name = re.match(r"Layer \d+", lines[y][x - 1 :])
        assert await pilot.click(offset=(x, y))
        await pilot.pause()
        block, text = map_of(app).block, screen_text(app)
        assert block is not None
        assert HELD in text
        shown = map_of(app).in_sight_ns
        assert block.start_ns < shown[1]
        assert block.end_ns > shown[0]
        below = text[text.index("under the cursor") :]
        assert name is None or name.group() in below


async def test_a_click_beside_the_rows_of_the_timeline_selects_nothing() -> None:
    source = replace(samples.LIVE, timeline=timeline_at(AT_S))
    app = CbtopApp(ScriptedFeed(source), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        for offset in ((2, 8), (60, 4), (60, 38)):
            await pilot.click(offset=offset)
            await pilot.pause()
            assert map_of(app).block is None
