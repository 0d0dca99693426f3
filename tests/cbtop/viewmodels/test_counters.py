"""Tests of the counters of bricks in views: means of a call, figures that were not counted, and their text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.protocol.counter_messages import BrickCounters, CountedBrick
from cbtop.protocol.vocabulary import NodeKind
from cbtop.reports import REPORTS
from cbtop.text import counters_text
from cbtop.tui.views.brick_detail import detail_lines
from cbtop.viewmodels.source import SourceView
from tests.cbtop.viewmodels.verdicts.streams import Decoding, run

WHY = "L2 and L3 misses: this processor has no such counters"


def counted(directory: Path, **counts: int) -> SourceView:
    """Return a view of a run whose first brick has counters, and another phase too."""
    made = run(directory, Decoding())
    for record in made.store.sources.values():
        brick = next(node for node in record.nodes if node.kind is NodeKind.BRICK)
        found = replace(CountedBrick(brick.id, 10, 20, 10, 5, 1), **counts)
        record.counters = BrickCounters(1_000_000, 500, (found, replace(found, node=10_000)), WHY)
    return made.one()


def test_counters_are_means_of_a_call_and_others_are_unknown(tmp_path: Path) -> None:
    counters = counted(tmp_path).counters
    assert counters is not None
    (brick,) = counters.bricks
    assert (brick.calls, brick.page_faults, brick.disk_faults) == (10, 2.0, 1.0)
    assert (brick.voluntary_switches, brick.involuntary_switches) == (0.5, 0.1)
    assert {brick.ipc, brick.cycles, brick.l1_misses, brick.l3_misses, brick.dram_bytes} == {None}
    assert counters.cost_percent == pytest.approx(0.05)


def test_events_of_the_processor_have_calls_of_their_own(tmp_path: Path) -> None:
    counts = {"core_calls": 5, "cycles": 100, "instructions": 250, "l1_misses": 50, "cache_calls": 2, "l3_misses": 8}
    counters = counted(tmp_path, **counts).counters
    assert counters is not None
    (brick,) = counters.bricks
    assert (brick.ipc, brick.cycles, brick.l1_misses, brick.l3_misses) == (2.5, 20.0, 10.0, 4.0)
    assert (brick.l2_bytes, brick.l3_bytes, brick.dram_bytes) == (640.0, 0.0, 256.0)
    said = dict(counters_text.facts(brick, 0.5))
    assert (said["IPC"], said["L2 loads GB/s"], said["DRAM loads GB/s"]) == ("2.5", "1.28", "0.512")


def test_the_panel_of_a_brick_has_its_counters_and_the_reason(tmp_path: Path) -> None:
    view = counted(tmp_path)
    assert view.counters is not None
    name = view.counters.bricks[0].brick
    row = next(row for row in view.bricks if row.name == name)
    other = next(row for row in view.bricks if row.name != name)
    text = "\n".join("".join(piece for piece, _ in line) for line in detail_lines(row, view, 100, 60))
    assert "counters in a call" in text
    assert "page faults" in text
    assert f"n/a: {WHY}" in text
    without = "".join(piece for line in detail_lines(other, view, 100, 60) for piece, _ in line)
    assert "counters in a call" not in without


def test_the_json_has_counters_or_null(tmp_path: Path) -> None:
    view = counted(tmp_path)
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    assert source["counters"]["bricks"][0]["page_faults"] == 2.0
    assert source["counters"]["why_not"] == WHY
    (source,) = json.loads(REPORTS["json"]([replace(view, counters=None)], []))["sources"]
    assert source["counters"] is None
