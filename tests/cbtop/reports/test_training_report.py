"""Tests of training steps in text and JSON reports."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.protocol.memory_messages import BrickMemories, BrickMemory, TrainingMemory
from cbtop.protocol.vocabulary import TRAIN
from cbtop.reports import OVERVIEW, REPORTS, VIEWS
from cbtop.reports.overview import MAX_LINES
from cbtop.reports.summary import summary
from cbtop.reports.training import MAX_MEMORY_ROWS
from cbtop.text.row_filter import RowChoice
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView
from tests.cbtop import samples
from tests.cbtop.made_training import Training, of_ranks, trained

NO_MEMORY = TrainingMemory(TRAIN, "", 0, why_unknown="torch counts the memory of GPUs only")
GOLDEN = Path(__file__).parent / "goldens" / "training.txt"


@pytest.fixture
def view(tmp_path: Path) -> SourceView:
    found = trained(tmp_path, Training(recomputes=True, warm_up=3)).one().held()
    return replace(found, key="host:1:2:0", pid=1, host="host", program="train.py")


def test_the_report_of_a_training_process_is_as_agreed(view: SourceView) -> None:
    text = (
        "\n\n=====\n\n".join(REPORTS["text"]([view], [section]) for section in (OVERVIEW, "training", "layers"))
        + "\n"
    )
    if os.environ.get("CBTOP_UPDATE_GOLDENS"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
    assert len(REPORTS["text"]([view], [OVERVIEW]).splitlines()) <= MAX_LINES


def test_a_layer_with_both_passes_has_a_column_for_each(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(steps=30, is_stacked=False)).one()
    head, *rows = REPORTS["text"]([view], ["layers"]).partition("layer  ")[2].splitlines()[:4]
    assert "forward µs  backward µs" in head
    assert all(row.split()[2:5] == ["9,000", "3,000", "6,000"] for row in rows)


def test_the_work_of_cbtop_is_below_the_step_and_in_no_part(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(steps=30, own_us=410)).one()
    rows = [line.split() for line in REPORTS["text"]([view], ["training"]).splitlines()]
    at = next(number for number, row in enumerate(rows) if row[:1] == ["step"])
    assert rows[at][1] == "100.0"
    assert rows[at + 1] == ["cbtop", "itself,", "in", "no", "part", "0.41"]
    (source,) = json.loads(REPORTS["json"]([view], [OVERVIEW]))["sources"]
    assert source["training"]["own_us"] == 410.0


@pytest.mark.parametrize("is_measured", [False, True])
def test_bricks_have_their_memory_and_derived_sizes_are_labelled(tmp_path: Path, is_measured: bool) -> None:
    sizes = (3_000_000, 42_000_000, 48_000_000, -2_000_000) if is_measured else (3_000_000,)
    said = BrickMemories(TRAIN, "", tuple(BrickMemory(node, *sizes) for node in range(3, 20)), is_measured)
    view = trained(tmp_path, Training(steps=30, gradients=(NO_MEMORY, said))).one()
    lines = REPORTS["text"]([view], ["training"]).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("memory of a recorded step"))
    measured = ["allocated", "reserved", "kept"] if is_measured else []
    assert lines[at].split()[5:] == [*measured, "outputs", "(derived)"]
    figures = ["42.0", "MB", "48.0", "MB", "-2.00", "MB", "3.00", "MB"] if is_measured else ["3.00", "MB"]
    assert lines[at + 1].split()[-len(figures) :] == figures
    (source,) = json.loads(REPORTS["json"]([view], [OVERVIEW]))["sources"]
    rows = source["training"]["memory"]["bricks"]
    assert lines[at + 1].startswith(" → ".join(rows[0]["path"]))
    assert lines[at + 1 + MAX_MEMORY_ROWS] == f"… and {len(rows) - MAX_MEMORY_ROWS} bricks more in JSON"
    assert rows[0]["output_bytes"] == 3_000_000
    assert rows[0]["kept_bytes"] == (-2_000_000 if is_measured else None)


def communication_line(view: SourceView) -> str:
    lines = REPORTS["text"]([view], ["training"]).splitlines()
    return next(line for line in lines if line.startswith("communication, exposed"))


def test_communication_has_a_line_with_what_is_exposed_and_what_overlaps(tmp_path: Path) -> None:
    plan = Training(steps=30, exposed_us=5_000, overlapped_us=1_200)
    (tmp_path / "alone").mkdir()
    kinds = "communication, exposed: GradientSync, backward 5.00 ms; overlapped: "
    alone = trained(tmp_path / "alone", plan).one()
    assert communication_line(alone) == f"{kinds}1.20 ms at most; exposed may be a wait for another rank"
    waits, slow = of_ranks(tmp_path, plan, replace(plan, exposed_us=1_000, other_us=4_200))
    assert communication_line(waits) == f"{kinds}1.20 ms at most; waits for slower ranks: 4.00 ms for rank 1"
    assert communication_line(slow).endswith("waits for slower ranks: none")


def test_communication_that_is_not_known_has_the_reason(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(steps=30, exposed_us=5_000, overlapped_us=None)).one()
    assert "overlapped: n/a (nobody knows)" in communication_line(view)
    found = json.loads(REPORTS["json"]([view], [OVERVIEW]))["sources"][0]["training"]["communication"]
    assert found == {
        "exposed": [{"name": "GradientSync, backward", "mean_us": 5_000, "p50_us": 5_000}],
        "overlapped_us": None,
        "why_unknown": "nobody knows",
        "ranks": None,
    }


def test_all_sections_include_training_only_if_steps_train(view: SourceView) -> None:
    assert "backward µs" in REPORTS["text"]([view], [*VIEWS])
    assert "backward µs" not in REPORTS["text"]([samples.LIVE], [*VIEWS])
    assert "training: n/a" in REPORTS["text"]([samples.LIVE], ["training"])


def test_the_filter_selects_bricks_by_any_of_their_passes(view: SourceView) -> None:
    text = REPORTS["text"]([view], ["training"], None, RowChoice(filter="Norm backward"))
    assert "RmsNorm  " in text
    assert "DownProjection" not in text.partition("brick  ")[2]


def test_the_json_has_the_parts_and_the_bricks(view: SourceView) -> None:
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    found = source["training"]
    assert (found["steps"], found["mean_us"]) == (64, pytest.approx(42_000))
    assert sum(part["percent"] for part in found["parts"]) == pytest.approx(100)
    assert found["parts"][3] == pytest.approx(
        {"name": "backward", "percent": 100 * 27_400 / 42_000, "mean_us": 27_400, "p50_us": 27_400}
    )
    (down,) = [brick for brick in found["bricks"] if brick["name"] == "DownProjection"]
    assert (down["forward_us"], down["backward_us"], down["recompute_us"]) == pytest.approx((5_400, 10_800, 5_400))
    (live,) = json.loads(REPORTS["json"]([samples.LIVE], []))["sources"]
    assert live["training"] is None


def test_the_summary_of_a_run_has_the_parts_in_ten_lines(view: SourceView) -> None:
    lines = summary(view, "cbtop post-mortem")
    assert len(lines) <= 10
    assert "training step 42.00 ms: data wait 1.4 %, forward 21.4 %" in lines[1]


def test_a_merge_says_why_it_has_no_parts(tmp_path: Path) -> None:
    merged = trained(tmp_path, Training(steps=30)).merged(MergeMode.SUM)
    assert merged is not None
    assert "training step: parts n/a (of several processes)" in REPORTS["text"]([merged], [OVERVIEW])
    assert "training step: parts n/a (of several processes)" in REPORTS["text"]([merged], ["training"])


def test_a_process_that_reports_no_parts_has_a_table_of_bricks(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(steps=30, reports=False)).one()
    text = REPORTS["text"]([view], ["training"])
    assert "parts n/a (the process has not reported them)" in text
    assert "backward µs" in text


def test_training_has_no_time_of_a_token(tmp_path: Path) -> None:
    found = trained(tmp_path, Training(tokens=4_096)).one()
    text = REPORTS["text"]([found], [OVERVIEW])
    assert "tokens/s" in text
    assert "step p50" in text
    assert "ms/token" not in text
