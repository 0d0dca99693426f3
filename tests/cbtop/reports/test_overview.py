"""Tests of the default text report: for any process, it fits on one screen."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.reports import OVERVIEW, REPORTS
from cbtop.reports.overview import MAX_LINES, MAX_OTHERS, MAX_VERDICTS
from cbtop.text.row_filter import RowChoice
from cbtop.viewmodels.source import SourceView, source_view
from tests.cbtop import samples
from tests.cbtop.recorded import decode_run
from tests.representatives import first_by_default

GOLDEN = Path(__file__).parent / "goldens" / "overview.txt"
SAMPLES = {name: value for name, value in vars(samples).items() if isinstance(value, SourceView)}
RECORDINGS = sorted(Path(__file__).parents[1].glob("*.cbtop"))


def report(*views: SourceView, rows: RowChoice | None = None) -> str:
    return REPORTS["text"](views, [OVERVIEW], None, rows)


def test_the_overview_is_as_agreed(runtime: Path) -> None:
    found = source_view(decode_run(runtime))
    text = report(replace(found, key="host:1:2:0", pid=1, host="host", program="infer.py")) + "\n"
    if os.environ.get("CBTOP_UPDATE_GOLDENS"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SAMPLES)
def test_whatever_is_shown_fits_on_one_screen(name: str) -> None:
    view = SAMPLES[name]
    lines = report(view, *SAMPLES.values()).splitlines()
    assert len(lines) <= MAX_LINES
    assert any(line.startswith(view.program.partition("\n")[0][:8]) for line in lines[:3])
    assert lines[-1] == "the rest: --view all"


@first_by_default("recording", RECORDINGS, ids=lambda path: path.stem)
def test_a_replay_prints_one_screen_by_default_and_the_rest_for_all(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording), "--headless"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert main(["replay", str(recording), "--headless", "--view", "all"]) == 0
    assert len(short) <= MAX_LINES < len(capsys.readouterr().out.splitlines())
    assert any(line.startswith("records: ") for line in short)
    assert any(line.startswith("step time: ") for line in short)


def test_of_many_verdicts_the_worst_are_shown_and_others_counted() -> None:
    verdict = samples.COMPARED.verdicts[0]
    view = replace(samples.LIVE, verdicts=(verdict,) * (MAX_VERDICTS + 2))
    text = report(view)
    assert text.count(f"{verdict.severity} {verdict.id}") == MAX_VERDICTS
    assert "\n  2 more verdicts\n" in text


def test_of_many_processes_the_first_is_shown_and_others_have_a_line() -> None:
    others = [replace(samples.LIVE, pid=7000 + at, program=f"rank{at}.py") for at in range(MAX_OTHERS + 2)]
    lines = report(samples.LIVE, *others).splitlines()
    assert sum(line.startswith("rank") for line in lines) == MAX_OTHERS
    assert lines[-2] == "2 more processes: --view sources"


def test_the_filter_and_the_order_choose_the_bricks_of_the_overview() -> None:
    lines = report(samples.LIVE, rows=RowChoice("", "attention")).splitlines()
    assert any(line.startswith("bricks shown: ") for line in lines)
    assert not any(line.startswith("RmsNorm ") for line in lines)
