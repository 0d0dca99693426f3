"""Tests of verdicts that are withheld: each output lists these verdicts with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.reports import OVERVIEW, REPORTS
from cbtop.reports.summary import summary
from cbtop.tui.views.verdicts import most_verdict_lines, verdict_lines
from cbtop.tui.widgets.lines import plain
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdicts import judged
from tests.cbtop.made_training import Training, trained

SLOW = Training(data_us=20_000, optimizer_us=20_000)
SAID = (
    "withheld: 2 verdicts on latency (input-bound, optimizer-bound), because the process waited for a processor "
    "82.0 % of the time"
)


@pytest.fixture
def starved(tmp_path: Path) -> SourceView:
    return judged(with_parts(trained(tmp_path, SLOW).one(), waiting_percent=82.0))


def on_screen(view: SourceView, width: int, height: int) -> list[str]:
    return [plain(line).rstrip() for line in verdict_lines(view, width, height)]


def test_every_output_says_how_many_verdicts_are_withheld_and_why(starved: SourceView) -> None:
    assert [verdict.id for verdict in starved.verdicts] == ["starved"]
    for sections in ([OVERVIEW], ["training"]):
        assert SAID in REPORTS["text"]([starved], sections)
    assert SAID in summary(starved, "cbtop")
    (source,) = json.loads(REPORTS["json"]([starved], []))["sources"]
    assert source["withheld"] == {
        "ids": ["input-bound", "optimizer-bound"],
        "about": "latency",
        "reason": "the process waited for a processor 82.0 % of the time",
    }
    assert SAID in " ".join(" ".join(on_screen(starved, 80, 20)).split())


def test_the_line_of_withheld_verdicts_leaves_room_for_the_others(starved: SourceView) -> None:
    complete = most_verdict_lines(starved, 80)
    assert len(on_screen(starved, 80, complete)) == complete
    for height in range(2, 12):
        lines = on_screen(starved, 80, height)
        assert len(lines) <= height
        assert "waits for a processor" in lines[1]
        assert any("withheld: 2 verdicts" in line for line in lines) == (height >= 5)


def test_a_verdict_that_waits_may_explain_is_withheld_without_starvation(tmp_path: Path) -> None:
    found = judged(with_parts(trained(tmp_path, Training(data_us=12_000)).one(), waiting_percent=15.0)).withheld
    assert found is not None
    assert (found.ids, found.reason) == (("input-bound",), "the process waited for a processor 15.0 % of the time")


def test_without_a_reason_nothing_is_withheld(tmp_path: Path) -> None:
    view = judged(trained(tmp_path, SLOW).one())
    assert {verdict.id for verdict in view.verdicts} == {"input-bound", "optimizer-bound"}
    assert view.withheld is None
    assert "withheld" not in REPORTS["text"]([view], [OVERVIEW])


def test_a_silenced_verdict_is_not_withheld(starved: SourceView) -> None:
    found = judged(starved, silenced=["input-bound"]).withheld
    assert found is not None
    assert found.ids == ("optimizer-bound",)


def test_a_warm_up_withholds_verdicts_on_speed(tmp_path: Path) -> None:
    view = trained(tmp_path, SLOW).one()
    found = judged(replace(view.held(), phase="train (warm-up)")).withheld
    assert found is not None
    assert (found.about, found.reason) == ("speed", "only warm-up steps have ended")
    assert set(found.ids) == {"input-bound", "optimizer-bound"}
