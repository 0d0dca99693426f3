"""Viewmodels written by hand, for tests of the screen. cbtop itself does not use these viewmodels."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any

from cbtop.comparison.baseline import BrickWork, Snapshot
from cbtop.comparison.comparison import compare
from cbtop.comparison.items import PlaceTimes
from cbtop.comparison.noise import Change, Figure
from cbtop.profiler.analysis.roofline import distance
from cbtop.protocol.device_messages import Device, DeviceProcess, DeviceSample, Unknown
from cbtop.protocol.messages import Sampling
from cbtop.protocol.vocabulary import BrickCategory, DeviceKind, NodeKind, Provenance, SourceStatus
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.categories import CategoryRow
from cbtop.viewmodels.checks import CheckRow
from cbtop.viewmodels.durations import DurationBar
from cbtop.viewmodels.graph import CriticalPathView, GraphRow
from cbtop.viewmodels.lanes import Lane, Row, TimelineSpan
from cbtop.viewmodels.layers import LayerBrick, LayerRow, LayersView
from cbtop.viewmodels.loss import LossView
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.merged import MergedView, RankColumn, RankRow, RanksView
from cbtop.viewmodels.roofline import CeilingRow, RooflineView
from cbtop.viewmodels.selection import WindowView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.sources import ClockView, ListView, ProcessCost, SourceRow
from cbtop.viewmodels.stall import STEP_UNKNOWN, StallKind, StallView
from cbtop.viewmodels.steps import StepsView
from cbtop.viewmodels.straggler import StragglerView
from cbtop.viewmodels.time_breakdown import TimeBreakdownView
from cbtop.viewmodels.time_range import NamedTime, TimeRangeView
from cbtop.viewmodels.timeline import TimelineView
from cbtop.viewmodels.verdicts import judged
from tests.cbtop.made_machines import machine
from tests.cbtop.viewmodels.made_snapshots import made, with_phase

STEPS = 1_200
WALL_US = 8_450.0  # wall-clock time of one step
DISPATCH_US = 310.0
LAYERS = 10

# For each brick: name, category, µs per step, calls per step, Mflop per call, MB per call.
_BRICKS = (
    ("Embedding", BrickCategory.OTHER, 6.0, 1, None, None),
    ("RmsNorm", BrickCategory.NORM, 118.0, 21, 0.004, 0.008),
    ("QkvProjection", BrickCategory.ATTENTION, 812.0, 10, 2.36, 0.66),
    ("RopeEmbedding", BrickCategory.ATTENTION, 66.0, 10, 0.005, 0.007),
    ("KvWrite", BrickCategory.OTHER, 41.0, 10, None, None),
    ("AttentionScore", BrickCategory.ATTENTION, 402.0, 10, 0.79, 0.2),
    ("AttentionSoftmax", BrickCategory.ATTENTION, 98.0, 10, 0.02, 0.02),
    ("AttentionOutput", BrickCategory.ATTENTION, 377.0, 10, 0.79, 0.2),
    ("OutputProjection", BrickCategory.ATTENTION, 559.0, 10, 1.57, 0.44),
    ("ResidualAdd", BrickCategory.OTHER, 29.0, 20, 0.001, 0.012),
    ("GateProjection", BrickCategory.FFN, 1_288.0, 10, 7.86, 2.2),
    ("UpProjection", BrickCategory.FFN, 1_302.0, 10, 7.86, 2.2),
    ("Activation", BrickCategory.FFN, 71.0, 10, 0.02, 0.06),
    ("DownProjection", BrickCategory.FFN, 1_405.0, 10, 7.86, 3.2),
    ("LmHead", BrickCategory.OTHER, 1_497.0, 1, 50.3, 20.6),
    ("Sampling", BrickCategory.OTHER, 29.0, 1, None, None),
)
_PEAK_GFLOPS = 118.0
_BANDWIDTH_GB_S = 31.2


def _brick(
    name: str, category: BrickCategory, us: float, calls: int, mflop: float | None, mb: float | None
) -> BrickRow:
    avg = us / calls
    roof = (
        None
        if mflop is None or mb is None
        else distance(mflop / mb, mflop * 1e3 / avg, [_PEAK_GFLOPS], [_BANDWIDTH_GB_S])
    )
    return BrickRow(
        name=name,
        category=category,
        count=calls * STEPS,
        failed=0,
        total_inclusive_us=us * STEPS,
        total_exclusive_us=us * STEPS,
        avg_exclusive_us=avg,
        avg_inclusive_us=avg,
        min_us=avg * 0.91,
        max_us=avg * 4.2,
        cv=0.12,
        p50_us=avg * 0.98,
        p95_us=avg * 1.12,
        p99_us=avg * 1.41,
        p999_us=avg * 2.3,
        us_per_token=us,
        elements=1_024 * calls * STEPS,
        flops=None if mflop is None else mflop * 1e6 * calls * STEPS,
        bytes=None if mb is None else mb * 1e6 * calls * STEPS,
        gflops=None if mflop is None else mflop * 1e3 / avg,
        gb_per_sec=None if mb is None else mb * 1e3 / avg,
        percent=100 * us / WALL_US,
        budget_us_per_token=None,
        checks_passed={"QkvProjection": 2, "DownProjection": 1}.get(name, 0),
        checks_failed=0,
        backend="numba",
        roof=roof,
        durations=_durations(avg),
        trend_us=tuple(None if second == 40 else us * (1 + 0.05 * (second % 7)) for second in range(60)),
    )


def _durations(avg_us: float) -> tuple[DurationBar, ...]:
    """Return a histogram of durations with two modes and a tail. Each bar is an eighth of an octave wide."""
    counts = (1, 40, 610, 320, 25, 0, 3, 90, 85, 14, 2, 0, 0, 1, 0, 0, 0, 2, 0, 1)
    edges = [0.9 * avg_us * 2 ** (at / 8) for at in range(len(counts) + 1)]
    return tuple(DurationBar(*edge, count) for edge, count in zip(pairwise(edges), counts, strict=True))


BRICKS = tuple(sorted((_brick(*row) for row in _BRICKS), key=lambda row: -row.total_exclusive_us))
BRICKS_US = sum(row.total_exclusive_us for row in BRICKS) / STEPS


def _category(category: BrickCategory) -> CategoryRow:
    rows = [row for row in BRICKS if row.category == category]
    total, calls = sum(row.total_exclusive_us for row in rows), sum(row.count for row in rows)
    return CategoryRow(
        name=category.display_name,
        category=category,
        count=calls,
        total_exclusive_us=total,
        avg_exclusive_us=total / calls,
        exclusive_us_per_token=total / STEPS,
        percent=100 * total / STEPS / WALL_US,
    )


CEILINGS = (
    CeilingRow("DRAM read", "bandwidth", _BANDWIDTH_GB_S, "GB/s", Provenance.MEASURED),
    CeilingRow("FMA f32", "compute", _PEAK_GFLOPS, "GFLOP/s", Provenance.MEASURED),
)


def _graph() -> tuple[GraphRow, ...]:
    rows: list[GraphRow] = []

    def add(parent: int | None, depth: int, kind: NodeKind, name: str, label: str, brick: BrickRow | None) -> int:
        timed = brick is not None and kind is NodeKind.BRICK
        avg_us = brick.avg_inclusive_us if brick and timed else 691.5 if kind is NodeKind.LAYER else None
        rows.append(
            GraphRow(
                id=len(rows) + 1,
                parent=parent,
                depth=depth,
                kind=kind,
                name=name,
                label=label,
                category=brick.category if brick else None,
                backend="numba" if brick else "",
                count=STEPS if kind is not NodeKind.KERNEL else None,
                total_inclusive_us=None if avg_us is None else avg_us * STEPS,
                avg_inclusive_us=avg_us,
                p50_us=brick.p50_us if brick and timed else 688.0 if kind is NodeKind.LAYER else None,
                p99_us=brick.p99_us if brick and timed else 803.1 if kind is NodeKind.LAYER else None,
                elements=1_024 if timed else None,
                percent=8.2 if kind is NodeKind.LAYER else None if avg_us is None else 100 * avg_us / WALL_US,
                place=None if kind is NodeKind.KERNEL else (brick.key if brick else None, layer_name),
            )
        )
        return len(rows)

    in_layers = [row for row in BRICKS if row.count >= LAYERS * STEPS]
    for layer in range(LAYERS):
        layer_name = f"Layer {layer}"
        at = add(None, 0, NodeKind.LAYER, layer_name, layer_name, None)
        for brick in in_layers:
            label = f"{brick.name}  {brick.avg_inclusive_us:.1f}µs (1024 elem)"
            child = add(at, 1, NodeKind.BRICK, brick.name, label, brick)
            kernel = f"{brick.name.lower()}_kernel"
            add(child, 2, NodeKind.KERNEL, kernel, f"{kernel}  numba", brick)
    return tuple(rows)


PREFILL_STEPS, PREFILL_US = 4, 812_000.0
IN_STEPS_US = WALL_US * STEPS + PREFILL_US * PREFILL_STEPS
SEEN_US = 1.05 * IN_STEPS_US


def _layers(layers: int = LAYERS, slow: int = 4) -> LayersView:
    """Return layers that are equal, except that Down takes three times as long in layer `slow`."""
    bricks = [row for row in BRICKS if row.count >= LAYERS * STEPS]

    def row(layer: int) -> LayerRow:
        cells = tuple(
            brick.total_exclusive_us / STEPS / LAYERS
            * (3.0 if (layer, brick.name) == (slow, "DownProjection") else 1.0 + 0.02 * ((7 * layer) % 5))
            for brick in bricks
        )  # fmt: skip
        return LayerRow(
            id=_graph_layers()[layer] if layers == LAYERS else 1_000 + layer,
            name=f"Layer {layer}",
            index=str(layer),
            stack="",
            us=sum(cells) + 31.0,
            p50_us=(sum(cells) + 31.0) * 0.99,
            cells=cells,
            between_us=31.0,
            calls=1.0,
            median_us=700.0,
            excess=("DownProjection", 281.0) if layer == slow else None,
            p50_cells=tuple(0.98 * us for us in cells),
        )

    return LayersView(
        "step", tuple(LayerBrick(brick.name, brick.category) for brick in bricks), tuple(map(row, range(layers)))
    )


def _graph_layers() -> list[int]:
    return [row.id for row in _graph() if row.kind is NodeKind.LAYER]


def _steps(phase: str, count: int, tokens: int, wall_us: float) -> StepsView:
    per_token = wall_us * count / tokens
    return StepsView(
        phase=phase,
        count=count,
        tokens=tokens,
        tokens_per_sec=1e6 * tokens / SEEN_US,
        tokens_per_sec_in_steps=1e6 / per_token,
        recorded=count,
        mean_us=wall_us,
        min_us=wall_us * 0.96,
        max_us=wall_us * 1.4,
        p50_us=wall_us * 0.99,
        p95_us=wall_us * 1.06,
        p99_us=wall_us * 1.22,
        us_per_token_p50=per_token * 0.99,
        us_per_token_p99=per_token * 1.22,
        us_per_token_max=per_token * 1.4,
        union_us=wall_us * count,
        at_once=1.0,
    )


DECODE = _steps("decode", STEPS, STEPS, WALL_US)
PREFILL = _steps("prefill", PREFILL_STEPS, 2_048, PREFILL_US)

CHECKS = (
    CheckRow("QkvProjection", "equals the NumPy reference", True, 1.2e-6, 1e-3),
    CheckRow("QkvProjection", "finite", True, None, None),
    CheckRow("DownProjection", "equals the NumPy reference", True, 3.1e-6, 1e-3),
)

LIVE = SourceView(
    key="buildbox:4242:1",
    pid=4242,
    host="buildbox",
    program="cbtop demo",
    state=SourceStatus.LIVE,
    state_reason="",
    activity="",
    activity_done=None,
    model="demo-qwen2",
    architecture="qwen2",
    backend="numba",
    quantization="Q4_K_M",
    threads=2,
    layers=LAYERS,
    weights_bytes=78_200_000,
    phase="decode",
    phases=(DECODE, PREFILL),
    steps=DECODE,
    bricks=BRICKS,
    categories=tuple(map(_category, sorted({row.category for row in BRICKS}))),
    roofline=RooflineView(
        ceilings=CEILINGS,
        points=tuple(row for row in BRICKS if row.flops is not None),
        without_work=("KvWrite", "Sampling", "Embedding"),
    ),
    graph=_graph(),
    layer_times=_layers(),
    books=TimeBreakdownView(
        wall_us=WALL_US * STEPS,
        bricks_us=BRICKS_US * STEPS,
        gaps=(NamedTime("dispatch", DISPATCH_US * STEPS),),
        gaps_us=DISPATCH_US * STEPS,
        unattributed_us=(WALL_US - BRICKS_US - DISPATCH_US) * STEPS,
        residual_percent=100 * (WALL_US - BRICKS_US - DISPATCH_US) / WALL_US,
        open_us=0.0,
    ),
    loss=LossView(produced=208_000, received=208_000, dropped=0, before_attach=0, rejected=0),
    checks=CHECKS,
    tokens_per_sec_history=tuple(
        82.0 + 6 * ((index * 7) % 11) / 11 - (30 if index == 40 else 0) for index in range(90)
    ),
    since_s=datetime(2026, 3, 1, 20, 2, 11).timestamp(),
    time_range=TimeRangeView(
        wall_us=SEEN_US,
        in_steps_us=IN_STEPS_US,
        by_phase=(NamedTime("decode", WALL_US * STEPS), NamedTime("prefill", PREFILL_US * PREFILL_STEPS)),
        between_us=SEEN_US - IN_STEPS_US - 3_000.0,
        since_last_us=3_000.0,
    ),
)


def row_of(view: SourceView, **changes: Any) -> SourceRow:
    """Return the row of a process in the list of processes. `changes` replaces some of its fields."""
    row = SourceRow(
        key=view.key, pid=view.pid, host=view.host, program=view.program, model=view.model, rank=view.rank,
        local_rank=None, world_size=view.world_size, state=view.state, state_reason=view.state_reason,
        activity=view.activity, stall=view.stall, phase=view.phase, steps=view.steps, steps_per_sec=83.2,
        window=view.window, since_s=view.since_s, wall_us=SEEN_US, loss=view.loss, lag_s=0.14,
        clock=ClockView(0, 0, 0), devices=("cpu",), sample_every=1, overhead=None,
        unknown=(Unknown("overhead_percent", "it does not measure that: under `cbtop run` it does"),),
    )  # fmt: skip
    return replace(row, **changes)


def list_of(*rows: SourceRow, costs: tuple[ProcessCost, ...] = ()) -> ListView:
    """Return the list of processes with these rows. Ended processes must come last."""
    ended = sum(row.state != "live" for row in rows)
    return ListView(tuple(row.key for row in rows), ended, {row.key: row for row in rows}.__getitem__, costs)


_ENDED: dict[str, Any] = {"lag_s": None, "devices": None}
ALONE = row_of(LIVE)
ROWS = (
    ALONE,
    *(
        row_of(
            LIVE, key=f"rank{at}", pid=7000 + at, host="gpubox", program="serve.py", model="Qwen2.5-7B", rank=at,
            world_size=2, devices=(str(at),), clock=ClockView(-3_210.4, 88.0, 110.0), lag_s=0.3 + at, unknown=(),
            sample_every=20, overhead=Sampling(20, 0.62, 0.41, 0.8, 1.0),
            loss=LossView(2_000_000, 1_988_000, 12_000 if at else 0, 4_000 if at else 0, 0, unread=120 * at),
        )
        for at in range(2)
    ),
    row_of(LIVE, key="stuck", pid=4300, program="hangs.py", steps=None, steps_per_sec=None, phase=None, model=None,
           stall=StallView(StallKind.STALLED, 32.4, 2.0, ("decode", "Layer 17", "AllReduce")), devices=None,
           unknown=(Unknown("model", "it announces none"), Unknown("steps_per_sec", "it has marked no step"),
                    Unknown("devices", "its daemon's samplers have not told it"))),
    row_of(LIVE, key="done", pid=4100, program="bench.py", state=SourceStatus.ENDED, state_reason="exit", **_ENDED),
    row_of(LIVE, key="killed", pid=4101, program="train.py", state=SourceStatus.GONE,
           state_reason="the process is gone without a goodbye", **_ENDED,
           loss=LossView(9_000, 8_100, 900, 0, 0)),
)  # fmt: skip
COSTS = (
    ProcessCost("this viewer", 3.42, 10.0, 84.1e6),
    ProcessCost("daemon 812@buildbox", 1.21, None, 40.3e6),
    ProcessCost("daemon 99@gpubox", None, None, None, "nothing was heard of it for 5 s"),
)
SEVERAL = list_of(*ROWS, costs=COSTS)
LIVE = replace(LIVE, listed=SEVERAL)

DEEP = replace(LIVE, layer_times=_layers(80, slow=57))
_COMPARED_ROWS = (
    replace(ROWS[0], rate_change=Change(before=94.9, now=85.36, half=1.6)),
    replace(ROWS[1], rate_change=Change(before=85.1, now=85.36, half=2.0)),
    *(replace(row, unknown=(*row.unknown, Unknown("rate_change", "it marks no steps"))) for row in ROWS[2:]),
)


def _with_work(snapshot: Snapshot, more: float) -> Snapshot:
    """Return the snapshot with median times. The work (flops) of its DownProjection is multiplied by `more`."""
    times = snapshot.phases[0].times
    assert times is not None
    work = {}
    for row in BRICKS:
        if row.flops is not None and row.gflops is not None and row.intensity is not None:
            factor = more if row.name == "DownProjection" else 1.0
            work[row.key] = BrickWork(factor * row.flops / STEPS, row.intensity, factor * row.gflops)
    places = {
        place: PlaceTimes(replace(one.time, median_us=one.time.mean), one.time, calls=Figure(1.0, 0.0, 20))
        for place, one in times.places.items()
    }
    step_us = replace(times.step_us, median_us=times.step_us.mean)
    return with_phase(snapshot, times=replace(times, work=work, places=places, step_us=step_us))


# Two comparisons with a baseline: a slower DownProjection (20 % in Layer 5), and a batch that cannot be compared.
COMPARED = judged(
    replace(
        LIVE,
        baseline=compare(
            _with_work(made(1, layers=LAYERS), 1.5), _with_work(made(2, layers=LAYERS, slower=1.2), 1.0), "decode"
        ),
        listed=replace(list_of(*_COMPARED_ROWS, costs=COSTS), is_compared=True),
    )
)
UNLIKE = replace(LIVE, baseline=compare(with_phase(made(1), sequences=4.0), made(2), "decode"))

RECENT = replace(LIVE, window=WindowView(asked_s=10.0, covers_s=10.4))

PREFILLING = replace(LIVE, phase="prefill", steps=PREFILL)

CHECKED = replace(
    LIVE,
    bricks=tuple(
        replace(
            row,
            checks_passed=2 if row.name == "QkvProjection" else 1 if row.name == "DownProjection" else 0,
            budget_us_per_token={"QkvProjection": 900.0, "DownProjection": 1_300.0}.get(row.name),
        )
        for row in BRICKS
    ),
)

COMPILING = replace(
    LIVE,
    activity="compiling kernels",
    activity_done=0.43,
    phase=None,
    phases=(),
    steps=None,
    bricks=(),
    categories=(),
    roofline=RooflineView((), (), ()),
    graph=(),
    layer_times=None,
    books=None,
    loss=LossView(0, 0, 0, 0, 0),
    checks=(),
    tokens_per_sec_history=(),
)

GONE = replace(
    LIVE,
    state="gone",
    state_reason="the process is gone without a goodbye",
    loss=LossView(produced=208_000, received=206_500, dropped=1_500, before_attach=300, rejected=0),
)

NO_ROOF = replace(
    LIVE,
    bricks=tuple(replace(row, roof=None) for row in BRICKS),
    roofline=RooflineView(
        ceilings=(),
        points=tuple(replace(point, roof=None) for point in LIVE.roofline.points),
        without_work=("KvWrite",),
    ),
)

_FACTORS = (1.0, 0.98, 1.15, 1.01)  # factors on the time of a step in four ranks
SIDE_BY_SIDE = replace(
    LIVE,
    merged=MergedView(MergeMode.RANKS, tuple(f"rank {at}" for at in range(4)), (), left_out=0),
    ranks=RanksView(
        "step",
        tuple(
            RankColumn(f"rank {at}", f"k{at}", 4242 + at, "buildbox", at, STEPS, WALL_US * factor)
            for at, factor in enumerate(_FACTORS)
        ),
        tuple(
            RankRow(
                row.name,
                row.category.display_name,
                tuple(row.total_exclusive_us / STEPS * factor for factor in _FACTORS),
                2,
                14.4,
            )
            for row in BRICKS
        ),
    ),
)
SLOWEST = replace(
    LIVE,
    bricks=tuple(replace(row, rank="rank 2") for row in BRICKS),
    books=None,
    graph=(),
    layer_times=None,
    merged=MergedView(MergeMode.MAX, tuple(f"rank {at}" for at in range(64)), (), left_out=1),
)
STRAGGLING = replace(
    LIVE,
    rank=0,
    world_size=8,
    straggler=StragglerView(
        "k",
        5,
        4247,
        "buildbox",
        8,
        "decode",
        96,
        4_600.0,
        4_000.0,
        15.0,
        "DownProjection",
        580.0,
        5_000.0,
        5_000.0,
        others_wait=True,
    ),
)
STALE = replace(LIVE, stale_s=12.0)
STALLED = replace(
    LIVE,
    stall=StallView(
        StallKind.STALLED,
        age_s=32.4,
        limit_s=2.0,
        place=("decode", "Layer 17", "AllReduce"),
        phase="decode",
        layer="Layer 17",
        brick="AllReduce",
        runs_s=32.4,
        threads=1,
        usual_s=0.0103,
        usual_of="decode",
    ),
)
SUSPENDED = replace(LIVE, stall=StallView(StallKind.SUSPENDED, 6.1, 2.0, ("decode",), "decode", threads=1))
IDLE = replace(LIVE, stall=StallView(StallKind.IDLE, 32.4, 2.0, why="no step runs"))
QUIET = replace(
    LIVE,
    stall=StallView(
        StallKind.QUIET,
        32.4,
        8.1,
        usual_s=0.81,
        usual_of="step of the slowest phase",
        why=STEP_UNKNOWN,
    ),
)
STALLED_IN_A_SUM = replace(
    STALLED,
    merged=MergedView(MergeMode.SUM, ("rank 0", "rank 1"), (), left_out=0),
    stall=replace(STALLED.stall, member="rank 1") if STALLED.stall else None,
)

# In this graph, the softmax runs at the same time as the projections.
OVERLAPPED = replace(
    LIVE,
    graph=tuple(
        replace(
            row, on_critical_path=row.name != "AttentionSoftmax", slack_us=71.4 * (row.name == "AttentionSoftmax")
        )
        if row.kind is NodeKind.BRICK
        else row
        for row in LIVE.graph
    ),
    critical_path=CriticalPathView(8_052.0, nodes=110, timed_nodes=120),
)

HOSTILE_NAMES = (
    "[red]x[/]",
    "[@click=app.quit]press me[/]",
    "long" * 200,
    "注意力投影層的名字",
    "🚀🔥 emoji",
    "tab\tnew\nline\x1b[31mred",
    "",
)

HOSTILE_LANES = (
    Lane(
        "steps",
        HOSTILE_NAMES,
        (
            Row(
                "bricks",
                tuple(
                    TimelineSpan(100 * at, 100, 0, at + 1, name, NodeKind.BRICK, BrickCategory.FFN, (name,), name, 1)
                    for at, name in enumerate(HOSTILE_NAMES)
                ),
            ),
        ),
        (),
        0,
    ),
)

HOSTILE = replace(
    LIVE,
    timeline=TimelineView(
        begin_ns=0,
        length_ns=100 * len(HOSTILE_NAMES),
        lanes=HOSTILE_LANES,
        newest_lanes=HOSTILE_LANES,
        newest=None,
        newest_s=None,
        spans=len(HOSTILE_NAMES),
        older=0,
        unplaced=0,
        missing=0,
        steps=0,
    ),
    machines=(
        machine(
            *(
                DeviceSample(
                    name or "x",
                    1,
                    trouble=name,
                    devices=(
                        Device(
                            name,
                            DeviceKind.GPU,
                            0,
                            name,
                            utilization_percent=1.0,
                            slowed_by=name,
                            processes=(DeviceProcess(at, 0, name),),
                            unknown=(Unknown(name, name),),
                        ),
                        Device(name, DeviceKind.MIG, 1, name, trouble=name),
                    ),
                )
                for at, name in enumerate(HOSTILE_NAMES[:4])
            )
        ),
    ),
    listed=list_of(
        *(
            row_of(
                LIVE,
                key=name or "x",
                program=name,
                model=name,
                host=name,
                state_reason=name,
                activity=name,
                unknown=(Unknown("model", name),),
                devices=(name,),
            )
            for name in ("[bold]prog[/]\x1b]0;title\x07", *HOSTILE_NAMES)
        ),
        costs=(ProcessCost("daemon \x1b[31m[red]", 1.0, None, None, "\x07"),),
    ),
    program="[bold]prog[/]\x1b]0;title\x07",
    model="[link=http://x]m",
    state_reason="[/]",
    bricks=tuple(replace(row, name=name) for row, name in zip(BRICKS, HOSTILE_NAMES, strict=False)),
    roofline=replace(
        LIVE.roofline,
        points=tuple(
            replace(point, name=name) for point, name in zip(LIVE.roofline.points, HOSTILE_NAMES, strict=False)
        ),
        without_work=HOSTILE_NAMES,
        ceilings=tuple(replace(ceiling, name="[red]roof[/]") for ceiling in CEILINGS),
    ),
    graph=tuple(
        replace(row, name=name, label=name, parent=None) for row, name in zip(LIVE.graph, HOSTILE_NAMES, strict=False)
    ),
)
