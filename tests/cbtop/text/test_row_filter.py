"""Tests of the filter and the order of bricks. Both are the same in text and on the screen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.reports import REPORTS
from cbtop.text.row_filter import BY_NAME, SORT_COLUMNS, SORT_NAMES, RowChoice, bare, matcher
from cbtop.tui.app import CbtopApp
from cbtop.tui.widgets.sorted_table import SortedTable
from cbtop.viewmodels.merged import RankRow, RanksView
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text
from tests.representatives import first_by_default


def names_in(text: str) -> list[str]:
    """Return the names of the bricks in the first table of a report, from top to bottom."""
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("brick "))
    return [line.split()[0] for line in lines[first + 1 : lines.index("", first)]]


# The default test sorts by name, by a share, by a time, by a count, and by a figure of another table. The slow test
# sorts by all figures.
@first_by_default(
    "column",
    [
        pytest.param(one, marks=() if one in (BY_NAME, "wall %", "µs/tok", "count", "% roof") else pytest.mark.slow)
        for one in SORT_COLUMNS
    ],
    2,
)
async def test_by_every_column_a_text_has_its_bricks_in_the_order_of_the_screen(column: str) -> None:
    choice = RowChoice(column)
    app = CbtopApp(ScriptedFeed(samples.LIVE), section="bricks", interval_s=60)
    app.rows = choice
    async with app.run_test(size=(240, 60)) as pilot:
        await pilot.pause()
        table = app.query_one("#bricks-table", SortedTable)
        is_there = column in [each.title for each in table.columns]
        shown = [row.name for row in table.rows]
    if is_there:
        assert table.sort_by == column
        assert names_in(REPORTS["text"]([samples.LIVE], ["bricks"], None, choice)) == shown


async def test_a_filter_leaves_the_same_bricks_in_text_and_screen_and_both_count() -> None:
    choice = RowChoice(filter="norm|ffn")
    wanted = {row.name for row in samples.LIVE.bricks if row.category.display_name in ("Norm", "FFN")}
    text = REPORTS["text"]([samples.LIVE], ["bricks", "roofline"], None, choice)
    counted = f"{len(wanted)} of {len(samples.LIVE.bricks)}"
    assert set(names_in(text)) == wanted
    assert f"bricks shown: {counted}, with 'norm|ffn' in name or category" in text
    app = CbtopApp(ScriptedFeed(samples.LIVE), section="bricks", interval_s=60)
    app.rows = choice
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        table = app.query_one("#bricks-table", SortedTable)
        assert {row.name for row in table.rows} == wanted
        assert counted in screen_text(app)
        # The table has the focus: j moves its cursor, and escape removes the filter.
        await pilot.press("j", "escape")
        await pilot.pause()
        assert (table.cursor > 0, len(table.rows)) == (True, len(samples.LIVE.bricks))


@pytest.mark.parametrize(
    "text",
    [
        *("(a+)+$", "(a|a)*$", "(a?){99}b", "((a*))*b", "([)]*a)*b", r"(\)a*)+b"),
        *("(?#[)a*a*a*b(?#])", "(?x)a*a*#[\na*#]"),
        *("a*a*a*b", "(a*)" * 3 + "b", "a?" * 9 + "b", "(a|a)" * 9 + "b"),
        *("a{99999999999999}b", "(" * 9999 + ")" * 9999),
    ],
)  # fmt: skip
def test_an_expression_that_might_never_end_is_looked_for_as_it_stands(text: str) -> None:
    assert matcher(text)(f"<{text}>")
    assert not matcher(text)("a" * 256)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("norm|ffn|a+b|c+d|e+f", "eef"),
        ("^layer.*norm.*", "LayerNorm"),
        (".*?x.*?y", "axby"),
        ("^(?!.*norm)", "ffn"),
        ("(?i)(rms)?norm$", "RmsNorm"),
        (r"\(.*\)\[*+(|", "x"),
        ("[(*+|]+$", "a(*"),
        ("[[a]b", "ab"),  # Python warns about this regular expression.
    ],
)
def test_other_expressions_are_searched_as_expressions(text: str, word: str) -> None:
    assert matcher(text)(word) is (word != "x")


@given(st.text("a*+?(){}|[]\\.^$,1:", max_size=40))
def test_every_expression_ends_on_every_name(text: str) -> None:
    matcher(text)("a" * 255 + "!")


def test_what_is_left_out_is_left_out_of_no_sum() -> None:
    whole, filtered = (
        REPORTS["text"]([samples.LIVE], ["bricks"], None, RowChoice(filter=text)) for text in ("", "Sampling")
    )
    for start in ("step time: ", "records: "):
        (line,) = [line for line in whole.splitlines() if line.startswith(start)]
        assert line in filtered


def test_a_filter_without_a_match_says_so_and_not_that_nothing_was_recorded() -> None:
    text = REPORTS["text"]([samples.LIVE], ["bricks", "layers"], None, RowChoice(filter="(zzz"))
    assert f"bricks shown: 0 of {len(samples.LIVE.bricks)}, with '(zzz' in name or category" in text
    assert "no brick of this phase" not in text


def test_of_several_ranks_a_filter_keeps_the_bricks_that_match() -> None:
    rows = tuple(RankRow(name, "Norm", (1.0, 2.0), 1, 100.0) for name in ("RmsNorm", "Sampling"))
    ranks = RanksView("step", (), rows)
    view = replace(samples.LIVE, ranks=ranks)
    assert [row.brick for row in RowChoice(filter="sampl").of(view).ranks.rows] == ["Sampling"]  # type: ignore[union-attr]


@pytest.mark.parametrize("spelled", ["p95", "P95 µs", "p95_us", "p95 us"])
def test_a_column_is_known_by_its_title_its_json_key_and_anything_between(spelled: str) -> None:
    assert SORT_NAMES[bare(spelled)] == "incl p95"


async def test_a_column_that_is_not_there_yet_sorts_once_it_is() -> None:
    budgeted = replace(samples.LIVE, key="other", bricks=tuple(
        replace(row, budget_us_per_token=float(at + 1)) for at, row in enumerate(samples.LIVE.bricks)
    ))  # fmt: skip
    unbudgeted = replace(samples.LIVE, bricks=tuple(
        replace(row, budget_us_per_token=None) for row in samples.LIVE.bricks
    ))  # fmt: skip
    feed = ScriptedFeed(unbudgeted)
    app = CbtopApp(feed, section="bricks", interval_s=60)
    app.rows = RowChoice("budget")
    async with app.run_test(size=(240, 60)) as pilot:
        await pilot.pause()
        table = app.query_one("#bricks-table", SortedTable)
        assert table.sort_by == "wall %"
        feed.seen = [budgeted]
        app.tick()
        app.tick()
        await pilot.pause()
        assert table.sort_by == "budget"
        used = [row.budget_used_percent for row in table.rows]
        assert used == sorted(used, reverse=True)
