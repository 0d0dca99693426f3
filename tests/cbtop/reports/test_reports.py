"""Text and JSON are drawn from one view: the text is as agreed, the JSON as promised, and they do not disagree."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbtop.reports import REPORTS, SECTIONS
from cbtop.reports.sources import sources_json, sources_text
from cbtop.viewmodels.model import SourceView, WindowView
from cbtop.viewmodels.source import source_view
from tests.cbtop import samples
from tests.cbtop.recorded import decode_run

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture
def view(runtime: Path) -> SourceView:
    found = source_view(decode_run(runtime))
    return replace(found, key="host:1:2:0", pid=1, host="host", program="infer.py")


def test_the_text_report_is_as_agreed(view: SourceView) -> None:
    golden = GOLDENS / "report.txt"
    text = REPORTS["text"]([view], list(SECTIONS)) + "\n"
    if os.environ.get("CBTOP_UPDATE_GOLDENS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_can_be_had_alone(view: SourceView, section: str) -> None:
    alone, whole = REPORTS["text"]([view], [section]), REPORTS["text"]([view], list(SECTIONS))
    assert len(alone) < len(whole)
    assert SECTIONS[section](view) in alone


def test_the_json_holds_what_was_promised(view: SourceView) -> None:
    found = json.loads(REPORTS["json"]([view], []))
    assert found["schema"] == "cbtop.snapshot/1"
    (source,) = found["sources"]
    assert {"pid", "host", "state", "model", "backend", "steps", "bricks", "categories", "roofline", "graph", "books",
            "loss"} <= source.keys()  # fmt: skip
    assert {"count", "tokens", "tokens_per_sec", "wall_us"} <= source["steps"].keys()
    assert source["steps"]["wall_us"].keys() == {"mean", "p50", "p95", "p99"}
    assert {"name", "category", "count", "total_us", "exclusive_us", "avg_us", "p50_us", "p95_us", "p99_us",
            "elements", "flops", "bytes", "percent"} <= source["bricks"][0].keys()  # fmt: skip
    assert {"name", "avg_us", "percent", "count"} <= source["categories"][0].keys()
    assert {"name", "value", "unit", "provenance"} <= source["roofline"]["ceilings"][0].keys()
    assert {"brick", "intensity", "gflops", "percent_of_roof"} <= source["roofline"]["points"][0].keys()
    assert {"id", "parent", "kind", "name"} <= source["graph"][0].keys()
    books, loss = source["books"], source["loss"]
    assert books["wall_us"] == books["bricks_us"] + books["gaps_us"] + books["unattributed_us"]
    assert loss["produced"] == loss["received"] + loss["dropped"]


def test_what_is_derived_or_static_is_named_and_is_there(view: SourceView) -> None:
    found = json.loads(REPORTS["json"]([view], []))
    text = json.dumps(found["sources"])
    for names in found["provenance"].values():
        assert all(f'"{name}":' in text for name in names)


def test_what_was_not_measured_is_null_never_zero(view: SourceView) -> None:
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    down = next(row for row in source["bricks"] if row["name"] == "DownProjection")
    assert (down["flops"], down["gflops"], down["budget_us_per_token"]) == (None, None, None)
    assert all(row["avg_us"] is None for row in source["graph"] if row["kind"] == "kernel")


def test_the_text_says_the_numbers_of_the_json(view: SourceView) -> None:
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    columns = {"count": "count", "excl µs": "exclusive_us", "%": "percent", "avg µs": "avg_us", "p50 µs": "p50_us",
               "p95 µs": "p95_us", "p99 µs": "p99_us", "µs/token": "us_per_token", "GB/s": "gb_per_sec",
               "GFLOP/s": "gflops", "budget": "budget_us_per_token", "used %": "budget_used_percent"}  # fmt: skip
    table = _table(REPORTS["text"]([view], ["bricks"]))
    assert [row["met"] for row in table.values()] == ["n/a", "yes", "NO"]
    assert [row["budget_met"] for row in source["bricks"]] == [None, True, False]
    assert set(table) == {row["name"] for row in source["bricks"]}
    for row in source["bricks"]:
        for shown, key in columns.items():
            text, value = table[row["name"]][shown], row[key]
            if value is None:
                assert text == "n/a"
            else:
                assert float(text.replace(",", "")) == pytest.approx(value, rel=5e-3, abs=5e-3)


def test_a_report_on_a_window_says_so(view: SourceView) -> None:
    recent = replace(view, window=WindowView(asked_s=10.0, covers_s=3.25))
    head = REPORTS["text"]([recent], ["bricks"]).split("\n\n")[0]
    assert "only the last 3.2 s (10 s were asked for: that is all there is)" in head
    found = json.loads(REPORTS["json"]([recent, view], []))
    assert [(s["window_s"], s["window_covers_s"]) for s in found["sources"]] == [(10.0, 3.25), (None, None)]
    assert "min_us" in found["provenance"]["derived from measured"]
    assert "min_us" not in json.dumps(json.loads(REPORTS["json"]([view], []))["provenance"])


def test_the_tables_of_the_bricks_fit_a_terminal_of_80_columns() -> None:
    lines = REPORTS["text"]([samples.CHECKED], ["bricks"]).splitlines()
    assert all(len(line) <= 80 for line in lines if line.startswith(tuple(row.name for row in samples.BRICKS)))


def _table(text: str) -> dict[str, dict[str, str]]:
    """The brick tables of a text report, by brick and column."""
    found: dict[str, dict[str, Any]] = {}
    for block in (part.splitlines() for part in text.split("\n\n") if part.startswith("brick")):
        notes = ("books", "times", "budgets")
        head, *rows = [re.split(r"\s{2,}", line.strip()) for line in block if not line.startswith(notes)]
        for row in rows:
            found.setdefault(row[0], {}).update(zip(head, row, strict=True))
    return found


def test_the_list_of_sources_says_which_of_them_are_a_sample(view: SourceView) -> None:
    sampled = replace(view, sample_every=10)
    assert "sample" not in sources_text([view])
    assert f"pid {view.pid} of {view.host}: a sample: one step in 10, in every figure" in sources_text(
        [view, sampled]
    )
    assert [one["sample_every"] for one in json.loads(sources_json([view, sampled]))["sources"]] == [1, 10]
