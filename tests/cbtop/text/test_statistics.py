"""Tests of the table of statistics: the table describes every number that is shown, wherever the number is shown."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from cbtop.profiler.analysis.roofline import Distance
from cbtop.protocol.device_messages import Device
from cbtop.reports import REPORTS
from cbtop.reports.machines import machines_text
from cbtop.text.statistics import (
    BRICK_COLUMNS,
    FORMATS,
    STATISTICS,
    Of,
    Statistic,
    container_text,
    statistic,
    statistics_of,
)
from cbtop.tui.views import VIEWS
from cbtop.tui.views.devices import machine_lines
from cbtop.tui.views.help import help_lines
from cbtop.tui.widgets.lines import plain
from cbtop.units import NOT_MEASURED
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.categories import CategoryRow
from cbtop.viewmodels.devices import ProcessRow
from cbtop.viewmodels.graph import GraphRow
from tests.cbtop import samples
from tests.cbtop.made_machines import H100

ROWS = {
    Of.BRICK: samples.BRICKS[0],
    Of.CATEGORY: samples.LIVE.categories[0],
    Of.NODE: samples.LIVE.graph[0],
    Of.GPU: H100.devices[0].device,
    Of.CPU: H100.devices[1].device,
    Of.PROCESS: H100.processes[0],
}
WHO_IT_IS = {"name", "category", "backend", "rank", "roof", "id", "parent", "depth", "kind", "label", "node_label",
             "kernel", "burst", "place", "uuid", "index", "part_of", "trouble", "processes", "unknown", "pid",
             "source", "device", "device_uuid", "transfer", "dtypes", "modules", "module"}  # fmt: skip

SERIES = {"durations", "trend_us", "trail", "by_cached", "by_batch", "history"}


@pytest.mark.parametrize(("row", "of"), [(row, of) for row in STATISTICS for of in row.of])
def test_a_statistic_can_be_read_and_written_bare_and_in_full(row: Statistic, of: Of) -> None:
    value = row.value(ROWS[of])
    for text in (row.bare(ROWS[of]), row.in_full(ROWS[of])):
        assert (text == NOT_MEASURED) == (value is None)
    assert FORMATS[row.unit].bare(None) == FORMATS[row.unit].in_full(None) == NOT_MEASURED


@pytest.mark.parametrize(("of", "kind"), [
    (Of.BRICK, BrickRow), (Of.CATEGORY, CategoryRow), (Of.NODE, GraphRow), (Of.GPU, Device), (Of.PROCESS, ProcessRow),
])  # fmt: skip
def test_every_number_of_a_row_is_in_the_table(of: Of, kind: type[Any]) -> None:
    assert {field.name for field in fields(kind)} - WHO_IT_IS - SERIES <= {row.key for row in statistics_of(of)}


def test_a_key_has_one_origin_whatever_it_is_of() -> None:
    assert all(one.origin is other.origin for one in STATISTICS for other in STATISTICS if one.key == other.key)


def test_the_json_holds_every_statistic_and_says_which_are_not_measured() -> None:
    found = json.loads(REPORTS["json"]([replace(samples.LIVE, machines=(H100,))], [], None))
    (source,), (machine,) = found["sources"], found["machines"]
    shown = {Of.BRICK: source["bricks"], Of.CATEGORY: source["categories"], Of.NODE: source["graph"]}
    shown |= {Of.GPU: machine["devices"], Of.CPU: machine["devices"][1:], Of.PROCESS: machine["processes"]}
    for of, rows in shown.items():
        for row in statistics_of(of):
            assert rows[0][row.key] == row.value(ROWS[of])
            for origin, keys in found["provenance"].items():
                assert (row.key in keys) == (origin == row.origin.value)


def test_the_help_explains_every_column_and_says_what_is_derived() -> None:
    text = " ".join(" ".join(plain(line) for line in help_lines((), VIEWS, 80)).split())
    for place in BRICK_COLUMNS:
        assert place.statistic.help in text
    assert statistic("gb_per_sec").help.endswith("(derived)")
    assert statistic("count").help == "calls recorded"


def test_what_nobody_measured_is_sorted_last() -> None:
    row = replace(samples.BRICKS[0], p99_us=None)
    assert statistic("p99_us").sort_value(row) < statistic("p99_us").sort_value(replace(row, p99_us=0.0))


def test_a_brick_above_its_roof_is_flagged_in_the_text() -> None:
    row = replace(samples.BRICKS[0], roof=Distance(10.0, 104.2, "memory"))
    text = REPORTS["text"]([replace(samples.LIVE, bricks=(row,))], ["bricks"], None)
    assert "!104.2" in text


def test_the_time_of_a_token_beside_an_exclusive_share_is_exclusive() -> None:
    whole = samples.BRICKS[0]
    outer = replace(whole, total_exclusive_us=whole.total_exclusive_us / 4, percent=(whole.percent or 0.0) / 4)
    columns = {place.statistic.title: place for place in BRICK_COLUMNS}
    assert (columns["µs/tok"].bare(outer), columns["incl µs/tok"].bare(outer)) == ("374.2", "1,497")
    assert (columns["wall %"].bare(whole), columns["wall %"].bare(outer)) == ("17.7", "4.4")


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({}, ""),
        ({"throttled_percent": 3.0}, ""),
        ({"memory_limit_bytes": 8e9}, "serve.py 7: its container may use 8.00 GB of memory"),
        ({"cpu_limit_percent": 100.0}, "serve.py 7: its container may use 1 processor"),
        (
            {"cpu_limit_percent": 150.0, "memory_limit_bytes": 8e9, "throttled_percent": 40.0},
            "serve.py 7: its container may use 1.5 processors and 8.00 GB of memory; it had none left in 40.0 % of "
            "the scheduler's periods (throttled)",
        ),
    ],
)
def test_a_container_is_a_line_with_its_limits(limits: dict[str, float], text: str) -> None:
    assert container_text(ProcessRow(7, "serve.py", None, "", "", **limits)) == text


def test_the_line_of_a_container_is_on_the_screen_and_in_the_text() -> None:
    limited = replace(H100.processes[0], cpu_limit_percent=200.0, throttled_percent=12.5)
    machine = replace(H100, processes=(limited, replace(limited, device="1")))
    line = container_text(limited)
    assert machines_text([machine]).count(line) == 1
    screen = " ".join(plain(row).strip() for row in machine_lines(machine, 100))
    assert screen.count(line) == 1
