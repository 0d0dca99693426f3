"""Tests of text and JSON reports: they contain the same values and match stored files (goldens)."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop import units
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.held_steps import launch_bound
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.attributes import Work
from cbtop.protocol.messages import Sampling
from cbtop.protocol.vocabulary import BrickCategory, BrickId
from cbtop.reports import DEVICES, REPORTS, SOURCES, TIMELINE, VIEWS
from cbtop.reports.sources import sources_json, sources_text
from cbtop.reports.text import SECTIONS
from cbtop.text.statistics import Of, statistics_of
from cbtop.text.timeline_text import lane_sum
from cbtop.units import exact
from cbtop.viewmodels.merge import merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.selection import WindowView
from cbtop.viewmodels.source import SourceView, source_view
from tests.cbtop import made_machines, samples, seen_timelines
from tests.cbtop.recorded import Clock, decode_run, profiler_in, record_of, source_of

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


@pytest.mark.parametrize("source", [samples.CHECKED, samples.STALLED, samples.COMPARED])
def test_each_number_of_four_digits_or_more_in_text_has_separators(source: SourceView) -> None:
    lost = replace(source.loss, produced=2_901_234, received=2_900_000, dropped=1_234, rejected=5_678, left_out=9_876)
    bricks = tuple(replace(row, count=12_345_678, uncounted=43_210) for row in source.bricks)
    text = REPORTS["text"]([replace(source, loss=lost, bricks=bricks)], [*SECTIONS])
    bare = re.sub(r"pid \d+|\d{4}-\d\d-\d\d|\(\d+ elem\)|[├└│].*|^ *\d+  \S+ ", "", text, flags=re.MULTILINE)
    assert re.findall(r"(?<![\w.,])\d{4,}", bare) == []
    assert "12,345,678" in text
    assert "records: 2,901,234 produced = 2,900,000 received + 1,234 dropped (5,678 rejected)" in text


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
    assert source["steps"]["wall_us"].keys() == {"mean", "recorded_mean", "p50", "p95", "p99", "min", "max"}
    assert {"name", "category", "count", "total_inclusive_us", "total_exclusive_us", "avg_inclusive_us",
            "avg_exclusive_us", "p50_us", "p95_us", "p99_us",
            "elements", "flops", "bytes", "percent"} <= source["bricks"][0].keys()  # fmt: skip
    assert {"name", "total_exclusive_us", "avg_exclusive_us", "percent", "count"} <= source["categories"][0].keys()
    assert {"name", "value", "unit", "provenance"} <= source["roofline"]["ceilings"][0].keys()
    assert {"brick", "intensity", "gflops", "percent_of_roof"} <= source["roofline"]["points"][0].keys()
    assert {"id", "parent", "kind", "name"} <= source["graph"][0].keys()
    books, loss = source["books"], source["loss"]
    assert books["wall_us"] == books["bricks_us"] + books["gaps_us"] + books["unattributed_us"]
    assert loss["produced"] == loss["received"] + loss["dropped"]


def test_what_is_derived_or_static_is_named_and_is_there(view: SourceView) -> None:
    sampling = Sampling(20, 0.62, 0.41, 0.8, 1.0)
    governed = replace(view, overhead=sampling, machines=(made_machines.H100,), listed=samples.SEVERAL)
    found = json.loads(REPORTS["json"]([governed], []))
    text = json.dumps([found["sources"], found["machines"], found["listed"]])
    for names in found["provenance"].values():
        assert all(f'"{name}":' in text for name in names)


MACHINES = ("H100", "FIRST", "EIGHT", "MIG", "NO_GPU", "HANGS")


def test_the_text_of_machines_is_as_agreed(view: SourceView) -> None:
    golden = GOLDENS / "machines.txt"
    texts = []
    for name in MACHINES:
        shown = replace(view, machines=(getattr(made_machines, name),))
        text = REPORTS["text"]([shown, shown], [DEVICES])
        # Both processes run on the same machine, so the devices of this machine are shown once.
        assert text.count("devices of gpubox") == 1
        texts.append(text.partition("devices of gpubox\n")[2])
    text = "\n\n".join(f"== {name}\n{text}" for name, text in zip(MACHINES, texts, strict=True)) + "\n"
    if os.environ.get("CBTOP_UPDATE_GOLDENS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_where_no_device_was_sampled_that_is_said_if_it_was_asked(view: SourceView) -> None:
    assert "devices: n/a (no sample of them has come yet)" in REPORTS["text"]([view], [DEVICES])
    assert "devices" not in REPORTS["text"]([view], list(VIEWS))
    assert json.loads(REPORTS["json"]([view], []))["machines"] == []


def test_the_json_of_a_device_has_every_figure_and_why_it_is_null() -> None:
    shown = replace(samples.LIVE, machines=(made_machines.EIGHT,))
    (machine,) = json.loads(REPORTS["json"]([shown, shown], []))["machines"]
    for device in machine["devices"]:
        of = Of.CPU if device["kind"] == "cpu" else Of.GPU
        for key in (row.key for row in statistics_of(of)):
            assert (device[key] is not None) or key in device["unknown"] or device["trouble"]
    assert machine["devices"][6]["trouble"] == "it does not answer: GPU is lost"
    assert machine["devices"][5]["slowed_by"] == "power cap, heat (hardware)"


def test_the_text_says_the_figures_of_the_json_of_a_machine() -> None:
    shown = replace(samples.LIVE, machines=(made_machines.H100,))
    text = REPORTS["text"]([shown], [DEVICES])
    (machine,) = json.loads(REPORTS["json"]([shown], []))["machines"]
    gpu, process = machine["devices"][0], machine["processes"][0]
    row = next(line.split() for line in text.splitlines() if line.startswith("0 "))
    assert float(row[1]) == gpu["utilization_percent"]
    assert row[5] == f"{gpu['power_watts']:.0f}/{gpu['power_limit_watts']:.0f}"
    found = next(line.split() for line in text.splitlines() if line.startswith(str(process["pid"])))
    assert float(found[6]) == process["gpu_utilization_percent"]  # In this text, "782 MB" counts as two words.
    assert float(found[7]) == pytest.approx(process["cpu_percent"], abs=0.05)


def test_what_was_not_measured_is_null_never_zero(view: SourceView) -> None:
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    down = next(row for row in source["bricks"] if row["name"] == "DownProjection")
    assert (down["flops"], down["gflops"], down["budget_us_per_token"]) == (None, None, None)
    assert all(row["avg_inclusive_us"] is None for row in source["graph"] if row["kind"] == "kernel")


def test_the_text_says_the_numbers_of_the_json(view: SourceView) -> None:
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    columns = {"count": "count", "excl µs": "total_exclusive_us", "excl avg µs": "avg_exclusive_us", "%": "percent",
               "incl µs": "total_inclusive_us", "incl avg µs": "avg_inclusive_us", "incl p50": "p50_us",
               "incl min": "min_us", "incl max": "max_us",
               "incl p95": "p95_us", "incl p99": "p99_us", "incl µs/token": "us_per_token",
               "GB/s": "gb_per_sec",
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


# A tree of bricks. Each has a name, a category, its own time in µs, and the bricks inside it.
Bricks = list[tuple[str, BrickCategory, int, "Bricks"]]
made_bricks: st.SearchStrategy[Bricks] = st.recursive(
    st.just([]),
    lambda inner: st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(BrickCategory), st.integers(0, 10**7), inner), max_size=3
    ),
    max_leaves=8,
)


def run_bricks(profiler: BrickProfiler, clock: Clock, bricks: Bricks) -> None:
    for name, category, us, inside in bricks:
        with profiler.brick(BrickDefinition(name, category), 1):
            clock.sleep_us(us)
            run_bricks(profiler, clock, inside)


def run_at_once(profiler: BrickProfiler, clock: Clock, us: int) -> None:
    """Run a step in which bricks overlap. The sum of their recorded times may exceed the step."""
    with profiler.step("decode", tokens=1):
        clock.sleep_us(us)
        for _ in range(3):
            profiler.record_elapsed("beside", us * 1000)


@given(
    st.lists(st.tuples(made_bricks, st.integers(0, 100)), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.booleans(),
    st.sampled_from(["life", "window", *MergeMode]),
)
def test_incl_avg_times_count_is_the_total_and_shares_close_or_a_line_tells(
    steps: list[tuple[Bricks, int]], beside_us: int, has_steps: bool, shown: str
) -> None:
    records = []
    for _ in range(2):
        with TemporaryDirectory() as directory:
            clock = Clock()
            profiler = profiler_in(Path(directory), clock)
            for bricks, rest_us in steps:
                with profiler.step("decode", tokens=2) if has_steps else nullcontext():
                    run_bricks(profiler, clock, bricks)
                    clock.sleep_us(rest_us + 1)
            if beside_us:
                run_at_once(profiler, clock, beside_us)
            source = source_of(Path(directory)) if profiler.recording and [*Path(directory).glob("*.ring")] else None
            if source is not None:
                records.append(record_of(source))
                source.close()
            profiler.close()
    if not records:
        return  # no records
    view = (
        source_view(records[0], window=shown == "window")
        if shown in ("life", "window")
        else merged_view(records, MergeMode(shown))
    )
    (said,) = json.loads(REPORTS["json"]([view], []))["sources"]
    text = REPORTS["text"]([view], ["bricks", "categories"])
    for row in said["bricks"]:
        assert row["avg_inclusive_us"] * row["count"] == pytest.approx(row["total_inclusive_us"], rel=1e-12)
        assert row["total_exclusive_us"] <= row["total_inclusive_us"]
        if shown != "window":
            assert row["avg_exclusive_us"] * row["count"] == pytest.approx(row["total_exclusive_us"], rel=1e-12)
    for row in said["categories"] if shown != "window" else ():
        assert row["avg_exclusive_us"] * row["count"] == pytest.approx(row["total_exclusive_us"], rel=1e-12)
    for row in said["graph"]:
        if row["total_inclusive_us"] is not None:
            assert row["avg_inclusive_us"] * row["count"] == pytest.approx(row["total_inclusive_us"], rel=1e-12)
    for table in tables(text):
        for kind in ("excl", "incl"):
            for row in table:
                if f"{kind} µs" in row:
                    product, total = number(row[f"{kind} avg µs"]) * int(row["count"]), number(row[f"{kind} µs"])
                    assert product == pytest.approx(total, rel=2e-2, abs=0.011 * (int(row["count"]) + 1))
    for rows in ("bricks", "categories"):
        shares = [row["percent"] for row in said[rows] if row["percent"] is not None]
        if shares and (sum(shares) > 100 + 1e-6 or min(shares) < 0):
            assert said["shares_close"] is False
    if shown != MergeMode.RANKS:
        assert (said["shares_close"] is False) == ("the shares are no parts of one whole" in text)


def test_the_report_says_shares_do_not_close_if_bricks_run_at_the_same_time(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    run_at_once(profiler, clock, 100)
    view = source_view(record_of(source_of(tmp_path)))
    (said,) = json.loads(REPORTS["json"]([view], []))["sources"]
    assert [row["percent"] for row in said["bricks"]] == [300]
    assert said["shares_close"] is False
    for section in ("bricks", "categories"):
        assert "the shares are no parts of one whole" in REPORTS["text"]([view], [section])


def test_launch_bound_bricks_are_own_rows_without_a_rate_and_a_line_says_why(
    tmp_path: Path,
) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    known = BrickDefinition.of(BrickId.QKV_PROJECTION, backend="torch on cuda", work=Work(0, 2, 64, 0))
    with profiler.step("decode", tokens=1):
        for brick in (known, launch_bound(known)):
            with profiler.brick(brick, 1000):  # type: ignore[arg-type]  # `launch_bound` returns object
                clock.sleep_us(10)
    view = source_view(record_of(source_of(tmp_path)))
    (said,) = json.loads(REPORTS["json"]([view], []))["sources"]
    found = {row["name"]: (row["backend"], row["gflops"]) for row in said["bricks"]}
    assert found["QkvProjection"] == ("torch on cuda", pytest.approx(0.2))
    assert found["QkvProjection, launch-bound"] == ("torch on cuda: until the device got there", None)
    text = REPORTS["text"]([view], list(SECTIONS))
    assert text.count("launch-bound: the device waited for the host; times are until the device got there") == 1


def number(text: str) -> float:
    """Return the number in a report's cell, for example `12,345` or `12.3M`."""
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1])
    return float(text[:-1]) * scale if scale else float(text.replace(",", ""))


