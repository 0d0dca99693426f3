"""The sort order of tables is kept between runs. Errors in its file do no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.commands.shared.sort_memory import remember_orders, remembered_orders, sort_file
from cbtop.text.row_filter import RowChoice
from cbtop.tui.app import CbtopApp
from cbtop.tui.widgets.sorted_table import SortedTable
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed


def test_what_is_kept_is_found_again_and_other_tables_keep_theirs() -> None:
    assert remembered_orders() == {}
    for _ in range(2):
        remember_orders({"bricks": ("incl p95", False)})
        remember_orders({"roofline": ("brick", True)})
    assert remembered_orders() == {"bricks": ("incl p95", False), "roofline": ("brick", True)}
    assert [path.name for path in sort_file().parent.iterdir()] == ["sort.json"]


def test_an_order_comes_back_only_if_it_was_chosen_in_two_runs_in_a_row() -> None:
    usual, other = {"bricks": ("incl p95", False)}, {"bricks": ("brick", True)}
    for chosen, kept in ((usual, {}), (other, {}), (usual, {}), (usual, usual), (other, usual), (usual, usual),
                         (other, usual), (other, other)):  # fmt: skip
        remember_orders(chosen)
        assert remembered_orders() == kept


def test_where_nothing_was_chosen_nothing_is_written() -> None:
    remember_orders({})
    assert not sort_file().exists()


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"bricks": 3}', '{"bricks": ["p95"]}', "[" * 4000, "\xff"])
def test_what_cannot_be_read_is_no_order(text: str) -> None:
    sort_file().parent.mkdir(parents=True)
    sort_file().write_text(text, encoding="latin-1")
    assert remembered_orders() == {}


def test_where_nothing_can_be_written_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    remember_orders({"bricks": ("incl p95", True)})
    assert remembered_orders() == {}


async def test_the_order_chosen_on_screen_comes_back_and_a_requested_one_does_not() -> None:
    app = CbtopApp(ScriptedFeed(samples.LIVE), section="bricks", interval_s=60)
    app.rows = RowChoice("incl p50")
    async with app.run_test(size=(240, 60)) as pilot:
        await pilot.pause()
        assert app.chosen_orders == {}
        await pilot.press("s", "S")
        chosen = app.chosen_orders
        assert chosen == {"bricks": ("incl p99", False)}
    again = CbtopApp(ScriptedFeed(samples.LIVE), section="bricks", interval_s=60)
    again.orders = chosen
    async with again.run_test(size=(240, 60)) as pilot:
        await pilot.pause()
        table = again.query_one("#bricks-table", SortedTable)
        assert (table.sort_by, table.descending) == ("incl p99", False)
