"""Tests of docs/json.md and docs/json-parts.md: these pages agree with the table of statistics.

They contain every key of the reports.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cbtop.protocol.attributes import NO_KERNEL, TransferAttributes
from cbtop.protocol.kernel_messages import KernelTimes
from cbtop.protocol.messages import Sampling
from cbtop.protocol.vocabulary import TransferDirection
from cbtop.reports import REPORTS
from cbtop.reports.sources import sources_json
from cbtop.viewmodels.counters import BrickCounts, CountersView
from cbtop.viewmodels.cpu_samples import FunctionShare, SampledTimeView
from cbtop.viewmodels.gradients import GradientFaultView, GradientNormView, GradientsView, LossScaleView
from cbtop.viewmodels.graph import CriticalPathView
from cbtop.viewmodels.guard import GuardFaultView, GuardView
from cbtop.viewmodels.kernels import BrickKernels, KernelRow
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.merged import MergedView, TroubledMember
from cbtop.viewmodels.serving import (
    EnginePartRow,
    LatencyView,
    LoadView,
    QueueRow,
    SchedulesView,
    ServedRow,
    ServingView,
)
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.steps import SpanView, WarmUpView
from cbtop.viewmodels.straggler import StragglerView
from cbtop.viewmodels.time_breakdown import BesideView
from cbtop.viewmodels.time_range import NamedTime
from cbtop.viewmodels.time_travel import ReplayView
from cbtop.viewmodels.traces import TraceRow, TraceView
from cbtop.viewmodels.training import TrainingBrick, TrainingPartRow, TrainingView
from tests.cbtop import made_machines, samples, seen_timelines
from tests.json_page import PAGES, PARTS, generated, main

# These objects have names as their keys: names of bricks, figures or kinds of time. So the pages do not list them.
NAMES_INSIDE = {"unknown", "provenance", "totals", "numbers", "parts_ns"}


def text_of_pages() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_the_pages_on_json_are_what_their_generator_writes() -> None:
    if os.environ.get("CBTOP_UPDATE_GOLDENS") == "1":
        main()
    text = text_of_pages()
    assert generated(text) == text, "run: python -m tests.json_page"


def test_the_pages_have_every_generated_part_once() -> None:
    assert re.findall(r"<!-- (?!end of )(.+) -->", text_of_pages()) == list(PARTS)


def test_a_changed_part_is_written_anew_and_the_rest_is_left_alone() -> None:
    name = next(iter(PARTS))
    text = f"before\n<!-- {name} -->\nold\n<!-- end of {name} -->\nafter"
    assert generated(text) == f"before\n<!-- {name} -->\n{PARTS[name]()}\n<!-- end of {name} -->\nafter"


def rich_views() -> list[SourceView]:
    """Return views of processes. Together they fill every part of a report."""
    books = samples.LIVE.books
    assert books is not None
    copies = BesideView(1, 2.0, (NamedTime("copy", 2.0),))
    kernel = KernelRow("down_kernel", 1.0, NO_KERNEL, 2.0, 0.1, 1.8, 2.2)
    node, *nodes = samples.LIVE.graph
    brick, *bricks = samples.LIVE.bricks
    numbers = SpanView(1.0, 1, 1, 9)
    copied = TransferAttributes("host", "gpu", 4096, TransferDirection.H2D)
    rich = replace(
        samples.LIVE,
        machines=(made_machines.H100,),
        steps=replace(samples.DECODE, sequences=numbers, cached=numbers),
        bricks=(replace(brick, trail=((1.0, 2.0),)), *bricks),
        warm_up=WarmUpView(3, 1_000.0, has_ended=True),
        overhead=Sampling(4, 0.5, 0.4, 0.6, 1.0),
        training=TrainingView(
            9,
            2.0,
            (TrainingPartRow("forward", 100.0, 2.0, 2.0),),
            (TrainingBrick("RmsNorm", 3.0, 1.0, 1.0, 1.0, 9.0),),
            GradientsView(
                GradientNormView(9, 1.0, 1.0, 1.0, 9, "before", is_shard=False),
                GradientFaultView("up.weight", "NaN", 9, 8, 9, 9, 1, 3),
                LossScaleView(2.0, 9, 1, 4.0, 3, 1, 0),
            ),
        ),
        serving=ServingView(
            "vLLM",
            9,
            2.0,
            (EnginePartRow("scheduler", 100.0, 2.0, 2.0),),
            3,
            LatencyView(3, 1.0, 2.0),
            LatencyView(9, 1.0, 2.0),
            LoadView(0.5, 1, 2, 40.0),
            (LoadView(0.5, 1, 2, 40.0),),
            (ServedRow(0, "a", 0.0, 1.0, 2.0, 3.0, 1.0, 32, 16, 5, 1, "stop"),),
            0,
            SchedulesView(9, 1.5, 2, 1, (QueueRow("KV cache", 50.0, 1.0, 3.0, 98.0),)),
        ),
        guard=GuardView(
            None, 90, 9, 1, GuardFaultView("NaN", "Down", "down", 2, "train", 5, 5, "finite", None, "weight", None)
        ),
        timeline=seen_timelines.timeline_at(20.0),
        baseline=samples.COMPARED.baseline,
        critical_path=CriticalPathView(1_000.0, 2, 3),
        kernels=(BrickKernels("DownProjection", "", 10, (kernel,)),),
        graph=(replace(node, transfer=copied, burst=KernelTimes(node.id, 3, 3, 2.0, 0.1, 1, 3)), *nodes),
        # In this view, half of the time is outside bricks.
        books=replace(
            books, unattributed_us=books.wall_us / 2, adopted=copies, exceeded=(NamedTime("Layer 1", 2.0),)
        ),
        outside=copies,
        counters=CountersView((BrickCounts("Down", None, 8, 2.0, 0.0, 0.1, 0.2, ipc=1.5),), "no counters", 0.1),
        sampled=(
            SampledTimeView(
                "between steps", 100, 41.0, 2.0, 2.0, (FunctionShare("f", "a.py", 3, 60, 60.0, 50.2, 69.1, 0.0, ""),)
            ),
        ),
        traces=(TraceView("MLT-01", "layers", "", 1, (), (TraceRow("Layer 0", ()),), ("a spike",)),),
        straggler=StragglerView(
            "k", 1, 2, "h", 2, "decode", 9, 2.0, 1.0, 99.0, "Down", 1.0, 3.0, 2.0, others_wait=True
        ),
    )
    troubled = MergedView(
        MergeMode.SUM, ("rank 0",), ("k",), 0, troubled=(TroubledMember("rank 1", "gone", "", None),)
    )
    others = [each for each in vars(samples).values() if isinstance(each, SourceView)]
    return [rich, replace(rich, merged=troubled), *others]


def reports() -> Iterator[Any]:
    """Yield the JSON reports of the views that fill every part of a report."""
    replay = ReplayView("run.cbtop", "host", 1.0, 2.0, 3.0, is_complete=True)
    for view in rich_views():
        yield json.loads(REPORTS["json"]([view], [], replay))
    row = replace(samples.ROWS[0], straggler=rich_views()[0].straggler)
    yield json.loads(sources_json([row, *samples.ROWS]))


def places_of(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each path of keys with its value."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            for key, inner in item.items():
                yield (*at, key), inner
                if key not in NAMES_INSIDE:
                    yield from places_of(inner, (*at, key))


def test_the_pages_name_every_key_of_every_report() -> None:
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", text_of_pages()))))
    keys = {place[-1] for report in reports() for place, _ in places_of(report)}
    assert len(keys) > 300
    assert sorted(keys - named) == []


def test_no_part_of_a_report_is_empty_in_all_rich_views() -> None:
    """The test above does not see keys inside an empty part of a report, so every part must be filled somewhere."""
    filled: dict[tuple[str, ...], bool] = {}
    for report in reports():
        for place, value in places_of(report):
            if len(place) <= 2:
                filled[place] = filled.get(place, False) or value not in (None, [], {})
    empty = {place for place, is_filled in filled.items() if not is_filled}
    numbers = {"local_rank", "range_s", "samples_per_sec", "stale_s", "window_covers_s", "clock_resolution_ns"}
    rare = {("machines", "elsewhere"), ("sources", "since_baseline"), ("sources", "withheld")}
    assert {key for _, key in empty - rare} <= numbers