def tables(text: str) -> list[list[dict[str, str]]]:
    """Return the rows of each table that has a row of totals, by column.

    Names and categories in these tables contain no blanks.
    """
    found = []
    for block in text.split("\n\n"):
        head, *lines = block.splitlines()
        titles = re.split(r"\s{2,}", head.strip())
        if titles[0] in ("brick", "category"):
            cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
            found.append([dict(zip(titles, row, strict=True)) for row in cells if len(row) == len(titles)])
    return found


def test_a_report_on_a_window_says_so(view: SourceView) -> None:
    recent = replace(view, window=WindowView(asked_s=10.0, covers_s=3.25))
    head = REPORTS["text"]([recent], ["bricks"]).split("\n\n")[0]
    assert "figures: the last 3.2 s (10 s were asked for: that is all there is)" in head
    found = json.loads(REPORTS["json"]([recent, view], []))
    assert [(s["window_s"], s["window_covers_s"]) for s in found["sources"]] == [(10.0, 3.25), (None, None)]
    assert "min_us" in found["provenance"]["derived from measured"]
    assert "min_us" not in json.dumps(json.loads(REPORTS["json"]([view], []))["provenance"])


def test_the_tables_of_the_bricks_fit_a_terminal_of_80_columns() -> None:
    lines = REPORTS["text"]([samples.CHECKED], ["bricks"]).splitlines()
    assert all(len(line) <= 80 for line in lines if line.startswith(tuple(row.name for row in samples.BRICKS)))


