"""The data that a screen or a report shows of one source, frozen. Both are drawn from it only.

None is a number that was not measured; outputs print it as `n/a` (text) or `null` (JSON).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from cbtop.profiler import roofline
from cbtop.protocol.attributes import NO_KERNEL, KernelAttributes, TransferAttributes
from cbtop.protocol.device_messages import Unknown
from cbtop.protocol.messages import KernelTimes, Sampling
from cbtop.protocol.vocabulary import (
    GUARD_CHECK,
    LOGITS_CHECK,
    PRECONDITION,
    BrickCategory,
    NodeKind,
    Provenance,
    SourceStatus,
)
from cbtop.viewmodels import MergeMode as MergeMode
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.categories import CategoryRow
from cbtop.viewmodels.devices import DeviceRow, MachineView
from cbtop.viewmodels.durations import DurationBar
from cbtop.viewmodels.kernels import BrickKernels
from cbtop.viewmodels.layers import LayersView
from cbtop.viewmodels.noise import Change
from cbtop.viewmodels.on_demand import Lazy, made, with_parts
from cbtop.viewmodels.places import Place
from cbtop.viewmodels.timeline import TimelineView

if TYPE_CHECKING:  # avoids an import cycle: it imports this module
    from cbtop.viewmodels.comparison import Comparison

OVERLAP = 1.05  # average number of concurrent steps; below it they count as sequential


@dataclass(frozen=True, slots=True)
class SpanView:
    """A number reported by steps. For a window, the minimum and maximum are unknown."""

    mean: float
    least: int | None
    most: int | None
    steps: int


@dataclass(frozen=True, slots=True)
class PaceView:
    """The steps of a phase that ended within about a second. The first of several covers all earlier steps."""

    ago_s: float  # before the newest one
    steps: int
    us: float  # mean per step
    tokens: int  # sum over the steps
    cached: float | None  # mean cached positions of a sequence before a step; None if not reported


@dataclass(frozen=True, slots=True)
class BrickGrowth:
    """Exclusive time of a brick per recorded step, in the first and the last third of a window."""

    name: str
    category: BrickCategory
    before_us: float
    after_us: float


@dataclass(frozen=True)
class StepsView:
    """The steps of one phase (`decode`, `prefill`): figures of whole steps, recorded inside or not."""

    phase: str
    count: int
    tokens: int
    tokens_per_sec: float | None  # wall-clock rate over the time range shown
    recorded: int  # number of steps recorded inside: only these tell about bricks
    failed: int = 0  # ended by an exception, cancelled ones included; their tokens count
    tokens_per_sec_in_steps: float | None = None  # tokens / union_us, or per time range if that is shorter
    steps_per_sec: float | None = None  # wall-clock rate like tokens_per_sec, also for models without tokens
    samples_per_sec: float | None = None  # sequences per second; None unless all steps report their sequences
    mean_us: float | None = None
    recorded_mean_us: float | None = None  # of steps recorded inside
    min_us: float | None = None
    max_us: float | None = None
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    us_per_token_p50: float | None = None
    us_per_token_p99: float | None = None
    us_per_token_max: float | None = None
    union_us: float | None = None  # time with at least one running step, including time before the range
    at_once: float | None = None  # average number of concurrent steps: their time / union_us
    sequences: SpanView | None = None  # sequences per step
    cached: SpanView | None = None  # positions in the cache of each sequence before a step
    wall_us: float = 0.0  # time base of its rates, the longest of several processes; 0: unknown
    is_sample: bool = False  # true if unrecorded steps may be missing, so that these are not all steps
    # Histogram of step times, from shortest to longest.
    durations: Lazy[tuple[DurationBar, ...]] = Lazy(())

    @property
    def known_tokens(self) -> int | None:
        """Token count, or None if no step reported any."""
        return self.tokens if self.tokens or not self.count else None

    @property
    def has_tokens(self) -> bool:
        """Whether it has a token rate, or no rate at all."""
        return self.tokens_per_sec is not None or self.steps_per_sec is None

    @property
    def overlap(self) -> bool:
        """Whether steps ran concurrently, by more than the clock's accuracy."""
        return self.at_once is not None and self.at_once >= OVERLAP


class Rate(NamedTuple):
    """The speed of a phase: tokens a second, or steps a second if tokens are not known."""

    unit: str  # tokens/s or steps/s
    per_sec: float | None
    history: tuple[float, ...]  # one value a second, as SourceView.tokens_per_sec_history


