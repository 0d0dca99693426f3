"""`cbtop.diff` gives the figures of `cbtop diff`, as text, as fields and as HTML."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

import cbtop
from cbtop.cli import main
from cbtop.errors import NoDataError, UsageError
from cbtop.profiler.analysis.markup import GRAY
from cbtop.reports.html_drawings import LONGER, SHORTER, change_drawing
from tests.cbtop.made_runs_on_disk import Recordings
from tests.cbtop.reports.test_html import parsed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    odd = {
        "base": {},
        "slower": {"seed": 2, "slower": 1.1},
        "other model": {"model": "<b>another"},
        "short": {"steps": 1},
    }
    return Recordings(tmp_path_factory.mktemp("runs"), odd)


def test_the_changes_are_those_of_the_command(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    changes = cbtop.diff(runs["base"], str(runs["slower"]))
    assert main(["diff", str(runs["base"]), str(runs["slower"])]) == 0
    assert str(changes) + "\n" == capsys.readouterr().out
    assert main(["diff", str(runs["base"]), str(runs["slower"]), "--format", "json"]) == 0
    assert json.loads(json.dumps(changes.fields())) == json.loads(capsys.readouterr().out)
    assert "DownProjection in Layer 2" in changes.slower
    assert changes.why_not == ""
    printer = Mock()
    changes._repr_pretty_(printer, cycle=False)
    printer.text.assert_called_once_with(str(changes))


def test_a_notebook_shows_tables_bars_and_the_verdict(runs: dict[str, Path]) -> None:
    document = cbtop.diff(runs["base"], runs["slower"])._repr_html_()
    parsed(document)
    assert "DownProjection in Layer 2 is 1." in document
    assert document.count("<table>") == 3
    assert document.count("<svg") == 1
    assert "<script" not in document


def test_runs_that_are_not_comparable_say_why_in_html(runs: dict[str, Path]) -> None:
    changes = cbtop.diff(runs["base"], runs["other model"])
    parsed(document := changes._repr_html_())
    assert changes.why_not
    assert "not comparable: " in document
    assert "<b>another" not in document
    assert changes.slower == []


def test_a_file_without_a_run_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(NoDataError, match="has recorded two steps"):
        cbtop.diff(runs["base"], runs["short"])
    (tmp_path / "text.cbtop").write_text("no recording")
    with pytest.raises(UsageError, match="recording"):
        cbtop.diff(tmp_path / "text.cbtop", runs["base"])


def test_longer_times_go_to_the_right_and_shorter_ones_to_the_left() -> None:
    changes = [("Attention", 4.0, True), ("RmsNorm", -2.0, True), ("LmHead", 1.0, False)]
    drawing = change_drawing(changes, "µs/token")
    assert f'<rect x="500.0" y="0" width="480.0" height="17" fill="{LONGER}"/>' in drawing
    assert f'<rect x="260.0" y="18" width="240.0" height="17" fill="{SHORTER}"/>' in drawing
    assert f'<rect x="500.0" y="36" width="120.0" height="17" fill="{GRAY}"/>' in drawing
    assert change_drawing([("Attention", 0.0, False)], "µs/token") == ""
