"""Tests of models without tokens: steps/s and samples/s are shown instead of tokens/s."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.client.store import Store
from cbtop.protocol.vocabulary import BrickId
from cbtop.reports import OVERVIEW, REPORTS
from cbtop.reports.sources import row_fields
from cbtop.reports.summary import summary
from cbtop.tui.views.header import _figures, _tiles
from cbtop.tui.views.overview import OverviewDrawing
from cbtop.tui.widgets.lines import plain
from cbtop.viewmodels.merge import merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.sources import source_row
from cbtop.viewmodels.steps import StepsView
from tests.cbtop.recorded import Clock, apply, profiler_in, record_of, seen_at, source_of

STEPS, STEP_US, BATCH = 20, 2_000, 8
STEPS_PER_SEC = 1e6 / STEP_US


def forward_run(directory: Path, sequences: Callable[[int], int | None] = lambda _: BATCH) -> SourceView:
    """Return the view of a model without tokens that processes `sequences` images in each step."""
    return source_view(record_of(source_of(_recorded(directory, sequences))))


def _recorded(directory: Path, sequences: Callable[[int], int | None]) -> Path:
    clock = Clock()
    profiler = profiler_in(directory, clock)
    for number in range(STEPS):
        with profiler.step("forward", None) as step:
            step.sequences = sequences(number)
            with profiler.brick(BrickId.RMS_NORM, 64):
                clock.sleep_us(STEP_US)
    return directory


def shown_steps(view: SourceView) -> StepsView:
    assert view.steps is not None
    return view.steps


def test_steps_and_samples_are_counted_where_tokens_are_not_known(runtime: Path) -> None:
    steps = shown_steps(forward_run(runtime))
    assert steps.steps_per_sec == pytest.approx(STEPS_PER_SEC)
    assert steps.samples_per_sec == pytest.approx(BATCH * STEPS_PER_SEC)
    assert steps.tokens_per_sec is None
    assert steps.known_tokens is None


def test_samples_are_not_known_unless_every_step_says_them(runtime: Path) -> None:
    steps = shown_steps(forward_run(runtime, lambda number: BATCH if number % 2 else None))
    assert steps.steps_per_sec == pytest.approx(STEPS_PER_SEC)
    assert steps.samples_per_sec is None


def test_a_window_without_a_step_has_no_rate_of_tokens_either(runtime: Path) -> None:
    source, store = source_of(_recorded(runtime, lambda _: BATCH)), Store(1.0)
    for at_s in (1, 2, 3, 4):
        apply(store, seen_at(source, at_s * 1_000_000_000))
    steps = shown_steps(source_view(store.sources[source.key], window=True))
    assert (steps.count, steps.steps_per_sec, steps.tokens_per_sec) == (0, 0.0, None)


def test_text_json_and_summary_have_the_rates_of_steps_and_samples(runtime: Path) -> None:
    view = forward_run(runtime)
    for section in ("bricks", OVERVIEW):
        text = REPORTS["text"]([view], [section])
        assert "forward: 20 steps, 500.0 steps/s, 4,000 samples/s, step p50" in text
        assert "tok/s" not in text
        assert "steps/s without pauses: steps ran" in text
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    assert source["steps"]["tokens_per_sec"] is None
    assert source["steps"]["steps_per_sec"] == pytest.approx(STEPS_PER_SEC)
    assert source["steps"]["samples_per_sec"] == pytest.approx(BATCH * STEPS_PER_SEC)
    assert summary(view, "cbtop")[0].startswith("forward: 500.0 steps/s, 4,000 samples/s, step p50 ")


def test_a_row_of_the_list_has_samples_and_the_rate_that_is_known(runtime: Path) -> None:
    row = source_row(record_of(source_of(_recorded(runtime, lambda _: BATCH))))
    fields = row_fields(row)
    assert (fields["steps_per_sec"], fields["tokens_per_sec"]) == (pytest.approx(STEPS_PER_SEC), None)
    assert fields["samples_per_sec"] == pytest.approx(BATCH * STEPS_PER_SEC)
    assert row.rate.unit == "steps/s"


def test_a_sum_of_processes_adds_their_steps_and_samples(runtime: Path) -> None:
    record = record_of(source_of(_recorded(runtime, lambda _: BATCH)))
    other = replace(record, key="other")
    steps = shown_steps(merged_view([record, other], MergeMode.SUM))
    assert steps.steps_per_sec == pytest.approx(2 * STEPS_PER_SEC)
    assert steps.samples_per_sec == pytest.approx(2 * BATCH * STEPS_PER_SEC)
    assert steps.tokens_per_sec is None


def _with_history(view: SourceView) -> SourceView:
    return replace(view, steps_per_sec_history=(480.0, 500.0, 520.0))


@pytest.mark.parametrize(("width", "height", "words"), [(120, 34, "ms/step p50"), (60, 1, "ms/step")])
def test_the_head_of_the_screen_has_steps_a_second(width: int, height: int, words: str, runtime: Path) -> None:
    view = _with_history(forward_run(runtime))
    lines = _tiles(view, width) if height > 1 else [_figures(view, width)]
    text = "\n".join(map(plain, lines))
    assert "500.0" in text
    assert "steps/s" in text
    assert words in text
    assert ("samples/s" in text) == (height > 1)
    assert "tok" not in text.replace("tokens", "")


def test_the_overview_has_a_line_of_steps_and_samples_for_each_phase(runtime: Path) -> None:
    drawing = OverviewDrawing()
    drawing.show_source(_with_history(forward_run(runtime)))
    text = "\n".join(map(plain, drawing.draw(120, 34)))
    head = next(line for line in text.splitlines() if "samples/s" in line)
    row = next(line for line in text.splitlines() if line.lstrip().startswith("forward"))
    assert head.split()[:3] == ["phase", "steps/s", "samples/s"]
    assert row.split()[:3] == ["forward", "500.0", "4,000"]
    assert "steps/s, forward" in text