@dataclass(frozen=True, slots=True)
class CeilingRow:
    """A roof: `kind` is `bandwidth` or `cache` (GB/s), or `compute` (GFLOP/s)."""

    name: str
    kind: str
    value: float
    unit: str
    provenance: Provenance
    median: float | None = None  # of the rounds; `value` is the best one
    lowest: float | None = None
    measured_on: str = ""  # date, with or without time
    load_percent: float | None = None  # use of the processors or the GPU by others during the measurement
    age_s: float | None = None
    gpu: str = ""  # its UUID; "" for processors
    dtype: str = ""  # type multiplied under a compute roof; "" if not reported
    rounds: int | None = None  # number of rounds; None if not reported

    @property
    def spread_percent(self) -> float | None:
        """Distance of the median round below the best one, or None if there is only one number."""
        return roofline.spread_percent(self.value, self.median)

    @property
    def is_unsure(self) -> bool | None:
        """Whether its rounds differ so much that it is uncertain, or None if unknown."""
        return roofline.is_unsure(self.value, self.median)


@dataclass(frozen=True, slots=True)
class RidgeRow:
    """The point where a bandwidth reaches a compute ceiling. Left of it, memory is the limit."""

    bandwidth: str
    compute: str
    flop_per_byte: float
    gflops: float
    dtype: str = ""  # of the compute ceiling


@dataclass(frozen=True, slots=True)
class RooflineView:
    ceilings: tuple[CeilingRow, ...]
    points: tuple[BrickRow, ...]  # bricks with a known intensity
    without_work: tuple[str, ...]  # bricks that declare no FLOP or no bytes, so without intensity
    note: str = ""  # why ceilings are unknown, and what to do

    @property
    def ridges(self) -> tuple[RidgeRow, ...]:
        """The point where each bandwidth reaches each compute ceiling."""
        return tuple(
            RidgeRow(bandwidth.name, peak.name, peak.value / bandwidth.value, peak.value, peak.dtype)
            for peak in self.ceilings
            for bandwidth in self.ceilings
            if (peak.kind, bandwidth.kind) == ("compute", "bandwidth")
        )


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One node of layer → brick → kernel, in drawing order (a parent before its children)."""

    id: int
    parent: int | None
    depth: int
    kind: NodeKind
    name: str
    label: str  # the exact text of this node in the ASCII tree, without connectors
    category: BrickCategory | None
    backend: str
    count: int | None
    total_inclusive_us: float | None
    avg_inclusive_us: float | None
    p50_us: float | None
    p99_us: float | None
    elements: int | None  # mean per call
    percent: float | None  # of the step's wall time
    node_label: str = ""  # the caller's own name for this place, or a layer's stack
    kernel: KernelAttributes = NO_KERNEL
    on_critical_path: bool | None = None  # None if it has no exclusive time or no path is known
    slack_us: float | None = None  # how much later it could have started without delaying the end
    transfer: TransferAttributes | None = None  # of a copy
    burst: KernelTimes | None = None  # the last burst's times of a kernel; not part of the times above
    place: Place | None = None  # its place as in baselines: a brick with its layer

    @property
    def copied_gb_per_sec(self) -> float | None:
        """Rate of a timed copy: bytes / mean time; derived."""
        if self.transfer is None or not self.avg_inclusive_us:
            return None
        return self.transfer.size_bytes / self.avg_inclusive_us / 1e3


@dataclass(frozen=True, slots=True)
class CriticalPathView:
    """The chain of work that determines the duration of a mean run of the graph; derived."""

    total_us: float
    nodes: int  # number on the path
    timed_nodes: int  # number with exclusive time
    unknown: str = ""  # why there is no path; then all numbers are 0


@dataclass(frozen=True, slots=True)
class NamedTime:
    name: str
    us: float


@dataclass(frozen=True, slots=True)
class BesideView:
    """Time outside every step's wall time: number of calls and sum of their times; derived."""

    calls: int
    us: float
    by_name: tuple[NamedTime, ...]  # longest first


