"""Tests of each view at three sizes, and of the states of a process, against stored text of the screen (goldens)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cbtop.protocol.attributes import TransferAttributes
from cbtop.protocol.messages import Sampling
from cbtop.protocol.vocabulary import NodeKind, Provenance, TransferDirection
from cbtop.tui.app import CbtopApp
from cbtop.tui.views import VIEWS, devices
from cbtop.tui.views.bricks import Bricks
from cbtop.tui.views.training import training_columns
from cbtop.viewmodels.roofline import CeilingRow, RooflineView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.stall import StallKind, StallView
from cbtop.viewmodels.time_breakdown import BesideView
from cbtop.viewmodels.time_range import NamedTime
from tests.cbtop import made_machines, samples
from tests.cbtop.conftest import ScriptedFeed, screen_text
from tests.cbtop.made_machines import PID, START
from tests.representatives import first_by_default

SIZES = [(120, 40), *(pytest.param(size, marks=pytest.mark.slow) for size in ((100, 30), (80, 24))), (60, 15)]
DEVICES = str(VIEWS.index(devices.Devices) + 1)
NUMBERS = [str(number) for number in range(1, len(VIEWS) + 1)]
MACHINES = ("H100", "EIGHT", "MIG", "NO_GPU", "HANGS")
Golden = Callable[[str, str], None]


async def shown(source: SourceView | None, size: tuple[int, int], *keys: str) -> str:
    (text,) = await shown_in_turn(source, size, keys)
    return text


async def shown_in_turn(source: SourceView | None, size: tuple[int, int], *turns: Sequence[str]) -> list[str]:
    """Return the text of the screen after each of `turns`, which are lists of keys to press.

    All turns share one app, because opening an app takes most of a test's time.
    """
    app = CbtopApp(ScriptedFeed(*([source] if source else [])), section="bricks", interval_s=60)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        texts = []
        for keys in turns:
            await pilot.press(*keys)
            await pilot.pause()
            texts.append(screen_text(app))
        return texts


async def shown_at(source: SourceView | None, sizes: Sequence[tuple[int, int]], *keys: str) -> list[str]:
    """Return the text of one screen at each size, after pressing the keys."""
    app = CbtopApp(ScriptedFeed(*([source] if source else [])), section="bricks", interval_s=60)
    async with app.run_test(size=sizes[0]) as pilot:
        await pilot.pause()
        await pilot.press(*keys)
        texts = []
        for size in sizes:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            texts.append(screen_text(app))
        return texts


async def shown_one_by_one(sources: Sequence[SourceView], size: tuple[int, int], *keys: str) -> list[str]:
    """Return the text of the screen for each view in `sources`.

    One app shows all of these views, as if the process changed from one view to the next.
    """
    feed = ScriptedFeed(sources[0])
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=size) as pilot:
        await pilot.press(*keys)
        texts = []
        for source in sources:
            feed.seen = [source]
            app.tick()
            await pilot.pause()
            texts.append(screen_text(app))
        return texts


def on(machine: str) -> SourceView:
    """Return the process of samples.py on a machine of made_machines.py."""
    return replace(samples.LIVE, key=f"gpubox:{PID}:{START}:0", machines=(getattr(made_machines, machine),))


@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
async def test_every_view_looks_like_its_golden(size: tuple[int, int], golden: Golden) -> None:
    texts = await shown_in_turn(samples.LIVE, size, *NUMBERS)
    for view, text in zip(VIEWS, texts, strict=True):
        golden(f"{view.title.lower()}-{size[0]}x{size[1]}", text)


@pytest.mark.parametrize(
    ("name", "source", "keys"),
    [
        ("waiting", None, ()),
        pytest.param("compiling", samples.COMPILING, (), marks=pytest.mark.slow),
        pytest.param("gone-with-losses", samples.GONE, (), marks=pytest.mark.slow),
        pytest.param("budgets-and-checks", samples.CHECKED, (), marks=pytest.mark.slow),
        pytest.param("brick-detail", samples.CHECKED, ("j", "enter"), marks=pytest.mark.slow),
        pytest.param("roofline-without-ceilings", samples.NO_ROOF, ("5",), marks=pytest.mark.slow),
        ("ranks-side-by-side", samples.SIDE_BY_SIDE, ()),
        pytest.param("slowest-of-ranks", samples.SLOWEST, (), marks=pytest.mark.slow),
        ("straggler", samples.STRAGGLING, ()),
        pytest.param("stale", samples.STALE, (), marks=pytest.mark.slow),
        pytest.param("stalled", samples.STALLED, (), marks=pytest.mark.slow),
        pytest.param("stalled-in-a-sum", samples.STALLED_IN_A_SUM, (), marks=pytest.mark.slow),
        pytest.param("suspended", samples.SUSPENDED, (), marks=pytest.mark.slow),
        pytest.param("idle", samples.IDLE, (), marks=pytest.mark.slow),
        pytest.param("quiet", samples.QUIET, (), marks=pytest.mark.slow),
        pytest.param("critical-path", samples.OVERLAPPED, ("6",), marks=pytest.mark.slow),
        ("overview-with-baseline", samples.COMPARED, ("1",)),
        pytest.param("bricks-with-baseline", samples.COMPARED, ("2",), marks=pytest.mark.slow),
        pytest.param("layers-with-baseline", samples.COMPARED, ("3",), marks=pytest.mark.slow),
        ("roofline-with-baseline", samples.COMPARED, ("5", "j")),
        pytest.param("graph-with-baseline", samples.COMPARED, ("6",), marks=pytest.mark.slow),
        pytest.param("sources-with-baseline", samples.COMPARED, ("7",), marks=pytest.mark.slow),
        pytest.param("overview-not-comparable", samples.UNLIKE, ("1",), marks=pytest.mark.slow),
        pytest.param("layers-not-comparable", samples.UNLIKE, ("3",), marks=pytest.mark.slow),
        ("help", samples.LIVE, ("question_mark",)),
        pytest.param("devices-h100", on("H100"), (DEVICES,), marks=pytest.mark.slow),
        *(
            pytest.param(
                f"devices-{name.lower()}", on(name), (DEVICES,), marks=() if name == "EIGHT" else pytest.mark.slow
            )
            for name in MACHINES[1:]
        ),
    ],
)
async def test_a_state_looks_like_its_golden(
    name: str, source: SourceView | None, keys: tuple[str, ...], golden: Golden
) -> None:
    sizes = [(120, 34), (60, 15)]
    for size, text in zip(sizes, await shown_at(source, sizes, *keys), strict=True):
        golden(f"{name}-{size[0]}x{size[1]}", text)


async def test_without_the_engine_the_start_screen_says_how_to_install_it(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    sizes = [(120, 34), (60, 15)]
    for size, text in zip(sizes, await shown_at(None, sizes), strict=True):
        assert "pip install 'cbtop[compute]'" in text
        golden(f"waiting-without-engine-{size[0]}x{size[1]}", text)


async def test_forty_columns_and_ten_lines_show_how_busy_each_device_is(golden: Golden) -> None:
    texts = await shown_one_by_one([on(machine) for machine in MACHINES], (40, 10), DEVICES)
    for machine, text in zip(MACHINES, texts, strict=True):
        golden(f"devices-{machine.lower()}-40x10", text)


async def test_two_hundred_columns_show_every_figure_of_a_device() -> None:
    text = await shown(on("EIGHT"), (240, 50), DEVICES)
    for column in (*devices.COLUMNS, *devices.PROCESSES):
        assert column.title in text
    assert "89.0/" not in text


@pytest.mark.slow
async def test_the_header_has_gpu_use_of_the_process_and_nothing_that_is_old() -> None:
    assert "GPU 0 busy" in (text := await shown(on("H100"), (200, 40)))
    assert "37.0 % 315 W" in text
    for machine in ("MIG", "NO_GPU", "HANGS"):
        assert "busy" not in await shown(on(machine), (200, 40))


BOOKS = samples.LIVE.books
assert BOOKS is not None
OUTSIDE = BesideView(10, 5_000, (NamedTime("detokenize", 5_000),))


@pytest.mark.slow
@first_by_default("size", SIZES, ids="{0[0]}x{0[1]}".format)
async def test_every_view_says_that_the_books_do_not_close_and_that_it_is_a_sample(size: tuple[int, int]) -> None:
    books = replace(BOOKS, close=False, over=3, over_us=400.0)
    source = replace(samples.LIVE, books=books, sample_every=10)
    for text in await shown_in_turn(source, size, *NUMBERS):
        assert "parts do not add up: in 3 steps what ran took" in text
        assert "one step in 10" in text


async def test_a_narrow_header_shortens_how_many_steps_are_recorded_not_the_name() -> None:
    source = replace(samples.LIVE, program="slow_layer.py", sample_every=70)
    assert "  one step in 70  slow_layer.py 4242@" in await shown(source, (72, 24), "1")
    assert "  a sample: one step in 70  slow_layer.py 4242@" in await shown(source, (120, 40), "1")


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
async def test_work_outside_of_steps_stands_beside_the_books(size: tuple[int, int]) -> None:
    bricks, overview = await shown_in_turn(replace(samples.LIVE, outside=OUTSIDE), size, "2", "1")
    assert "outside steps: 5.00 ms in 10 calls" in bricks
    assert "outside steps: 5.00 ms in 10 calls" in overview


async def test_a_wide_screen_shows_every_column_of_the_bricks_beside_their_details() -> None:
    bricks = tuple(replace(row, host_us=41.5, launches=24) for row in samples.CHECKED.bricks)
    checked = replace(samples.CHECKED, baseline=samples.COMPARED.baseline, bricks=bricks)
    text = await shown(checked, (410, 50), "2")
    assert "41.50" in text
    head = next(line for line in text.splitlines() if "wall %" in line)
    of_training = {column.title for column in training_columns((), None)[1:]}
    for title, _ in Bricks.columns_doc:
        assert (title in head) == (title not in of_training)


@pytest.mark.slow
@first_by_default(
    "size", [(200, 50), pytest.param((20, 5), marks=pytest.mark.slow), (3, 2)], ids="{0[0]}x{0[1]}".format
)
async def test_hostile_names_are_shown_as_they_are_and_obeyed_by_nobody(size: tuple[int, int]) -> None:
    for text in await shown_in_turn(samples.HOSTILE, size, *((number, "enter", "j", "j") for number in NUMBERS)):
        assert "\x1b" not in text
        assert "\x07" not in text
        if size[0] >= 200:
            assert "[bold]prog[/]" in text
            assert "[red]" in text


@pytest.mark.slow
async def test_the_ways_to_start_and_a_missing_daemon_fit_in_full_if_nothing_runs() -> None:
    why = "ipc:///tmp/cbtop-1000/daemon.sock: pid 31210 serves it and is stopped: fg or kill -CONT 31210 resumes it"
    for size in ((60, 14), (80, 24), (120, 34)):
        feed = ScriptedFeed()
        feed.line = why
        app = CbtopApp(feed, interval_s=60)
        async with app.run_test(size=size):
            text = " ".join(screen_text(app).split())
        assert "cbtop demo" in text
        assert "cbtop run -- " in text
        assert why in text


async def test_a_program_that_cbtop_has_started_is_named_until_it_reports() -> None:
    feed = ScriptedFeed()
    feed.starting = "the demo's workload (pid 4242)"
    async with CbtopApp(feed, interval_s=60).run_test(size=(80, 24)) as pilot:
        text = " ".join(screen_text(pilot.app).split())
    assert "Started the demo's workload (pid 4242). It has not reported anything yet." in text
    assert "Waiting for" not in text
    assert "cbtop run" not in text


@pytest.mark.slow
async def test_where_too_few_steps_are_recorded_the_bricks_say_so() -> None:
    steps = samples.LIVE.steps
    assert steps is not None
    costly = Sampling(10_000, 3.1, 2.3, 4.7, 1.0)
    none = replace(samples.LIVE, steps=replace(steps, recorded=0), bricks=(), sample_every=10_000, overhead=costly)
    for size in ((80, 24), (120, 30)):
        text = " ".join((await shown(none, size, "2")).split())
        assert "none of the 1,200 decode steps was recorded: one in 10,000 is: recording costs 3.10% of" in text
        assert "; `cbtop run --overhead PERCENT` lets it cost more" in text


@pytest.mark.slow
async def test_a_node_of_the_graph_has_its_time_once() -> None:
    down = next(row for row in samples.LIVE.graph if row.name == "DownProjection")
    copied = TransferAttributes("host", "gpu", 4096, TransferDirection.H2D)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "DownProjection (1024 elem) 140.5 137.7"),
        (
            {"avg_inclusive_us": None, "label": "DownProjection  n/a (1024 elem)"},
            "DownProjection (1024 elem) n/a 137.7",
        ),
        (
            {"kind": NodeKind.TRANSFER, "label": "copy  4096B 140.5µs", "transfer": copied},
            "copy 4096B 0.03 GB/s 140.5 137.7",
        ),
    ]
    for changes, said in cases:
        row = replace(down, **changes)
        graph = tuple(row if one is down else one for one in samples.LIVE.graph)
        assert said in " ".join((await shown(replace(samples.LIVE, graph=graph), (120, 30), "6", "g")).split())


@pytest.mark.slow
async def test_where_the_time_of_a_token_is_unknown_the_head_says_why() -> None:
    assert samples.LIVE.steps is not None
    uneven = replace(samples.LIVE.steps, us_per_token_p50=None, why_no_us_per_token="steps differ in tokens")
    text = await shown(replace(samples.LIVE, steps=uneven), (120, 30), "2")
    assert "ms/step p50" in text
    assert "n/a: steps differ in tokens" in text
    for size in ((120, 30), (60, 15)):
        assert "n/a: no step has ended" in await shown(samples.COMPILING, size, "2")


async def test_no_roof_is_drawn_where_none_was_measured() -> None:
    text = await shown(samples.NO_ROOF, (100, 30), "5")
    assert "bandwidth and compute ceiling n/a" in text
    assert "measured)" not in text
    assert "└" not in text  # the corner of the axes
    assert "DownProjection" in text


async def test_where_roofs_can_be_measured_the_screen_says_how() -> None:
    way_out = "run `cbtop calibrate --threads 2`"
    text = await shown(
        replace(samples.NO_ROOF, roofline=replace(samples.NO_ROOF.roofline, note=way_out)), (80, 24), "5"
    )
    assert text.count(f"bandwidth and compute ceiling n/a: {way_out}") == 1


async def test_roofs_without_a_point_show_their_day_and_what_may_keep_them_low() -> None:
    roofs = tuple(replace(ceiling, measured_on="2026-11-22") for ceiling in samples.CEILINGS)
    low = "another process used the GPU"
    text = await shown(replace(samples.LIVE, roofline=RooflineView(roofs, (), ("RmsNorm",), low)), (120, 30), "5")
    assert f"FMA f32 {roofs[1].value:.1f} GFLOP/s (measured 2026-11-22)" in text
    # The line has no room for the date of this roof (peak rate).
    assert f"DRAM read {roofs[0].value:.2f} GB/s" in text
    assert low in text
    assert "not placed, no FLOP or no bytes declared: RmsNorm" in text


@pytest.mark.slow
async def test_what_has_stopped_never_reads_live_and_an_older_end_or_silence_wins() -> None:
    stopped = (samples.STALLED, samples.STALLED_IN_A_SUM, samples.SUSPENDED, samples.IDLE, samples.QUIET)
    large, silent = await shown_one_by_one(stopped, (80, 24)), [replace(source, stale_s=5.0) for source in stopped]
    for source, *texts in zip(stopped, large, await shown_one_by_one(stopped, (40, 10)), strict=True):
        assert source.stall is not None
        for text in texts:
            assert f"{source.stall.word.upper()} {source.stall.age_s:.0f} s" in text
            assert "LIVE" not in text
    for source, text in zip(silent, await shown_one_by_one(silent, (80, 24)), strict=True):
        assert source.stall is not None
        assert "STALE" in text
        assert "nothing heard for 5 s" in text
        assert f"{source.stall.word.upper()} " not in text
    paused = await shown(samples.STALLED, (80, 24), "space")
    assert "stalled for 32 s in decode → Layer 17 → AllReduce" in paused
    assert "PAUSED" in paused


async def test_a_process_that_hangs_in_its_first_step_says_so_before_views_open() -> None:
    why = "none of these has ended yet"
    stall = StallView(StallKind.QUIET, 32.4, 2.0, ("prefill", "Layer 3", "AllReduce"), threads=1, why=why)
    text = await shown(replace(samples.COMPILING, activity="", stall=stall), (120, 34))
    assert "QUIET 32 s" in text
    assert f"quiet for 32 s in prefill → Layer 3 → AllReduce: {why}" in text


async def test_losses_are_on_the_screen_at_every_size() -> None:
    for size in ((80, 24), (60, 15)):
        assert "! 1,200" in await shown(samples.GONE, size)


FOUR_ROOFS = replace(
    samples.LIVE,
    roofline=replace(
        samples.LIVE.roofline,
        ceilings=(
            *samples.CEILINGS,
            CeilingRow("L3 read", "bandwidth", 85.0, "GB/s", Provenance.MEASURED),
            CeilingRow("L2 read", "bandwidth", 240.0, "GB/s", Provenance.STATIC),
        ),
    ),
)


@pytest.mark.slow
@first_by_default("source", [samples.LIVE, FOUR_ROOFS], ids=["two", "four"])
async def test_the_names_of_roofs_are_whole_or_counted_and_every_point_is_there(source: SourceView) -> None:
    sizes = [(60, 15), (70, 18), (80, 24), (100, 30), (120, 40)]
    for size, text in zip(sizes, await shown_at(source, sizes, "5"), strict=True):
        the_names_of_roofs_are_whole_or_counted(source, size, text.splitlines())


def the_names_of_roofs_are_whole_or_counted(source: SourceView, size: tuple[int, int], lines: list[str]) -> None:
    axis = next(index for index, line in enumerate(lines) if "└" in line)
    tabs = next(index for index, line in enumerate(lines) if "5 Roofline" in line)
    plot = "\n".join(line[7 : 63 if size[0] == 120 else None] for line in lines[tabs + 1 : axis])
    named = 0
    for roof in source.roofline.ceilings:
        word = "" if roof.provenance is Provenance.MEASURED else f" ({roof.provenance.value})"
        whole = f"{roof.name} {roof.value:.{1 if roof.value > 99 else 2}f} {roof.unit}{word}"
        assert (roof.name in plot) == (whole in plot)
        named += whole in plot
        plot = plot.replace(whole, "").replace(" (measured)", "")
    missing = len(source.roofline.ceilings) - named
    assert ("unnamed" in lines[axis + 1]) == bool(missing)
    assert not missing or f"{missing} roof" in lines[axis + 1]
    # Each letter is in the plot, or it is below the plot in the explanation of a mark that stands for several bricks.
    assert set("abcdefghijklm") <= set(plot.replace("GFLOP/s", "")) | set(lines[axis + 2])
