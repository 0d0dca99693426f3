"""The HTML report is one well-formed file without scripts, and it shows the figures of the text report."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.reports import HTML, REPORTS, VIEWS
from cbtop.reports.html import html_report
from cbtop.reports.html_drawings import MAX_BLOCKS, roofline_drawing, step_drawing
from cbtop.viewmodels.source import SourceView
from tests.cbtop import samples

SAMPLES = {name: value for name, value in vars(samples).items() if isinstance(value, SourceView)}
RECORDINGS = sorted(Path(__file__).parents[1].glob("*.cbtop"))
VOID = {"meta", "br", "circle", "line", "rect"}


class WellFormed(HTMLParser):
    """A parser that fails at a tag that is not closed. It also collects tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(document: str) -> WellFormed:
    parser = WellFormed()
    parser.feed(document)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("name", SAMPLES)
def test_every_source_makes_one_document_without_scripts_and_network(name: str) -> None:
    document = REPORTS[HTML]([SAMPLES[name]], VIEWS)
    found = parsed(document)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in found.seen)
    assert not [attribute for _, attributes in found.seen for attribute in attributes if attribute.startswith("on")]
    assert not [value for _, attributes in found.seen for value in attributes.values() if "://" in (value or "")]
    assert "\x1b" not in document


def test_what_a_process_names_is_text_and_never_markup() -> None:
    hostile = "</title><script>alert(1)</script>\"'&"
    bricks = tuple(replace(row, name=hostile) for row in samples.LIVE.bricks)
    verdicts = tuple(replace(verdict, sentence=hostile) for verdict in samples.COMPARED.verdicts)
    view = replace(samples.LIVE, program=hostile, host=hostile, model=hostile, bricks=bricks, verdicts=verdicts)
    document = html_report([view])
    assert "script" not in {tag for tag, _ in parsed(document).seen}
    assert unescape(document).count(hostile) > len(bricks)


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_has_its_figures_in_the_file(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.html"
    assert main(["export", str(recording), "--format", "html", "-o", str(out)]) == 0
    document = out.read_text(encoding="utf-8")
    parsed(document)
    assert main(["replay", str(recording), "--headless"]) == 0
    text = capsys.readouterr().out
    shown = unescape(re.sub("<[^>]*>", " ", document))
    for line in text.splitlines():
        if "tokens/s" in line and "step p50" in line:
            assert line.strip("* ") in shown
    for tag in ("<h2>Bricks</h2>", "<h2>One step</h2>"):
        assert tag in document


def test_without_data_the_export_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--pid", "1", "--format", "html", "-o", str(tmp_path / "x")]) == 2
    assert "cbtop --headless --format html" in capsys.readouterr().err
    assert main(["export", str(RECORDINGS[0]), "--format", "html", "--source", "1"]) == 3
    assert "no data of --source 1" in capsys.readouterr().err


def test_what_a_damaged_recording_lost_is_said_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = bytearray(RECORDINGS[0].read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 40] = bytes(40)
    damaged, out = tmp_path / "damaged.cbtop", tmp_path / "run.html"
    damaged.write_bytes(whole)
    assert main(["export", str(damaged), "--format", "html", "-o", str(out)]) == 5
    said = capsys.readouterr().err.strip().removeprefix("cbtop: ")
    assert "what they held is missing" in said
    assert said in unescape(out.read_text(encoding="utf-8"))


def test_drawings_are_left_out_where_their_data_is_missing() -> None:
    assert step_drawing(None) == ""
    assert roofline_drawing(replace(samples.LIVE.roofline, ceilings=())) == ""


def test_a_label_that_had_to_move_has_a_line_to_its_point() -> None:
    roofs = samples.LIVE.roofline
    (point, *_) = [one for one in roofs.points if one.intensity and one.gflops]
    assert 'class="leader"' not in roofline_drawing(replace(roofs, points=(point,)))
    same_place = (replace(point, name="First"), replace(point, name="Second"), replace(point, name="Third"))
    assert roofline_drawing(replace(roofs, points=same_place)).count('class="leader"') == 2


def test_a_long_step_is_drawn_with_its_longest_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", str(RECORDINGS[0]), "--headless", "--format", "html"]
    assert main(command) == 0
    whole = capsys.readouterr().out.count("<rect")
    monkeypatch.setattr("cbtop.reports.html_drawings.MAX_BLOCKS", 5)
    assert main(command) == 0
    document = capsys.readouterr().out
    assert 5 <= document.count("<rect") < whole <= MAX_BLOCKS
    assert "blocks too short to see are left out" in document