@dataclass(frozen=True, slots=True)
class TimeBreakdownView:
    """wall = bricks + gaps - overlap + unattributed, over the ended recorded steps of a phase.

    The later fields are not part of this sum. Bricks that overlap, as on two streams of a device, each count in full
    in `bricks_us`. The books do not `close` if a part exceeds its whole: `over_us` in `over` steps, and `exceeded`.
    """

    wall_us: float
    bricks_us: float
    gaps: tuple[NamedTime, ...]
    gaps_us: float
    unattributed_us: float
    residual_percent: float | None
    open_us: float  # brick time in a step that has not ended
    overlap_us: float = 0.0  # time of overlapping parts, counted once per extra part
    close: bool = True
    over: int = 0  # number of steps exceeded by their parts
    over_us: float = 0.0  # by this much
    exceeded: tuple[NamedTime, ...] = ()  # layers and bricks exceeded by their parts, and by how much
    unmatched_calls: int = 0  # calls stopped twice, out of order or after their step: not in the books
    unmatched_us: float = 0.0
    cancelled: int = 0  # cancelled or renamed steps: their bricks are not in the books
    in_shared_lane: int = 0  # steps that overlapped fifteen others: their bricks are unknown
    adopted: BesideView | None = None  # work for these steps in other threads or tasks


@dataclass(frozen=True, slots=True)
class WarmUpView:
    """The steps of the warm-ups. They are in no other figure."""

    steps: int
    took_us: float
    has_ended: bool  # False: no other step has ended, so these are shown


@dataclass(frozen=True, slots=True)
class TimeRangeView:
    """The wall-clock time of the figures: wall = in steps + between steps + since the last one ended; derived.

    It begins with the first step seen or with the window. It ends now, or with the last step of an ended process. A
    step that began earlier counts only partly. Whether a step has been running since the last one ended is unknown.
    None: it is unknown when steps ran, or when the last one ended.
    """

    wall_us: float
    in_steps_us: float | None
    by_phase: tuple[NamedTime, ...]  # time with running steps, per phase; phases may overlap
    between_us: float | None
    since_last_us: float | None
    counts_whole: bool = False  # earlier steps count in full: when steps ran is not reported

    @property
    def between_percent(self) -> float | None:
        return 100 * self.between_us / self.wall_us if self.between_us is not None and self.wall_us else None


@dataclass(frozen=True, slots=True)
class CompilingView:
    """Compilations in the time shown, as Dynamo reports them, and the time they took.

    `again` counts recompilations: code existed but did not fit its inputs. Overlapping compilations count as one.
    """

    count: int
    us: float
    again: int
    again_us: float
    wall_us: float  # the time shown


@dataclass(frozen=True, slots=True)
class LossView:
    """Counts of records; produced == received + dropped, always.

    `before_attach` is the part of `dropped` that was overwritten before the daemon first read the ring, `rejected`
    the part that named an unknown node, `on_the_wire` the part that this viewer missed and the next update brings.
    `unread` records are written but not read yet. `left_out` counts announcements (not records) beyond the limits.
    """

    produced: int
    received: int
    dropped: int
    before_attach: int
    rejected: int
    on_the_wire: int = 0
    unread: int = 0
    left_out: int = 0

    @property
    def seen(self) -> int:
        """Records written since the daemon attached."""
        return self.produced - self.before_attach

    @property
    def lost(self) -> int:
        """Those of them that are lost. Records on the wire arrive with the next update."""
        return self.dropped - self.before_attach - self.on_the_wire

    @property
    def lost_percent(self) -> float:
        """Percentage of records lost since the daemon attached."""
        return 100 * self.lost / self.seen if self.seen else 0.0


@dataclass(frozen=True, slots=True)
class CheckRow:
    brick: str
    assertion: str
    passed: bool
    max_error: float | None
    tolerance: float | None
    not_finite: str = ""
    skipped: str = ""  # why it was not evaluated
    note: str = ""  # place in the model, and number of times

    @property
    def is_of_input(self) -> bool:
        """Whether it checks the input of its brick, so that an earlier brick is the cause of a failure."""
        return self.assertion.startswith(PRECONDITION)

    @property
    def is_of_step(self) -> bool:
        """Whether any brick of a step may be the cause of a failure."""
        return self.assertion == LOGITS_CHECK

    @property
    def about(self) -> str:
        """The cause of a failure, in words."""
        if self.is_of_step:
            return "a step"
        return f"the input of {self.brick}" if self.is_of_input else self.brick


