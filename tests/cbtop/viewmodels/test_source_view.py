"""Tests of the view of a process: each figure equals the time of the fake clock, and sums are exact to 1 ns."""

from __future__ import annotations

import gc
import json
import os
import weakref
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis import stats
from cbtop.profiler.analysis.budget import TokenBudget
from cbtop.profiler.analysis.roofline import NO_ROOF
from cbtop.profiler.definitions import BrickDefinition
from cbtop.protocol.attributes import UNKNOWN_TYPE, Work
from cbtop.protocol.messages import Ceiling, Manifest
from cbtop.protocol.vocabulary import BrickCategory, NodeKind, Provenance
from cbtop.reports import REPORTS
from cbtop.viewmodels.graph import tree_text
from cbtop.viewmodels.roofline import missing_ceilings
from cbtop.viewmodels.selection import has_data
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.steps import OVERLAP
from cbtop.viewmodels.verdicts import judged
from tests.cbtop.recorded import Clock, decode_run, profiler_in, record_of, source_of

READ = Ceiling("read", "bandwidth", 100.0, "GB/s", Provenance.MEASURED, 98.0, 90.0)


@pytest.fixture
def view(runtime: Path) -> SourceView:
    return source_view(decode_run(runtime))


def test_steps_count_tokens_once_a_forward_pass(view: SourceView) -> None:
    assert view.steps is not None
    assert (view.phase, view.steps.count, view.steps.tokens) == ("decode", 10, 10)
    assert view.steps.mean_us == 100
    assert view.steps.tokens_per_sec_in_steps == pytest.approx(10_000)
    prefill = next(steps for steps in view.phases if steps.phase == "prefill")
    assert (prefill.count, prefill.tokens) == (1, 4)


def test_a_brick_is_summed_over_its_layers(view: SourceView) -> None:
    down = view.bricks[0]
    assert (down.name, down.count, down.avg_inclusive_us, down.us_per_token) == ("DownProjection", 20, 26, 52)
    assert (down.total_inclusive_us, down.elements, down.percent) == (520, 1280, 52)
    assert down.p50_us == pytest.approx(26, rel=0.01)
    assert (down.flops, down.gflops) == (None, None)
    qkv = view.bricks[1]
    assert (qkv.flops, qkv.bytes) == (1280 * 128, 20 * 4096 + 1280 * 4)
    assert qkv.gflops == pytest.approx(1280 * 128 / 400_000)


def test_a_view_frees_its_parts_at_once_without_the_garbage_collector(runtime: Path) -> None:
    record = decode_run(runtime)
    gc.disable()
    try:
        view = source_view(record)
        row = weakref.ref(view.bricks[0])
        # Read these parts of the view, so that they are computed.
        view.bricks[0].by_cached, view.roofline, view.graph, view.layer_times
        del view
        assert row() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("said", "live", "recorded"),
    [
        ("run `cbtop calibrate --threads 2`", None, "none were known when this was recorded"),
        ("none for bfloat16; run `cbtop calibrate`", None, "none for bfloat16 when this was recorded"),
        ("those of mps are not measured", None, "those of mps are not measured"),
        ("", "measure_ceilings() in its program measures them", "not measured by this source"),
    ],
)
def test_a_recording_advises_no_measurement_of_roofs(
    runtime: Path, said: str, live: str | None, recorded: str
) -> None:
    record = decode_run(runtime)
    record.ceilings.clear()
    record.manifest = Manifest("toy", "qwen2", "torch", "F32", 2, 2, 64, 512, 1000, 2000, roofs=said)
    assert missing_ceilings(source_view(record).roofline).endswith(live or said)
    assert missing_ceilings(source_view(record, is_recording=True).roofline).endswith(f"n/a: {recorded}")


