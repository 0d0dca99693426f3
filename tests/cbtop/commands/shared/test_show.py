"""Tests of the options that select what is shown, on the screen and in text."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.commands.shared.names import unknown
from tests.representatives import first_by_default

RECORDING = str(Path(__file__).parents[2] / "imperfect.cbtop")
PRINTED = ["replay", RECORDING, "--headless"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--view", "brick"],
            "unknown view 'brick'; did you mean bricks? there are overview, training, requests,",
        ),
        (["--sort", "p9"], "unknown column 'p9'; did you mean incl p95? there are brick, wall %,"),
        (["--sort", ""], "unknown column ''; there are brick,"),
        (["--theme", "drak"], "unknown theme 'drak'; did you mean dark? there are dark, light"),
        (["--silence", "odd"], "unknown verdict 'odd'; did you mean odd-layer? there are stuck,"),
        (["--theme", "qqq"], "unknown theme 'qqq'; there are dark, light"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest_and_all_that_there_are(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*PRINTED, *arguments])
    assert complaint in capsys.readouterr().err


def test_the_nearest_of_nothing_is_nothing() -> None:
    assert unknown("preset", "x", []) == "unknown preset 'x'; there are none"


def test_a_report_is_sorted_and_filtered_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PRINTED, "--view", "bricks", "--sort", "p95", "--filter", "attention"]) == 0
    said = capsys.readouterr().out
    assert "bricks shown: 3 of 9, with 'attention' in name or category" in said
    table = said[said.index("brick            incl p50") :].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table[1:]] == ["AttentionScore", "QkvProjection", "AttentionOutput"]


@first_by_default(("tab", "holds"), [("Graph", "Execution Graph"), ("Overview", "the rest: --view all")])
def test_a_view_may_be_called_as_its_tab_on_the_screen_is(
    tab: str, holds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PRINTED, "--view", tab]) == 0
    assert holds in capsys.readouterr().out