@dataclass(frozen=True, slots=True)
class NamedNumber:
    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row of a trace (a layer, a brick). Rows may have different numbers."""

    name: str
    numbers: tuple[NamedNumber, ...]


@dataclass(frozen=True, slots=True)
class TraceView:
    """One trace of model internals, measured by the process on `forwards` sampled passes."""

    trace: str  # MLT-01 to MLT-05
    name: str
    about: str
    forwards: int
    totals: tuple[NamedNumber, ...]
    rows: tuple[TraceRow, ...]
    anomalies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClockView:
    """The clocks of a source's host minus those of this one, accurate to `uncertainty_us`; derived."""

    offset_us: float  # of real time
    monotonic_offset_us: float  # of the clock used in records
    uncertainty_us: float


@dataclass(frozen=True, slots=True)
class WindowView:
    """The recent window, or a chosen range. For an ended process, the window ends with it."""

    asked_s: float
    covers_s: float  # actual time range: shorter if it was watched for less
    lost: int = 0  # records lost of those seen; 0 in a merge
    seen: int = 0
    range_s: tuple[float, float] | None = None  # Unix time of the begin and end of a chosen range

    @property
    def is_short(self) -> bool:
        """Whether it is shorter than requested by more than one second, the interval of figures."""
        return self.range_s is None and self.covers_s < self.asked_s - 1


@dataclass(frozen=True, slots=True)
class StragglerView:
    """The rank that is busy longer per step than each of the others, over the last five seconds; derived."""

    key: str
    rank: int
    pid: int
    host: str
    ranks: int  # compared, including itself
    phase: str
    steps: int  # number of its steps used
    busy_us: float  # per step, median of slices: its time outside communication
    others_us: float  # median of the others' medians
    percent: float  # slower than `others_us`
    brick: str  # the brick that contributes most, or the gaps
    brick_excess_us: float  # per step, over the median of the others
    step_us: float  # its whole step, communication included, median of slices
    others_step_us: float  # median of the others' medians
    others_wait: bool  # the whole steps of all others take about as long as its own

    @property
    def waited_us(self) -> float:
        """Time that another rank is not busy in its step: the longest it can have waited."""
        return max(0.0, self.others_step_us - self.others_us)


class StallKind(StrEnum):
    """The ways a running process makes no progress."""

    STALLED = "stalled"  # something has run for far longer than usual
    SUSPENDED = "suspended"  # stopped by a signal or a debugger
    IDLE = "idle"  # between two steps
    QUIET = "quiet"  # which of these is unknown, see `why`


@dataclass(frozen=True, slots=True)
class StallView:
    """A running process that makes no progress: for `age_s` nothing was recorded and nothing began.

    `place` is what has been running since, from the step inwards (`decode`, `Layer 17`, `AllReduce`); if several
    `threads` are running something, the one that began last. Empty if unknown. `after` is what ended last in it.
    """

    word: StallKind
    age_s: float
    limit_s: float  # reported from this age on
    place: tuple[str, ...] = ()
    phase: str | None = None  # of the running step
    layer: str | None = None
    brick: str | None = None
    runs_s: float | None = None  # how long the last part of `place` has been running; None if unknown
    after: tuple[str, ...] = ()
    threads: int = 0
    usual_s: float | None = None  # p99 of `usual_of`; None if unknown or nothing to compare with
    usual_of: str = ""
    why: str = ""  # further facts, or why nothing more is known
    member: str = ""  # in a merge: the process


class Severity(StrEnum):
    """The severity of a verdict."""

    ERROR = "error"  # the figures cannot be trusted, or nothing runs
    WARNING = "warning"  # time is wasted
    NOTE = "note"  # what limits it, or what a figure does not include


class About(StrEnum):
    """The kind of thing a verdict is about."""

    SOURCE = "source"
    RANK = "rank"
    DEVICE = "device"
    STEPS = "steps"
    LAYER = "layer"
    BRICK = "brick"
    ROOF = "roof"