@pytest.mark.parametrize("at_once", [1.04, 2.98])
def test_no_limit_is_named_for_one_brick_of_steps_that_run_at_once(runtime: Path, at_once: float) -> None:
    """Several steps run at once.

    So the bricks may reach the roof (peak rate) together, although each is far below it.
    """
    record = decode_run(runtime)
    record.ceilings = {
        one.name: one for one in (READ, Ceiling("fma", "compute", 10.0, "GFLOP/s", Provenance.MEASURED))
    }
    step = next(node for node in record.nodes.children[None] if node.name == "decode")
    total_ns = int(record.stats.column("total_ns")[step.id])
    record.stats.sparse["union_ns"][step.id] = round(total_ns / at_once)
    view = source_view(record)
    qkv = view.bricks[1]
    assert qkv.percent_of_roof is not None
    texts = [REPORTS["text"]([view], ["roofline"]), json.dumps(json.loads(REPORTS["json"]([view], [])))]
    said = "2.98 decode steps ran at once and share every roof: of one brick it is not said what limits it"
    if at_once < OVERLAP:
        assert (qkv.bound, view.roofline.note) == (NO_ROOF, "")
    else:
        assert (qkv.bound, view.roofline.note) == ("several at once", said)
    for text in texts:
        assert (said in text) == (at_once >= OVERLAP)
        assert (NO_ROOF in text) == (at_once < OVERLAP)


