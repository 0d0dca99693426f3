"""Tests of attributes of nodes (labels, unknown work, byte budgets): all arrive unchanged on the screen."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from cbtop.client.source_record import SourceRecord
from cbtop.exporters import EXPORTERS
from cbtop.exporters.recorded import process_of_files
from cbtop.profiler.analysis.budget import ByteBudget
from cbtop.profiler.definitions import BrickDefinition
from cbtop.protocol.attributes import Work
from cbtop.protocol.vocabulary import BrickId, NodeKind
from cbtop.reports.json import json_report
from cbtop.viewmodels.graph import tree_text
from cbtop.viewmodels.merge import merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import Clock, profiler_in, record_of, source_of

ENCODER_0 = (NodeKind.LAYER, 0, "encoder")
DRAFT_DECODE = (NodeKind.STEP, "decode", "draft")


def labelled_run(directory: Path, labels: tuple[str, ...]) -> SourceRecord:
    """Record ten steps with one projection of 10 µs for each label, in layer 0 of the encoder."""
    directory.mkdir(exist_ok=True)
    clock = Clock()
    profiler = profiler_in(directory, clock)
    places = [BrickDefinition.of(BrickId.QKV_PROJECTION, label=label) for label in labels]
    for _ in range(10):
        with profiler.step("decode", tokens=1), profiler.brick(ENCODER_0):
            for place in places:
                with profiler.brick(place, 64):
                    clock.sleep_us(10)
    return record_of(source_of(directory))


def test_the_tree_and_the_json_tell_places_of_one_name_apart(runtime: Path) -> None:
    view = source_view(labelled_run(runtime, ("q_proj", "k_proj")))
    assert tree_text(view.graph).splitlines() == [
        "Layer 0 (encoder)",
        "├── QkvProjection q_proj  10.0µs (64 elem)",
        "└── QkvProjection k_proj  10.0µs (64 elem)",
    ]
    graph = json.loads(json_report([view]))["sources"][0]["graph"]
    assert [(node["name"], node["label"]) for node in graph] == [
        ("0", "encoder"),
        ("QkvProjection", "q_proj"),
        ("QkvProjection", "k_proj"),
    ]


def test_places_with_different_labels_stay_two_in_a_merge_and_equal_are_one(tmp_path: Path) -> None:
    one = labelled_run(tmp_path / "one", ("q_proj", "k_proj"))
    other = labelled_run(tmp_path / "other", ("k_proj", "v_proj"))
    counts = {row.node_label: row.count for row in merged_view([one, other], MergeMode.SUM).graph}
    assert counts == {"encoder": 20, "q_proj": 10, "k_proj": 20, "v_proj": 10}


# Parquet compresses its columns, so test_parquet.py tests its labels.
@pytest.mark.parametrize("name", sorted(EXPORTERS.keys() - {"parquet"}))
def test_every_export_carries_the_labels(name: str, runtime: Path) -> None:
    labelled_run(runtime, ("q_proj", "k_proj"))
    (ring,), (catalog,) = runtime.glob("*.ring"), runtime.glob("*.catalog")
    out = io.BytesIO()
    EXPORTERS[name].write([process_of_files(ring, catalog)], out)
    for shown in (b"QkvProjection q_proj", b"QkvProjection k_proj", b"Layer 0 (encoder)"):
        assert shown in out.getvalue()


def test_the_steps_of_two_models_are_two_phases(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for key in (DRAFT_DECODE, (NodeKind.STEP, "decode", "target"), (NodeKind.STEP, "decode")):
        with profiler.brick(key, 1):
            clock.sleep_us(10)
    assert list(record_of(source_of(runtime)).history) == ["draft decode", "target decode", "decode"]


def test_of_work_that_leaves_out_its_bytes_only_the_flop_are_known(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with (
        profiler.step("decode", tokens=1),
        profiler.brick(BrickDefinition.of(BrickId.ACTIVATION, work=Work(flops_per_element=4)), 100),
    ):
        clock.sleep_us(10)
    view = source_view(record_of(source_of(runtime)))
    (row,) = view.bricks
    assert (row.flops, row.bytes, row.gflops, row.gb_per_sec) == (400, None, pytest.approx(0.04), None)
    assert view.roofline.without_work == (row.name,)


@pytest.mark.parametrize(("gb_per_sec", "met"), [(1.0, True), (4.0, False)])
def test_a_byte_budget_is_judged_by_the_bytes_that_moved(gb_per_sec: float, met: bool, runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    down = BrickDefinition.of(
        BrickId.DOWN_PROJECTION, work=Work(bytes_per_call=20_000), budget=ByteBudget(gb_per_sec)
    )
    for _ in range(5):
        with profiler.step("decode", tokens=2):
            for _ in range(3):
                with profiler.brick(down):
                    clock.sleep_us(10)
    view = source_view(record_of(source_of(runtime)))
    (row,) = view.bricks
    provenance = json.loads(json_report([view]))["provenance"]
    assert "budget_us_per_token" in provenance["derived from measured"]
    assert "budget_us_per_token" not in provenance["static"]
    assert row.budget_gb_per_sec == gb_per_sec
    assert row.gb_per_sec == pytest.approx(2.0)
    # The budget is derived from 30,000 bytes per token.
    assert row.budget_us_per_token == pytest.approx(30 / gb_per_sec)
    assert row.budget_used_percent == pytest.approx(100 * gb_per_sec / 2.0)
    assert row.budget_met is met


def test_a_byte_budget_without_bytes_or_tokens_is_not_judged(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with (
        profiler.step("decode", tokens=1),
        profiler.brick(BrickDefinition.of(BrickId.ACTIVATION, budget=ByteBudget(5))),
    ):
        clock.sleep_us(10)
    (row,) = source_view(record_of(source_of(runtime))).bricks
    assert (row.budget_us_per_token, row.budget_met) == (None, None)