@dataclass(frozen=True, slots=True)
class Subject:
    """The thing a verdict is about, by name; for a layer also the id of its node."""

    kind: About
    name: str
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A number that supports a verdict."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A problem or limit, its evidence, and advice. `cbtop.viewmodels.verdicts` has all rules.

    `gain_tokens_per_sec` is derived: the gain in wall-clock tokens/s by Amdahl's law, under the condition `gain_if`.
    """

    id: str
    severity: Severity
    sentence: str
    evidence: tuple[Evidence, ...]
    advice: str
    about: Subject
    gain_tokens_per_sec: float | None = None
    gain_if: str = ""


@dataclass(frozen=True, slots=True)
class TroubledMember:
    """A member of a merge that is gone or makes no progress."""

    name: str
    state: str
    reason: str  # why it is gone
    stall: StallView | None  # how it makes no progress


@dataclass(frozen=True, slots=True)
class MergedView:
    """The members of a merged view."""

    mode: MergeMode
    members: tuple[str, ...]  # `rank 3`, or `pid 7` without a rank
    keys: tuple[str, ...]
    left_out: int  # sources of the model that are silent, not read yet, or without room
    running: int = 0  # running members that were watched; if any, the recent window (not a range) is theirs
    # Members that are gone, suspended or stalled, besides the one with the shown state; the worst first.
    troubled: tuple[TroubledMember, ...] = ()
    together: int = 1  # members that report to compute each token together; the rate counts once
    may_share_tokens: bool = False  # they exchange results, and none reports whether tokens are shared


@dataclass(frozen=True, slots=True)
class RankColumn:
    """One of several ranks shown next to each other."""

    name: str
    key: str
    pid: int
    host: str
    rank: int | None
    steps: int | None
    step_us: float | None  # mean


@dataclass(frozen=True, slots=True)
class RankRow:
    """One brick in every rank: its exclusive time per RanksView.unit; derived."""

    brick: str
    category: str
    us: tuple[float | None, ...]
    slowest: int  # index of the rank
    spread_percent: float | None  # the slowest over the median


@dataclass(frozen=True, slots=True)
class RanksView:
    """Bricks by rank."""

    unit: str  # "step", or "call" for processes without steps: the times are per this unit
    ranks: tuple[RankColumn, ...]
    rows: tuple[RankRow, ...]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One source in the list: its identity, its state, and how much is known of it here.

    Step figures are of `phase`, over the `window` or since the start. `unknown` has the reason of each None.
    """

    key: str
    pid: int
    host: str
    program: str
    model: str | None
    rank: int | None
    local_rank: int | None
    world_size: int | None
    state: SourceStatus
    state_reason: str
    activity: str
    stall: StallView | None
    phase: str | None
    steps: StepsView | None
    steps_per_sec: float | None  # wall-clock rate; derived
    window: WindowView | None
    since_s: float | None
    wall_us: float | None  # time base of the rates
    loss: LossView
    lag_s: float | None  # age of its newest data; None if it has ended or clock offsets are unknown
    clock: ClockView | None
    devices: tuple[str, ...] | None  # the GPUs it is known to use; `cpu` if none
    sample_every: int
    overhead: Sampling | None
    unknown: tuple[Unknown, ...] = ()
    stale_s: float | None = None  # how long its daemon has been silent; None if it is not
    straggler: StragglerView | None = None  # of its job
    tokens_per_sec_history: tuple[float, ...] = ()  # as in SourceView
    steps_per_sec_history: tuple[float, ...] = ()
    step_us_history: tuple[float | None, ...] = ()
    rate_change: Change | None = None  # of tokens/s since the baseline

    @property
    def standing(self) -> str:
        """Its state in one word: `live` if it runs and makes progress."""
        return self.stall.word if self.stall else self.state

    @property
    def rate(self) -> Rate:
        """The rate to show: of tokens, or of steps."""
        return _rate(self)

    @property
    def are_rates_least(self) -> bool:
        """Whether records in the time of the rates were lost, so that there were more steps than are known."""
        return _are_rates_least(self)


def _rate(of: SourceRow | SourceView) -> Rate:
    steps = of.steps
    if steps is None or steps.has_tokens:
        return Rate("tokens/s", steps.tokens_per_sec if steps else None, of.tokens_per_sec_history)
    return Rate("steps/s", steps.steps_per_sec, of.steps_per_sec_history)


def _are_rates_least(of: SourceRow | SourceView) -> bool:
    return (of.window.lost if of.window else of.loss.lost) > 0


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """The cost of a cbtop process; 100 % is one processor. None is n/a, and `why` has the reason."""

    name: str  # `this viewer`, `daemon 812@host`
    cpu_percent: float | None
    over_s: float | None  # averaging time; None: between two samples of its daemon, about a second
    resident_bytes: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class ListView:
    """All sources, live ones first, each newest first; and the cost of cbtop itself, the viewer first."""

    keys: tuple[str, ...]
    ended: int  # number of ended ones, at the end of `keys`
    row: Callable[[str], SourceRow]  # makes a row on first access
    costs: tuple[ProcessCost, ...] = ()
    is_compared: bool = False  # with a baseline

    def rows(self) -> tuple[SourceRow, ...]:
        """Return all rows."""
        return tuple(map(self.row, self.keys))