def test_bricks_whose_names_differ_in_what_is_not_seen_alone_have_a_row_each(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    for name, calls in (("A\u200b", 1), ("A\u202e", 2), ("A", 3)):
        for _ in range(calls):
            with profiler.brick(name):
                pass
    rows = source_view(record_of(source_of(runtime))).bricks
    assert {row.name: row.count for row in rows} == {"A\ufffd200B": 1, "A\ufffd202E": 2, "A": 3}


def test_categories_add_up_their_bricks(view: SourceView) -> None:
    assert [(row.name, row.percent, row.count) for row in view.categories] == [
        ("Norm", 4, 20),
        ("Attention", 40, 20),
        ("FFN", 52, 20),
    ]


def test_the_books_of_a_phase_balance(view: SourceView) -> None:
    books = view.books
    assert books is not None
    assert (books.wall_us, books.bricks_us, books.gaps_us, books.unattributed_us) == (1000, 960, 20, 20)
    assert (books.residual_percent, books.open_us) == (2, 0)


def test_a_phase_can_be_chosen_and_an_unknown_one_falls_back(runtime: Path) -> None:
    record = decode_run(runtime)
    prefill = source_view(record, "prefill")
    assert prefill.books is not None
    assert (prefill.phase, prefill.books.wall_us) == ("prefill", 2 * (48 * 4 + 1) + 2)
    assert source_view(record, "nonsense").phase == "decode"


@pytest.mark.parametrize(
    ("named", "steps", "shown"),
    [
        ("", [("", "encode", 9), ("", "prefill", 2), ("", "decode", 1)], "decode"),
        ("", [("", "encode", 1), ("", "decode, a sample", 1), ("", "prefill", 9)], "decode, a sample"),
        ("", [("", "draft decode", 1), ("", "prefill", 9)], "draft decode"),
        ("", [("", "encode", 9), ("Llama", "prefill", 3), ("Llama", "decode", 1)], "Llama decode"),
        ("", [("Draft", "decode", 9), ("", "prefill", 2), ("", "verify", 1)], "verify"),
        ("Large", [("", "decode", 9), ("Large", "prefill", 2), ("Large", "decode", 1)], "Large decode"),
        ("Gone", [("", "prefill", 2), ("", "decode", 1)], "decode"),
        ("", [("", "warm-up", 1), ("", "train", 9), ("", "eval", 2)], "train"),
        ("", [("", "forward", 3), ("Net 2", "forward", 12)], "Net 2 forward"),
        ("", [("", "decode", 1), ("Bert", "encode", 12)], "Bert encode"),
        ("", [("", "train", 9), ("", "decode", 4), ("", "prefill", 4)], "train"),
        ("", [("", "train", 9), ("", "decode", 9), ("", "prefill", 4)], "decode"),
        ("", [("", "train (warm-up)", 9), ("", "decode", 1)], "decode"),
    ],
)
def test_the_default_phase_is_long_training_or_decode_or_the_longest(
    named: str, steps: list[tuple[str, str, int]], shown: str, runtime: Path
) -> None:
    profiler = profiler_in(runtime, clock := Clock())
    profiler.announce(Manifest("toy", "qwen2", "torch", "F32", 2, 2, 64, 512, 1000, 2000, steps_of=named))
    for model, phase, us in steps:
        with profiler.step(phase, 1, model=model), profiler.brick("a"):
            clock.sleep_us(us)
    view = source_view(record_of(source_of(runtime)))
    assert view.phase == shown
    is_hidden = any(phase == "train" for _, phase, _ in steps) and shown != "train"
    hint = "decode steps do not train; pass --phase train"
    assert (hint in REPORTS["text"]([view], ["training"])) == is_hidden


def test_of_steps_whose_tokens_are_not_known_there_is_no_rate(runtime: Path) -> None:
    profiler = profiler_in(runtime, clock := Clock())
    for _ in range(3):
        with profiler.step("encode"), profiler.brick("a"):
            clock.sleep_us(5)
    view = source_view(record_of(source_of(runtime)))
    assert view.steps is not None
    assert (view.steps.count, view.steps.tokens_per_sec, view.steps.tokens_per_sec_in_steps) == (3, None, None)
    text = REPORTS["text"]([view], [])
    assert "encode: 3 steps, " in text
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    assert source["steps"]["tokens"] is None


def test_the_graph_is_the_tree_the_text_draws(view: SourceView) -> None:
    lines = tree_text(view.graph).splitlines()
    assert lines[:5] == [
        "Execution Graph",
        "├── Layer 0",
        "│   ├── RmsNorm  2.0µs (64 elem)",
        "│   ├── QkvProjection  20.0µs (64 elem)",
        "│   │   └── q4_k_linear  numba-omp×2",
    ]
    assert lines[6] == "│       └── q4k_gemv  <<<32,256,1>>> smem=4096B"
    assert [row.label for row in view.graph] == [line.lstrip("│├└─ ") for line in lines[1:]]
    assert {row.depth for row in view.graph if row.kind is NodeKind.KERNEL} == {2}


def test_bricks_without_work_are_named_not_placed(view: SourceView) -> None:
    assert view.roofline.without_work == ("DownProjection",)
    qkv = next(point for point in view.roofline.points if point.name == "QkvProjection")
    assert qkv.bound == "latency or overhead"  # The brick is far below the memory roof and the compute roof.
    assert qkv.intensity is not None
    assert qkv.attainable_gflops == pytest.approx(qkv.intensity * 20)


def test_what_is_said_of_roofs_comes_with_them_into_every_report(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    way_out = "none was measured for weights in bfloat16"
    profiler.announce(Manifest("toy", "qwen2", "torch", "bfloat16", 2, 2, 64, 512, 1000, 2000, roofs=way_out))
    profiler.announce(
        Ceiling(
            "dram_read",
            "bandwidth",
            20.0,
            "GB/s",
            Provenance.MEASURED,
            19.0,
            12.5,
            "2026-11-22",
            load_percent=3.4,
            rounds=12,
        )
    )
    with profiler.step("decode", 1), profiler.brick("a"):
        pass
    view = source_view(record_of(source_of(runtime)))
    text = REPORTS["text"]([view], ["roofline"])
    assert (
        "ceiling: dram_read 20.00 GB/s "
        "(measured 2026-11-22, age n/a, best of 12 rounds, median 19.00, lowest 12.50, spread 5.0 %, load 3 %)\n"
    ) in text
    assert f"compute ceiling n/a: {way_out}" in text
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    assert source["roofline"]["ceilings_note"] == way_out
    assert source["roofline"]["ceilings"] == [
        {"name": "dram_read", "kind": "bandwidth", "value": 20.0, "unit": "GB/s", "provenance": "measured",
         "rounds": 12, "median": 19.0, "lowest": 12.5, "spread_percent": 5.0, "unsure": False, "load_percent": 3.4,
         "measured_on": "2026-11-22", "age_s": None, "short": False,
         "dtype": None}
    ]  # fmt: skip


# Medians of the measured rounds of a roof (peak rate), relative to the best round, which is 100.
UNSURE, SURE, UNKNOWN = 80.0, 95.0, None


@pytest.mark.parametrize(("median", "unsure"), [(UNSURE, True), (90.0, False), (SURE, False), (UNKNOWN, None)])
def test_a_roof_with_rounds_over_10_percent_apart_is_unsure_in_every_output(
    runtime: Path, median: float | None, unsure: bool | None
) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    profiler.announce(Ceiling("read", "bandwidth", 100.0, "GB/s", Provenance.MEASURED, median))
    profiler.announce(Ceiling("fma", "compute", 1000.0, "GFLOP/s", Provenance.MEASURED, 999.0))
    for name, flops in (("left", 1.0), ("right", 1000.0)):
        work = Work(flops_per_element=flops, bytes_per_element=1.0)
        with profiler.step("decode", 1), profiler.brick(BrickDefinition(name, BrickCategory.FFN, work=work), 100):
            clock.sleep_us(1)
    view = source_view(record_of(source_of(runtime)))
    assert {point.name: point.roof_unsure for point in view.roofline.points} == {"left": unsure, "right": False}
    text = REPORTS["text"]([view], ["roofline"])
    assert ("roofs unsure: read (spread 20.0 %)" in text) == bool(unsure)
    assert [line.split()[-1] == "unsure" for line in text.splitlines() if line.startswith("left")] == [bool(unsure)]
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    assert [one["unsure"] for one in source["roofline"]["ceilings"]] == [unsure, False]
    points = {one["brick"]: one["roof_unsure"] for one in source["roofline"]["points"]}
    assert points == {"left": unsure, "right": False}


def test_a_roof_is_as_old_as_it_was_when_its_process_was_heard_of(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    profiler.announce(replace(READ, measured_on="2026-11-22T10:00:00+00:00"))
    profiler.announce(replace(READ, name="nonsense", measured_on="yesterday, at ten"))
    with profiler.step("decode", 1), profiler.brick("a"):
        pass
    record = record_of(source_of(runtime))
    assert record.hello is not None
    record.hello = replace(record.hello, realtime_ns=int(datetime(2026, 11, 22, 11, tzinfo=UTC).timestamp()) * 10**9)
    ages_s = [row.age_s for row in source_view(record).roofline.ceilings]
    assert ages_s == [pytest.approx(3600, abs=60), None]
    record.hello = replace(record.hello, realtime_ns=0)  # The host's clock was set back before the process began.
    assert source_view(record).roofline.ceilings[0].age_s == 0


@pytest.mark.parametrize("phase", [None, "decode", "prefill", "other"])
@pytest.mark.parametrize("host", ["a word", "a brick", "an open step", "prefill", "decode in prefill"])
def test_whether_there_is_data_to_show_is_known_without_a_view(runtime: Path, host: str, phase: str | None) -> None:
    profiler = profiler_in(runtime, Clock())
    with ExitStack() as running:
        if host == "a word":
            profiler.announce(Ceiling("dram", "bandwidth", 1.0, "GB/s", Provenance.STATIC))
        elif host == "a brick":
            profiler.record_elapsed("a", 5)
        else:
            running.enter_context(profiler.step("prefill", 1))
        if host == "decode in prefill":
            running.enter_context(profiler.step("decode", 1))
        if host != "an open step":
            running.close()
        record = record_of(source_of(runtime))
        view = source_view(record, phase)
        assert has_data(record, phase) == (view.has_data and phase in (None, view.phase))


def test_a_process_without_steps_has_bricks_but_no_books(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.brick("outer", 1):
        clock.sleep_us(3)
        with profiler.brick("inner", 1):
            clock.sleep_us(7)
    view = source_view(record_of(source_of(runtime)))
    assert (view.phase, view.steps, view.books) == (None, None, None)
    took = {row.name: (row.total_inclusive_us, row.total_exclusive_us) for row in view.bricks}
    assert took == {"outer": (10, 3), "inner": (7, 7)}
    assert all(row.percent is None for row in view.bricks)


def test_bricks_of_one_name_and_two_categories_are_two_rows_each_in_its_own(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1):
        for category, us in ((BrickCategory.ATTENTION, 3), (BrickCategory.FFN, 7)):
            with profiler.brick(BrickDefinition("Linear", category)):
                clock.sleep_us(us)
    view = source_view(record_of(source_of(runtime)))
    assert {row.key: row.total_exclusive_us for row in view.bricks} == {
        ("Linear", BrickCategory.ATTENTION): 3,
        ("Linear", BrickCategory.FFN): 7,
    }
    assert [(row.category, row.total_exclusive_us) for row in view.categories] == [
        (BrickCategory.ATTENTION, 3),
        (BrickCategory.FFN, 7),
    ]


def test_of_a_brick_inside_another_of_its_name_a_token_takes_the_time_once(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    block = BrickDefinition("Block", BrickCategory.OTHER, budget=TokenBudget(6))
    with profiler.step("decode", tokens=2), profiler.brick(block):
        clock.sleep_us(3)
        with profiler.brick(block):
            clock.sleep_us(7)
    (row,) = source_view(record_of(source_of(runtime))).bricks
    assert (row.count, row.total_inclusive_us, row.total_exclusive_us) == (2, 17, 10)
    assert (row.us_per_token, row.percent) == (5, 100)
    assert (row.budget_us_per_token, row.budget_met) == (6, True)


def test_a_share_is_of_what_has_ended_while_a_long_step_still_runs(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1), profiler.brick("a"):
        clock.sleep_us(100)
    profiler.step("decode", tokens=1).__enter__()
    with profiler.brick("a"):
        clock.sleep_us(900)
    (row,) = source_view(record_of(source_of(runtime))).bricks
    assert (row.percent, row.us_per_token, row.total_inclusive_us) == (100, 100, 1000)


def test_what_a_brick_holds_is_not_a_gap_of_the_step(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1), profiler.brick("outer"):
        clock.sleep_us(1)
        with profiler.layer(0):
            clock.sleep_us(2)
            with profiler.brick("inner"):
                clock.sleep_us(4)
    view = source_view(record_of(source_of(runtime)))
    assert view.books is not None
    assert (view.books.bricks_us, view.books.gaps_us, view.books.unattributed_us) == (7, 0, 0)
    assert {row.name: row.total_exclusive_us for row in view.bricks} == {"outer": 3, "inner": 4}


# Generated steps: a list of layers, each with bricks and a pause after it. A brick has its time and the pause after
# it, in µs.
steps = st.lists(
    st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=4), st.integers(0, 9)),
        max_size=3,
    ),
    min_size=1,
    max_size=4,
)


@given(run=steps, cut=st.booleans())
def test_wall_is_bricks_plus_gaps_plus_unattributed_whatever_ran(
    run: list[list[tuple[list[tuple[int, int]], int]]], cut: bool
) -> None:
    directory = Path(os.environ["CBTOP_RUNTIME_DIR"])
    clock = Clock()
    profiler = profiler_in(directory, clock)
    spans = []
    for layers in run:
        span = profiler.step("decode", tokens=1)
        span.__enter__()
        spans.append(span)
        for index, (bricks, pause_us) in enumerate(layers):
            with profiler.layer(index):
                for us, after_us in bricks:
                    with profiler.brick("brick", 1):
                        clock.sleep_us(us)
                    clock.sleep_us(after_us)
            clock.sleep_us(pause_us)
        if layers is not run[-1] or not cut:
            span.__exit__(None, None, None)
    ended = run[:-1] if cut else run
    if profiler_has_records(directory):
        view = source_view(record_of(source_of(directory)))
        books = view.books
        assert books is not None
        in_bricks = [sum(us for bricks, _ in layers for us, _ in bricks) for layers in run]
        assert books.bricks_us == sum(in_bricks[: len(ended)])
        assert books.gaps_us == sum(after for layers in ended for bricks, _ in layers for _, after in bricks)
        assert books.unattributed_us == sum(pause for layers in ended for _, pause in layers)
        assert books.wall_us == books.bricks_us + books.gaps_us + books.unattributed_us
        assert books.open_us == sum(in_bricks) - books.bricks_us
        assert sum(row.total_exclusive_us for row in view.bricks) == books.bricks_us + books.open_us
        assert view.loss.produced == view.loss.received + view.loss.dropped
    profiler.close()
    for path in directory.iterdir():
        path.unlink()


def profiler_has_records(directory: Path) -> bool:
    return any(directory.glob("*.ring"))


def test_gaps_have_the_name_of_where_they_lie(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", 1):
        clock.sleep_us(1)
        with profiler.layer(100):  # a layer that contains layers
            for index in range(2):
                clock.sleep_us(20)
                with profiler.layer(index):
                    clock.sleep_us(300)
                    with profiler.brick("a", 1):
                        clock.sleep_us(4000)
    books = source_view(record_of(source_of(runtime))).books
    assert books is not None
    assert {gap.name: gap.us for gap in books.gaps} == {"inside layers": 600, "between layers": 40}
    assert (books.bricks_us, books.gaps_us, books.unattributed_us, books.wall_us) == (8000, 640, 1, 8641)


def test_a_process_without_layers_has_no_gap_by_their_name(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", 1):
        clock.sleep_us(1)
        with profiler.brick("a", 1):
            clock.sleep_us(4000)
    books = source_view(record_of(source_of(runtime))).books
    assert books is not None
    assert (books.gaps, books.gaps_us, books.unattributed_us) == ((), 0, 1)


def test_calls_and_steps_without_a_count_are_reported_and_have_no_elements(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    work = BrickDefinition("Sized", BrickCategory.FFN, work=Work(flops_per_element=2.0, bytes_per_call=8.0))
    for elements in (7, -1):
        with profiler.step("decode", tokens=elements), profiler.brick(work, elements):
            pass
    view = source_view(record_of(source_of(runtime)))
    (row,) = view.bricks
    assert (row.count, row.uncounted, row.flops, row.bytes) == (2, 1, None, 16.0)
    assert [node.elements for node in view.graph] == [None]
    assert view.steps is not None
    assert (view.steps.count, view.steps.tokens_per_sec, row.us_per_token) == (2, None, None)
    assert (view.loss.produced, view.loss.dropped) == (4, 0)
    assert "1 calls gave no count of elements" in REPORTS["text"]([view], ["bricks"], None)


def test_places_beyond_the_bound_have_no_percentiles_and_their_bricks_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "few").mkdir()
    every = source_view(decode_run(tmp_path / "all"))
    # With this limit, only one node of the second phase has a histogram.
    monkeypatch.setattr(stats, "MAX_HISTOGRAM_NODES", 12)
    few = source_view(decode_run(tmp_path / "few"))
    assert [(row.name, row.p50_us, row.p99_us) for row in few.bricks] == [
        (row.name, row.p50_us, row.p99_us) for row in every.bricks
    ]
    assert few.steps == every.steps
    assert [row.count for row in few.graph] == [row.count for row in every.graph]
    assert {row.p50_us for row in few.graph if row.kind is NodeKind.BRICK} == {None}
    assert None not in {row.p50_us for row in every.graph if row.kind is NodeKind.BRICK}


FMA, DOT, MATMUL = (
    Ceiling(f"roof_{dtype}", "compute", value, unit, Provenance.MEASURED, value, dtype=dtype)
    for dtype, value, unit in (
        ("float32", 100.0, "GFLOP/s"), ("int8", 400.0, "GOP/s"), ("bfloat16", 1_000.0, "GFLOP/s")
    )
)  # fmt: skip
WIDE = Ceiling("read", "bandwidth", 100.0, "GB/s", Provenance.MEASURED, 100.0)


@pytest.mark.parametrize(
    ("roofs", "dtypes", "percent", "sentence"),
    [
        ((FMA, DOT), ("float32",), 87.0, "decoding is compute-bound: 87.0 % of the measured float32 peak (87.00 of "),
        # The brick is far below the int8 peak. It is close to the float32 peak, which does not count for int8.
        ((FMA, DOT), ("int8",), 21.75, ""),
        ((FMA, replace(DOT, value=90.0)), ("int8",), 96.7, "of the measured int8 peak (87.00 of 90.00 GOP/s)"),
        # The step may compute in int8 or bfloat16, so the higher peak counts.
        ((FMA, DOT, MATMUL), ("int8", "bfloat16"), 8.7, ""),
        ((FMA, DOT), ("int8", "bfloat16"), None, ""),
        ((FMA,), ("int8",), None, ""),  # An older version of cbtop did not measure the int8 peak.
        ((FMA, DOT), ("",), 87.0, "of the measured float32 peak"),  # The program does not report its data type.
    ],
)
def test_a_brick_is_held_against_the_roof_of_what_it_multiplies(
    runtime: Path, roofs: tuple[Ceiling, ...], dtypes: tuple[str, ...], percent: float | None, sentence: str
) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for roof in (WIDE, *roofs):
        profiler.announce(roof)
    for dtype in dtypes:
        work = Work(flops_per_element=870.0, bytes_per_element=1.0, dtype=dtype)
        brick = BrickDefinition("decoding", BrickCategory.FFN, work=work)
        with profiler.step("decode", 1), profiler.brick(brick, 100):
            clock.sleep_us(1)
    view = source_view(record_of(source_of(runtime)))
    (row,) = view.roofline.points
    assert row.dtypes == tuple(sorted(dtypes))
    assert row.percent_of_roof == (None if percent is None else pytest.approx(percent, abs=0.1))
    bound = [one.sentence for one in judged(view).verdicts if one.id == "compute-bound"]
    assert [sentence in one for one in bound] == ([True] if sentence else [])
    text = REPORTS["text"]([view], ["roofline"])
    unknown = next((one for one in sorted(dtypes) if one not in {roof.dtype for roof in roofs} | {""}), None)
    assert f"{unknown} compute ceiling n/a: not measured by this source" in text or unknown is None
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    assert source["roofline"]["points"][0]["dtypes"] == sorted(dtypes)
    assert [one["dtype"] for one in source["roofline"]["ridges"]] == [roof.dtype for roof in roofs]


@pytest.mark.parametrize(
    ("roofs", "dtype", "advice"),
    [
        ((FMA, MATMUL), "float32", "Compute less, or in a lower precision: bfloat16 was measured to reach 1,000 "),
        ((FMA,), "float32", "Compute less."),
        # The machine is faster with int8, but this needs another program, so it is not suggested.
        ((FMA, DOT), "float32", "Compute less."),
        # bfloat16 is slower than float32 on this machine.
        ((FMA, replace(MATMUL, value=90.0)), "float32", "Compute less."),
        ((FMA, replace(MATMUL, value=100.0)), "bfloat16", "Compute less."),
        ((FMA, MATMUL), UNKNOWN_TYPE, ""),
        ((replace(FMA, dtype=""),), f"{UNKNOWN_TYPE} (weights in float64)", ""),
        ((replace(FMA, dtype=""),), UNKNOWN_TYPE, ""),  # A file of an older version, without data types.
    ],
)
def test_a_lower_precision_is_advised_if_the_machine_has_a_faster_one(
    runtime: Path, roofs: tuple[Ceiling, ...], dtype: str, advice: str
) -> None:
    view = _computing(runtime, roofs, dtype)
    found = [one.advice for one in judged(view).verdicts if one.id == "compute-bound"]
    assert [one.startswith(advice) for one in found] == ([True] if advice else [])
    if advice == "Compute less.":
        assert found == [advice]


def test_work_of_an_unknown_type_is_under_no_peak(runtime: Path) -> None:
    view = _computing(runtime, (FMA, MATMUL), UNKNOWN_TYPE)
    (row,) = view.roofline.points
    assert row.gflops == pytest.approx(87.0)
    assert (row.bound, row.percent_of_roof) == (None, None)
    text = REPORTS["text"]([view], ["roofline"])
    assert "unknown type compute ceiling n/a" in text


def test_a_roof_over_no_brick_is_not_called_unsure(runtime: Path) -> None:
    view = _computing(runtime, (FMA, replace(MATMUL, median=500.0)), "float32")
    assert "roof-unsure" not in [one.id for one in judged(view).verdicts]


def _computing(runtime: Path, roofs: tuple[Ceiling, ...], dtype: str) -> SourceView:
    """Return the view of a process.

    Its only brick reaches 87 GFLOP/s on numbers of the type `dtype`.
    """
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for roof in (WIDE, *roofs):
        profiler.announce(roof)
    work = Work(flops_per_element=870.0, bytes_per_element=1.0, dtype=dtype)
    with profiler.step("decode", 1), profiler.brick(BrickDefinition("product", BrickCategory.FFN, work=work), 100):
        clock.sleep_us(1)
    return source_view(record_of(source_of(runtime)))