def _table(text: str) -> dict[str, dict[str, str]]:
    """Return the brick tables of a text report, by brick and column."""
    found: dict[str, dict[str, Any]] = {}
    for block in (part.splitlines() for part in text.split("\n\n") if part.startswith("brick")):
        notes = ("step time", "times", "budgets", "excl is", "wall clock", "last, least", "median, slowest")
        head, *rows = [re.split(r"\s{2,}", line.strip()) for line in block if not line.startswith(notes)]
        for row in rows:
            found.setdefault(row[0], {}).update(zip(head, row, strict=True))
    return found


def test_the_list_of_sources_says_which_of_them_are_a_sample() -> None:
    row = samples.ALONE
    sampled = replace(row, sample_every=10)
    assert "sample" not in sources_text([row])
    said = f"pid {row.pid} of {row.host}: a sample: one step in 10"
    assert said in sources_text([row, sampled]).splitlines()
    assert row.steps is not None
    others_left_nothing = replace(sampled, steps=replace(row.steps, is_sample=True))
    assert f"{said}, in every figure" in sources_text([row, others_left_nothing]).splitlines()
    assert [one["sample_every"] for one in json.loads(sources_json([row, sampled]))["sources"]] == [1, 10]


def test_the_list_of_sources_is_as_agreed(view: SourceView) -> None:
    golden = GOLDENS / "sources.txt"
    text = REPORTS["text"]([replace(view, listed=samples.SEVERAL)], [SOURCES]) + "\n"
    if os.environ.get("CBTOP_UPDATE_GOLDENS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_the_text_of_the_list_says_the_figures_of_its_json(view: SourceView) -> None:
    listed = replace(view, listed=samples.SEVERAL)
    document, text = json.loads(REPORTS["json"]([listed], [])), REPORTS["text"]([listed], [SOURCES])
    blocks = [[re.split(r"\s{2,}", line) for line in block.splitlines()] for block in text.split("\n\n")]
    tables = [{row[0]: dict(zip(block[0], row, strict=False)) for row in block[1:]} for block in blocks]
    for row in document["listed"]:
        runs, known = (table[str(row["pid"])] for table in tables)
        least = "≥" if row["rates_are_lower_bounds"] else ""
        for head, rate in (("tokens/s", row["tokens_per_sec"]), ("steps/s", row["steps_per_sec"])):
            assert runs[head] == f"{'' if rate is None else least}{units.number(rate)}"
        assert known["lost"] == units.count(row["lost"])
        assert known["before attach"] == units.count(row["dropped_before_attach"])
        assert known["lag"] == ("–" if row["state"] in ("ended", "gone") else f"{row['lag_s']:.1f} s")
        for why in row["unknown"].values():
            assert f": {why}" in text
    for cost in document["costs"]:
        assert f"cbtop: {cost['name']} " in text


def test_where_nobody_keeps_a_list_of_sources_that_is_said_if_it_was_asked(view: SourceView) -> None:
    assert REPORTS["text"]([view], [SOURCES]).startswith("sources: n/a")
    assert "sources: n/a" not in REPORTS["text"]([view], list(VIEWS))


def test_text_and_json_hold_the_same_changes_since_the_baseline() -> None:
    view = samples.COMPARED
    text = REPORTS["text"]([view], [])
    found = json.loads(REPORTS["json"]([view], []))
    baseline = found["sources"][0]["baseline"]
    assert "baseline" in found["provenance"]["derived from measured"]
    assert "baseline: the 10.0 s before 2023-11-1" in text
    assert (baseline["of"], baseline["not_comparable"], baseline["unit"]) == ("here:1:1:0", None, "us_per_token")
    (cell,) = [one for one in baseline["changes"] if (one["brick"], one["layer"]) == ("DownProjection", "Layer 5")]
    assert (cell["category"], cell["beyond_noise"]) == ("FFN", True)
    row = next(line for line in text.splitlines() if line.startswith("DownProjection in Layer 5"))
    figures = [cell["before"], cell["now"], cell["delta"], cell["plus_minus"]]
    assert row.split()[4:] == [*map(units.number, figures), f"{cell['percent']:+.1f}"]
    rate = baseline["tokens_per_sec"]
    assert f"  {units.number(rate['now'])} tokens/s, was {units.number(rate['before'])} (noise: ± 3.0 %)\n" in text
    bricks = {one["brick"] for one in baseline["changes"] if one["layer"] is None}
    assert all(re.search(rf"^{brick} .*\(noise\)$", text, re.MULTILINE) for brick in bricks)


def test_text_and_json_hold_what_has_changed_of_each_place_of_the_graph() -> None:
    graph = json.loads(REPORTS["json"]([samples.COMPARED], []))["sources"][0]["graph"]
    lines = REPORTS["text"]([samples.COMPARED], ["tree"]).splitlines()
    changed = [node for node in graph if node["since_baseline"] and node["since_baseline"]["beyond_noise"]]
    assert [node["name"] for node in changed] == ["Layer 5", "DownProjection"]
    for node in changed:
        change = f"[Δ {node['since_baseline']['percent']:+.1f} % ± "
        assert [line for line in lines if change in line and node["name"] in line]
    assert sum("[Δ noise: ±" in line for line in lines) == sum(bool(node["since_baseline"]) for node in graph) - 2
    assert "Δ" not in REPORTS["text"]([samples.LIVE], ["tree"])


def test_text_and_json_have_the_bricks_under_the_roofs_at_the_baseline() -> None:
    roofline = json.loads(REPORTS["json"]([samples.COMPARED], []))["sources"][0]["roofline"]
    lines = REPORTS["text"]([samples.COMPARED], ["roofline"]).splitlines()
    (down,) = [point for point in roofline["points"] if point["brick"] == "DownProjection"]
    change = down["since_baseline"]["gflops_change"]
    row = next(line for line in lines if line.startswith("DownProjection") and "GFLOP" not in line and "%" in line)
    assert re.search(rf" {units.number(down['since_baseline']['gflops'])} +{change['percent']:+.1f} % ± ", row)
    assert change["beyond_noise"]
    unlike = REPORTS["text"]([samples.UNLIKE], ["roofline"])
    assert re.search(r"^DownProjection .* n/a +n/a$", unlike, re.MULTILINE)
    assert "Δ" not in REPORTS["text"]([samples.LIVE], ["roofline"])


def test_text_and_json_hold_how_the_rate_of_each_source_has_changed() -> None:
    listed = json.loads(REPORTS["json"]([samples.COMPARED], []))["listed"]
    text = REPORTS["text"]([samples.COMPARED], [SOURCES])
    change = listed[0]["since_baseline"]
    assert (change["before"], change["now"], change["beyond_noise"]) == (94.9, 85.36, True)
    assert "pid 4242 of buildbox, Δ (derived): 85.36 tokens/s, was 94.90 (-10.1 % ± 1.7)\n" in text
    assert "pid 7000 of gpubox, Δ (derived): 85.36 tokens/s, was 85.10 (noise: ± 3.0 %)\n" in text
    assert listed[2]["since_baseline"] is None
    assert "pid 7001 of gpubox, Δ (derived): n/a\n" in text
    assert "n/a: Δ of pid 7001" in text
    assert "Δ" not in REPORTS["text"]([samples.LIVE], [SOURCES])


def test_text_and_json_have_the_newest_step_and_the_baselines_median_step() -> None:
    view = replace(seen_timelines.at(20.0), baseline=samples.COMPARED.baseline)
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    median_us = source["timeline"]["since_baseline"]["median_step_us"]
    took_us = source["timeline"]["newest"]["duration_ns"] / 1e3
    said = f"{units.duration(took_us)}, was {units.duration(median_us)} ({took_us / median_us - 1:+,.1%}"
    assert f"Δ (derived): decode {said[:-1]} %), the baseline's median\n" in REPORTS["text"]([view], [TIMELINE])
    unlike = replace(view, baseline=samples.UNLIKE.baseline)
    assert "Δ (derived): decode n/a: another batch: " in REPORTS["text"]([unlike], [TIMELINE])
    assert json.loads(REPORTS["json"]([unlike], []))["sources"][0]["timeline"]["since_baseline"] is None


@pytest.mark.parametrize("lost", [0, 3])
def test_a_rate_is_a_lower_bound_in_text_and_json_if_records_were_lost(lost: int) -> None:
    steps = samples.LIVE.steps
    assert steps is not None
    view = replace(samples.LIVE, window=WindowView(10.0, 10.0, lost, 500))
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    assert source["rates_are_lower_bounds"] is bool(lost)
    rate = units.number(source["steps"]["tokens_per_sec"])
    text = REPORTS["text"]([view], ["bricks"])
    assert (f"≥{rate}" in text) is bool(lost)
    assert rate in text


def test_too_few_recorded_steps_to_show_a_brick_are_reported_with_their_cost() -> None:
    steps = samples.LIVE.steps
    assert steps is not None
    costly = Sampling(10_000, 3.1, 2.3, 4.7, 1.0)
    view = replace(samples.LIVE, steps=replace(steps, recorded=0), bricks=(), sample_every=10_000, overhead=costly)
    said = (
        "none of the 1,200 decode steps was recorded: one in 10,000 is: recording costs 3.10% of its steps' "
        "time (95 %: 2.30 to 4.70; at most 1 is allowed); `cbtop run --overhead PERCENT` lets it cost more"
    )
    assert f"bricks: n/a ({said})\n" in REPORTS["text"]([view], ["bricks"])
    no_step = replace(view, steps=replace(steps, count=0, recorded=0))
    assert "bricks: n/a (no brick of this phase was recorded in this time)\n" in REPORTS["text"](
        [no_step], ["bricks"]
    )


def test_what_does_not_compare_has_a_reason_and_no_change() -> None:
    why = "another batch: 1.00 sequences a step, the baseline has 4.00"
    text = REPORTS["text"]([samples.UNLIKE], [])
    assert f"  Δ n/a: {why}\n" in text
    assert "±" not in text.split("\n\n")[1]
    baseline = json.loads(REPORTS["json"]([samples.UNLIKE], []))["sources"][0]["baseline"]
    assert (baseline["not_comparable"], baseline["changes"], baseline["step_us"]) == (why, [], None)
    assert json.loads(REPORTS["json"]([samples.LIVE], []))["sources"][0]["baseline"] is None


def test_the_timeline_of_text_and_json_is_that_of_the_view() -> None:
    found = seen_timelines.timeline_at(20.0)
    shown = seen_timelines.at(20.0)
    text = REPORTS["text"]([shown], [TIMELINE])
    told = json.loads(REPORTS["json"]([shown], []))["sources"][0]["timeline"]
    assert told["newest"]["duration_ns"] == found.newest.duration_ns  # type: ignore[union-attr]
    assert f"newest whole decode: {exact(told['newest']['duration_ns'])}" in text
    for lane, told_lane in zip(found.lanes, told["lanes"], strict=True):
        assert sum(told_lane["parts_ns"].values()) == told["length_ns"] == found.length_ns
        assert lane_sum(lane, 0, found.length_ns) in text
        assert told_lane["gaps_count"] == len(lane.gaps)
        for row, told_row in zip(lane.rows, told_lane["rows"], strict=True):
            assert told_row["count"] == len(row.spans)
            newest = row.spans[-1]
            assert told_row["spans"][-1]["start_ns"] == newest.start_ns
            assert told_row["spans"][-1]["in"] == list(newest.where)
    total_ns = sum(part.duration_ns for _, part in found.newest_parts())
    assert total_ns == found.newest.duration_ns  # type: ignore[union-attr]
    listed = [line.split()[-4:] for line in text.splitlines() if line.startswith("DownProjection ")]
    assert len(listed) == 12  # DownProjection has a row in each of 12 layers.


def test_a_timeline_of_many_records_is_bounded_in_text_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbtop.reports.json.MAX_LISTED", 20)
    monkeypatch.setattr("cbtop.reports.timeline.TIMELINE_LINES", 10)
    shown = seen_timelines.at(20.0)
    told = json.loads(REPORTS["json"]([shown], []))["sources"][0]["timeline"]
    rows = [row for lane in told["lanes"] for row in lane["rows"]]
    assert max(len(row["spans"]) for row in rows) == 20 < max(row["count"] for row in rows)
    assert sum(row["count"] for row in rows) == told["spans"]
    text = REPORTS["text"]([shown], [TIMELINE])
    assert f"{len(seen_timelines.timeline_at(20.0).newest_parts()) - 10} more of it are not listed" in text


def test_where_no_records_were_followed_text_and_json_say_so(view: SourceView) -> None:
    assert "timeline: n/a" in REPORTS["text"]([view], [TIMELINE])
    assert "timeline" not in REPORTS["text"]([view], list(VIEWS))
    assert json.loads(REPORTS["json"]([view], []))["sources"][0]["timeline"] is None


def test_the_text_of_a_timeline_is_as_agreed() -> None:
    golden = GOLDENS / "timeline.txt"
    text = SECTIONS[TIMELINE](seen_timelines.at(20.0)) + "\n"
    if os.environ.get("CBTOP_UPDATE_GOLDENS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