@dataclass(frozen=True, kw_only=True)
class SourceView:
    """Everything shown of one profiled process, for one phase of its steps.

    With a `window`, its steps, bricks, categories, roofline, graph and books cover only those seconds; `loss`,
    `checks` and `traces` always cover everything.

    An `Lazy` field is made on first access, from the data at that time. To keep a view while data is added, use
    `held`.
    """

    key: str  # host:pid:start, stable for the life of the process
    pid: int
    host: str
    program: str
    state: SourceStatus
    state_reason: str
    activity: str  # reported by the process ("measuring ceilings"); "" in the main loop
    activity_done: float | None  # 0..1
    model: str | None
    architecture: str | None
    backend: str | None
    quantization: str | None
    threads: int | None
    layers: int | None
    weights_bytes: int | None
    phase: str | None  # the phase shown; None if the process has no steps
    phases: tuple[StepsView, ...]
    steps: StepsView | None  # of the phase shown
    bricks: Lazy[tuple[BrickRow, ...]] = Lazy()  # by exclusive time, largest first
    categories: Lazy[tuple[CategoryRow, ...]] = Lazy()
    roofline: Lazy[RooflineView] = Lazy()
    graph: Lazy[Sequence[GraphRow]] = Lazy()
    books: TimeBreakdownView | None  # None without steps
    loss: LossView
    checks: tuple[CheckRow, ...]
    tokens_per_sec_history: tuple[float, ...]  # one value per second, oldest first, at most 120
    steps_per_sec_history: tuple[float, ...] = ()  # the same for steps
    traces: Lazy[tuple[TraceView, ...]] = Lazy(())  # empty if the process traces nothing
    window: WindowView | None = None  # None: since the start
    since_s: float | None = None  # Unix time when its data begins; None if unknown
    time_range: TimeRangeView | None = None  # None without steps, or if none has ended
    warm_up: WarmUpView | None = None  # None without warm-ups
    is_inside_of_all: bool = False  # bricks and layers are of all steps: the window has too few recorded ones
    compiling: CompilingView | None = None  # None if no compilation was reported, and in a merge
    rank: int | None = None  # reported by its launcher
    local_rank: int | None = None
    world_size: int | None = None
    trains: bool = False  # it computes gradients between its steps
    waiting_percent: float | None = None  # recent time its busiest thread waited for a processor; None: unknown
    has_compiled: bool = False  # torch.compile compiled code of this process
    sample_every: int | None = 1  # records one step in this many; None in a merge
    clock_resolution_ns: int | None = None  # smallest difference of two clock readings; None: not reported
    overhead: Sampling | None = None  # cost of recording; None if not measured
    # Calls outside every step; None without such calls, or without steps.
    outside: Lazy[BesideView | None] = Lazy(None)
    stall: StallView | None = None  # None if it makes progress or has ended
    stale_s: float | None = None  # how long its daemon has been silent; None if it is not
    clock: ClockView | None = None  # None if no offset is known
    straggler: StragglerView | None = None  # of its job
    merged: MergedView | None = None  # None: one source; else `pid`, `host` etc. are of the first member
    ranks: RanksView | None = None  # with MergeMode.RANKS
    # None if everything is one sequence, and so all critical.
    critical_path: Lazy[CriticalPathView | None] = Lazy(None)
    # None without layers, or in a merge by maximum.
    layer_times: Lazy[LayersView | None] = Lazy(None)
    machines: tuple[MachineView, ...] = ()  # where it runs; a merge may have several
    # Pace of the steps shown in the last two minutes; empty in a merge.
    pace: Lazy[tuple[PaceView, ...]] = Lazy(())
    brick_growth: Lazy[tuple[BrickGrowth, ...]] = Lazy(())  # empty if the window is too short
    # Mean step time in each second, like the rates above; empty in a merge.
    step_us_history: Lazy[tuple[float | None, ...]] = Lazy(())
    # Recent window compared with the baseline; None without a baseline.
    baseline: Lazy[Comparison | None] = Lazy(None)
    verdicts: Lazy[tuple[Verdict, ...]] = Lazy(())  # of the time range shown, the worst first
    # All sources including this one; None without a list.
    listed: Lazy[ListView | None] = Lazy(None)
    # The phase's kernels in the last burst; empty without one.
    kernels: Lazy[tuple[BrickKernels, ...]] = Lazy(())
    # The last steps of all phases; None if no records are followed.
    timeline: Lazy[TimelineView | None] = Lazy(None)
    # Second of the daemon's clock: plots are drawn once per second. None for a view that will not be updated.
    second: int | None = field(default=None, compare=False)

    @property
    def rate(self) -> Rate:
        """The rate to show: of tokens, or of steps."""
        return _rate(self)

    @property
    def are_rates_least(self) -> bool:
        """As in SourceRow."""
        return _are_rates_least(self)

    @property
    def failed_checks(self) -> list[CheckRow]:
        """The failed checks, the likely cause first.

        First the guard's, which has located the origin, then failures in order of occurrence, and input checks last.
        """
        failed = [check for check in self.checks if not check.passed]
        return sorted(failed, key=lambda check: (check.assertion != GUARD_CHECK, check.is_of_input))

    @property
    def standing(self) -> str:
        """Its state in one word: `live` if it runs and makes progress."""
        return self.stall.word if self.stall else self.state

    @property
    def rows_of(self) -> tuple[object, ...]:
        """Identifies the rows by source, phase and kind of time range. While equal, rows keep their places."""
        who = self.key if self.merged is None else self.merged.mode  # members of a merge come and go
        return who, self.phase, self.window is None

    @property
    def gpus(self) -> tuple[DeviceRow, ...]:
        """The GPUs it is known to use; else the only GPU of its machine, if there is one."""
        used = tuple(row for machine in self.machines for row in machine.gpus_of(self.key))
        all_there_are = tuple(row for machine in self.machines for row in machine.gpus)
        return used or (all_there_are if len(all_there_are) == 1 else ())

    @property
    def shares_close(self) -> bool | None:
        """Whether the bricks' shares are parts of one whole, or None without shares.

        Work that overlaps inside a step may add up to more than the step. A merge by maximum mixes several steps.
        """
        shares = [row.percent for row in self.bricks if row.percent is not None]
        return min(shares) >= 0 and sum(shares) <= 100 * (1 + 1e-9) if shares else None

    def held(self) -> SourceView:
        """Return a view that later data does not change."""
        for row in (*self.phases, *self.bricks, *(self.layer_times.rows if self.layer_times else ())):
            made(row)
        if self.listed is not None:
            self.listed.rows()
        return made(with_parts(self, graph=tuple(self.graph), second=None))

    @property
    def moved_gb_per_sec(self) -> float | None:
        """Lower bound of memory traffic: declared bytes of the phase's bricks (from shapes) per wall-clock time.

        None if no brick declares bytes, not every step was recorded inside, or in a merge.
        """
        steps, time_range = self.steps, self.time_range
        known = [row.bytes for row in self.bricks if row.bytes is not None]
        if not known or steps is None or time_range is None or not time_range.wall_us or self.merged is not None:
            return None
        return sum(known) / time_range.wall_us / 1e3 if steps.recorded == steps.count else None

    @property
    def has_data(self) -> bool:
        """Whether a step has ended or, in a process without steps, a brick."""
        return self.steps is not None or (self.phase is None and bool(self.bricks))


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """One entry in the list of sources."""

    key: str
    label: str  # program, pid@host
    state: SourceStatus
    stale_s: float | None = None  # how long its daemon has been silent; None if it is not


class Mark(StrEnum):
    """A notable event, the most urgent last."""

    PHASE = "phase"  # the phase that takes most of the time has changed
    STARTED = "started"
    ENDED = "ended"
    VERDICT = "verdict"  # a warning or an error begins
    STALLED = "stalled"  # or suspended


@dataclass(frozen=True, slots=True)
class TimeView:
    """The position of a screen in time, in seconds from the beginning of the data."""

    at_s: float
    duration_s: float
    marks: Mapping[int, Mark]  # by second
    chosen_s: tuple[float, float] | None = None  # begin and end of a range
    is_now: bool = False  # paused, but still at the present


@dataclass(frozen=True, slots=True)
class ReplayView:
    """The position of a screen or report in a recording. Times are seconds from its beginning."""

    file: str
    host: str
    recorded_s: float  # Unix time of its beginning
    at_s: float
    duration_s: float
    is_complete: bool  # closed by its recorder; else it was killed or still writes
    is_history: bool = False  # not a file, but a daemon's history of the last minutes
    range_s: tuple[float, float] | None = None  # shown instead of a moment
