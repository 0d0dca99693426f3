"""What a screen or a report shows of one source, as frozen data: the one place both are drawn from.

A None is a number nobody measured; every output prints it as `n/a` (text) or `null` (JSON).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from cbtop.profiler import roofline
from cbtop.protocol.attributes import NO_KERNEL, KernelAttributes, TransferAttributes
from cbtop.protocol.messages import KernelTimes, Sampling, Unknown
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
from cbtop.viewmodels.on_demand import OnDemand, made, with_parts
from cbtop.viewmodels.places import Place
from cbtop.viewmodels.timeline import TimelineView

if TYPE_CHECKING:  # it is made of what stands here
    from cbtop.viewmodels.comparison import Comparison

OVERLAP = 1.05  # steps at once, on average: below it they ran one after the other


@dataclass(frozen=True, slots=True)
class SpanView:
    """What a number was in the steps that said it; of a window, the least and the most are not known."""

    mean: float
    least: int | None
    most: int | None
    steps: int


@dataclass(frozen=True, slots=True)
class PaceView:
    """The steps of a phase that ended within about a second; the first of several is of all before these."""

    ago_s: float  # before the newest of them
    steps: int
    us: float  # of one, mean
    tokens: int  # of all of them
    cached: float | None  # positions in the cache of a sequence before a step, mean; None where none says it


@dataclass(frozen=True, slots=True)
class BrickGrowth:
    """Exclusive time of a brick in a recorded step, in the first and in the last third of a window."""

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
    tokens_per_sec: float | None  # of wall-clock time, over the stretch that is shown
    recorded: int  # of them: what lies in steps is known of these
    failed: int = 0  # of them: left by an exception, as one that is cancelled is; their tokens count
    tokens_per_sec_in_steps: float | None = None  # tokens / union_us, or the stretch where that is shorter
    steps_per_sec: float | None = None  # of wall-clock time, as tokens_per_sec; of a model without tokens, too
    samples_per_sec: float | None = None  # sequences of these steps; None unless they all say how many they have
    mean_us: float | None = None
    recorded_mean_us: float | None = None  # of those whose inside was recorded
    min_us: float | None = None
    max_us: float | None = None
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    us_per_token_p50: float | None = None
    us_per_token_p99: float | None = None
    us_per_token_max: float | None = None
    union_us: float | None = None  # the time in which at least one step ran, also what of it lies before the stretch
    at_once: float | None = None  # how many of them ran then, on average: their time / union_us
    sequences: SpanView | None = None  # that a step works on
    cached: SpanView | None = None  # positions that the cache of each sequence holds before a step
    wall_us: float = 0.0  # that its rates are of, the longest of several processes; 0: not known
    is_sample: bool = False  # some that were not recorded may have left nothing: then these are not all steps
    # Of the steps: bars side by side, from the shortest to the longest.
    durations: OnDemand[tuple[DurationBar, ...]] = OnDemand(())

    @property
    def known_tokens(self) -> int | None:
        """None where no step said how many were its own."""
        return self.tokens if self.tokens or not self.count else None

    @property
    def has_tokens(self) -> bool:
        """Whether it has a rate of tokens, or no rate at all."""
        return self.tokens_per_sec is not None or self.steps_per_sec is None

    @property
    def overlap(self) -> bool:
        """Whether steps ran at the same time, by more than a clock's reading."""
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
    median: float | None = None  # of the rounds that it is the best of
    lowest: float | None = None
    measured_on: str = ""  # a moment, or only its day
    load_percent: float | None = None  # of the processors or the GPU: what others used of it meanwhile
    age_s: float | None = None
    gpu: str = ""  # its UUID; "": of the processors
    dtype: str = ""  # of a compute roof what is multiplied under it; "": floats of a kind that is not told
    rounds: int | None = None  # that it is the best of; None where that is not said

    @property
    def spread_percent(self) -> float | None:
        """How far the median round is below the best one; None where there is no more than one number."""
        return roofline.spread_percent(self.value, self.median)

    @property
    def is_unsure(self) -> bool | None:
        """Whether its rounds lie so far apart that what is made of it is; None where that is not known."""
        return roofline.is_unsure(self.value, self.median)


@dataclass(frozen=True, slots=True)
class RidgeRow:
    """Where a bandwidth reaches a compute ceiling: left of it memory is the lower roof."""

    bandwidth: str
    compute: str
    flop_per_byte: float
    gflops: float
    dtype: str = ""  # of the compute ceiling


@dataclass(frozen=True, slots=True)
class RooflineView:
    ceilings: tuple[CeilingRow, ...]
    points: tuple[BrickRow, ...]  # those that have an intensity
    without_work: tuple[str, ...]  # bricks that declare no FLOP or no bytes: they have no intensity
    note: str = ""  # why ceilings are not known, and the way out

    @property
    def ridges(self) -> tuple[RidgeRow, ...]:
        """Where each bandwidth reaches each compute ceiling."""
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
    label: str  # exactly the text the ASCII tree prints for this node, connectors left out
    category: BrickCategory | None
    backend: str
    count: int | None
    total_inclusive_us: float | None
    avg_inclusive_us: float | None
    p50_us: float | None
    p99_us: float | None
    elements: int | None  # per call, mean
    percent: float | None  # of the step's wall time
    node_label: str = ""  # the caller's own word for this place, a layer's stack
    kernel: KernelAttributes = NO_KERNEL
    on_critical_path: bool | None = None  # None: it has no exclusive time, or no path is known
    slack_us: float | None = None  # how much later it could have started without anything ending later
    transfer: TransferAttributes | None = None  # of a copy
    burst: KernelTimes | None = None  # what the last burst measured of a kernel: part of none of the times above
    place: Place | None = None  # of the places that a baseline knows; of a brick its layer's, of all that it is there

    @property
    def copied_gb_per_sec(self) -> float | None:
        """Of a copy that was timed: its bytes over the time of its mean run; derived."""
        if self.transfer is None or not self.avg_inclusive_us:
            return None
        return self.transfer.size_bytes / self.avg_inclusive_us / 1e3


@dataclass(frozen=True, slots=True)
class CriticalPathView:
    """The chain of work that decides how long a mean run of the graph takes; derived."""

    total_us: float
    nodes: int  # on it
    timed_nodes: int  # with exclusive time
    unknown: str = ""  # why there is none: then the numbers are 0


@dataclass(frozen=True, slots=True)
class NamedTime:
    name: str
    us: float


@dataclass(frozen=True, slots=True)
class BesideView:
    """Time that is no part of any step's wall time: calls, and their times added up; derived."""

    calls: int
    us: float
    by_name: tuple[NamedTime, ...]  # the longest first


@dataclass(frozen=True, slots=True)
class BooksView:
    """wall = bricks + gaps - overlap + unattributed, over the recorded steps of a phase that have ended; what follows
    stands beside it. Where bricks ran at the same time, as on two streams of a device, each counts in `bricks_us`.

    They do not `close` where a part is larger than what it is a part of: `over_us` in `over` steps, and `outdone`.
    """

    wall_us: float
    bricks_us: float
    gaps: tuple[NamedTime, ...]
    gaps_us: float
    unattributed_us: float
    residual_percent: float | None
    open_us: float  # brick time already recorded in a step that has not ended
    overlap_us: float = 0.0  # in which two of the parts ran, once for each beyond the first
    close: bool = True
    over: int = 0  # steps that what lay in them outdid
    over_us: float = 0.0  # by so much
    outdone: tuple[NamedTime, ...] = ()  # layers and bricks that what lay in them outdid, and by how much
    loose: int = 0  # calls stopped twice, out of order or after their step: in no books
    loose_us: float = 0.0
    cancelled: int = 0  # steps cancelled, or given another name inside: their bricks are in no books
    crowded: int = 0  # steps that ran beside fifteen others: whose bricks were theirs is not known
    adopted: BesideView | None = None  # done for these steps in other threads or tasks


@dataclass(frozen=True, slots=True)
class WarmUpView:
    """The steps of the warm-ups. They are in no other figure."""

    steps: int
    took_us: float
    has_ended: bool  # False: no other step has ended, so these are shown


@dataclass(frozen=True, slots=True)
class StretchView:
    """The wall-clock time that figures are of: wall = in steps + between steps + since the last one ended; derived.

    It begins with the first step that was seen, or with the window, and ends now, or with the last step of a process
    that has ended. Of a step that began before, the part in it counts. Whether one runs since the last one ended is
    not known. None: in how much of it steps ran is not known, or when the last one ended.
    """

    wall_us: float
    in_steps_us: float | None
    by_phase: tuple[NamedTime, ...]  # the time in which steps of each phase ran; some may have run at the same time
    between_us: float | None
    since_last_us: float | None
    counts_whole: bool = False  # of a step that began before, all counts: when steps ran, its daemon does not say

    @property
    def between_percent(self) -> float | None:
        return 100 * self.between_us / self.wall_us if self.between_us is not None and self.wall_us else None


@dataclass(frozen=True, slots=True)
class CompilingView:
    """Compilations in the time shown, as Dynamo tells of them, and how long they took of it.

    Of them `again` were of code that was there, and did not fit what it was called with. Those that run together are
    one.
    """

    count: int
    us: float
    again: int
    again_us: float
    wall_us: float  # the time shown


@dataclass(frozen=True, slots=True)
class LossView:
    """produced == received + dropped, always. `before_attach` is the part of `dropped` that was overwritten
    before the daemon first read the ring; `rejected` the part that named no known node; `on_the_wire` the part that
    this viewer missed and the next update brings. `unread` more are written and not read yet. `left_out` counts no
    records: so many announcements were more than the bounds allow."""

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
        """Records written since the daemon first looked."""
        return self.produced - self.before_attach

    @property
    def lost(self) -> int:
        """Those of them that are gone: what this viewer missed comes with the next update."""
        return self.dropped - self.before_attach - self.on_the_wire

    @property
    def lost_percent(self) -> float:
        """How many that are of the records since the daemon first looked; of none, none."""
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
    note: str = ""  # where in the model, and how often

    @property
    def is_of_input(self) -> bool:
        """Whether it is of what its brick is given: where it fails, what came before bears that."""
        return self.assertion.startswith(PRECONDITION)

    @property
    def is_of_step(self) -> bool:
        """Whether any brick of a step may bear that it fails."""
        return self.assertion == LOGITS_CHECK

    @property
    def about(self) -> str:
        """What fails it."""
        if self.is_of_step:
            return "a step"
        return f"the input of {self.brick}" if self.is_of_input else self.brick


@dataclass(frozen=True, slots=True)
class NamedNumber:
    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row of a trace (a layer, a brick); rows need not have the same numbers."""

    name: str
    numbers: tuple[NamedNumber, ...]


@dataclass(frozen=True, slots=True)
class TraceView:
    """One trace of the model's insides, as the traced process measured it on `forwards` sampled passes."""

    trace: str  # MLT-01 to MLT-05
    name: str
    about: str
    forwards: int
    totals: tuple[NamedNumber, ...]
    rows: tuple[TraceRow, ...]
    anomalies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClockView:
    """The clocks of a source's host less those of this one, right to within `uncertainty_us`; derived."""

    offset_us: float  # of the time of day
    monotonic_offset_us: float  # of the clock that records carry
    uncertainty_us: float


@dataclass(frozen=True, slots=True)
class WindowView:
    """The last seconds, instead of all that was seen; of a process that has ended, those before its end.

    Or a range that somebody chose.
    """

    asked_s: float
    covers_s: float  # what the numbers really are of: less where it has not been watched so long
    lost: int = 0  # records, of those seen: nothing of a merge
    seen: int = 0
    range_s: tuple[float, float] | None = None  # of a range, Unix time of its begin and its end

    @property
    def is_short(self) -> bool:
        """Whether it is less than what was asked for by more than the second in which figures come."""
        return self.range_s is None and self.covers_s < self.asked_s - 1


@dataclass(frozen=True, slots=True)
class StragglerView:
    """The rank that is busy longer with a step than each of the others, over the last five seconds; derived."""

    key: str
    rank: int
    pid: int
    host: str
    ranks: int  # compared, itself among them
    phase: str
    steps: int  # its own that were looked at
    busy_us: float  # a step, median of slices: its time outside of communication
    others_us: float  # the median of the others' medians
    percent: float  # slower than that
    brick: str  # contributes most; or its gaps
    brick_excess_us: float  # a step, over the median of the others
    step_us: float  # its whole step, communication included, median of slices
    others_step_us: float  # the median of the others' medians
    others_wait: bool  # the whole steps of all others are about as long as its own

    @property
    def waited_us(self) -> float:
        """How long another is not busy in its step: it cannot have waited for longer."""
        return max(0.0, self.others_step_us - self.others_us)


class Standstill(StrEnum):
    """How a process that runs does not go on."""

    STALLED = "stalled"  # something has run for far longer than it usually does
    SUSPENDED = "suspended"  # a signal or a debugger has stopped it
    IDLE = "idle"  # it is between two steps
    QUIET = "quiet"  # which of these is not known: `why`


@dataclass(frozen=True, slots=True)
class StallView:
    """That a process that runs has not gone on: for `age_s` nothing was recorded there, and nothing began.

    `place` is what runs since, from the step down (`decode`, `Layer 17`, `AllReduce`), of `threads` that are in
    something the one that began last; empty where none is known. `after` is what ended last in it.
    """

    word: Standstill
    age_s: float
    limit_s: float  # from which age on it is said
    place: tuple[str, ...] = ()
    phase: str | None = None  # of the step that runs
    layer: str | None = None
    brick: str | None = None
    runs_s: float | None = None  # for so long the last of `place` has; None where that is not known
    after: tuple[str, ...] = ()
    threads: int = 0
    usual_s: float | None = None  # p99 of `usual_of`; None where that is not known, or nothing to compare with
    usual_of: str = ""
    why: str = ""  # what more is known, or why that is all
    member: str = ""  # of several processes merged: whose this is


class Severity(StrEnum):
    """How bad a verdict is."""

    ERROR = "error"  # what is shown cannot be trusted, or nothing runs
    WARNING = "warning"  # time is lost that need not be
    NOTE = "note"  # what bounds it, or what a figure does not say


class About(StrEnum):
    """What a verdict is of."""

    SOURCE = "source"
    RANK = "rank"
    DEVICE = "device"
    STEPS = "steps"
    LAYER = "layer"
    BRICK = "brick"
    ROOF = "roof"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a verdict is of, by its name; of a layer also the id of its node."""

    kind: About
    name: str
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A number that a verdict rests on."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong or what limits it, why that is said, and what to do; `cbtop.viewmodels.verdicts` has them all.

    What it would gain is derived: that many tokens/s more of wall-clock time, by Amdahl's law, `gain_if` so.
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
    """One of several processes merged that is gone or does not go on."""

    name: str
    state: str
    reason: str  # why it is gone
    stall: StallView | None  # how it does not go on


@dataclass(frozen=True, slots=True)
class MergedView:
    """What a merged view was made of."""

    mode: MergeMode
    members: tuple[str, ...]  # `rank 3`, or `pid 7` for what is no rank
    keys: tuple[str, ...]
    left_out: int  # sources of that model that nothing is heard of, that are not read yet, or without room
    running: int = 0  # members that run and were watched: while there are any, the last seconds (no range) are theirs
    # Members that are gone, suspended or stalled beside the one whose state the view has; the worst first.
    troubled: tuple[TroubledMember, ...] = ()
    together: int = 1  # so many of them compute each token together, by their word: its rate is counted once
    may_share_tokens: bool = False  # they exchange what they compute, and none says whether it is of the same tokens


@dataclass(frozen=True, slots=True)
class RankColumn:
    """One rank of several side by side."""

    name: str
    key: str
    pid: int
    host: str
    rank: int | None
    steps: int | None
    step_us: float | None  # mean


@dataclass(frozen=True, slots=True)
class RankRow:
    """One brick in every rank: its exclusive time, as RanksView.unit says; derived."""

    brick: str
    category: str
    us: tuple[float | None, ...]
    slowest: int  # which of them
    spread_percent: float | None  # the slowest over the median


@dataclass(frozen=True, slots=True)
class RanksView:
    """Bricks by rank."""

    unit: str  # "step" or, for processes without steps, "call": what the times are of
    ranks: tuple[RankColumn, ...]
    rows: tuple[RankRow, ...]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One source in the list of all: who it is, how it goes on, and how much of it is known here.

    Figures of steps are of `phase`, over the `window` or all that was seen. `unknown` says why a figure is None.
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
    steps_per_sec: float | None  # of wall-clock time; derived
    window: WindowView | None
    since_s: float | None
    wall_us: float | None  # the time that the rates are of
    loss: LossView
    lag_s: float | None  # how old what is known of it is; None where it has ended, or by clocks that are not known
    clock: ClockView | None
    devices: tuple[str, ...] | None  # the GPUs it is known to be on, `cpu` for none of them
    sample_every: int
    overhead: Sampling | None
    unknown: tuple[Unknown, ...] = ()
    stale_s: float | None = None  # how long its daemon has not been heard; None while it is
    straggler: StragglerView | None = None  # of the ranks it is one of
    tokens_per_sec_history: tuple[float, ...] = ()  # as those of a SourceView
    steps_per_sec_history: tuple[float, ...] = ()
    step_us_history: tuple[float | None, ...] = ()
    rate_change: Change | None = None  # of tokens/s since the baseline

    @property
    def standing(self) -> str:
        """In one word how it is: `live` where it runs and goes on."""
        return self.stall.word if self.stall else self.state

    @property
    def rate(self) -> Rate:
        """The rate to show: of tokens, or of steps."""
        return _rate(self)

    @property
    def are_rates_least(self) -> bool:
        """Whether records of the time that the rates are of were lost: there were more steps than are known."""
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
    """What a process of cbtop's costs: 100 % is one processor. None is n/a, and `why` says the reason."""

    name: str  # `this viewer`, `daemon 812@host`
    cpu_percent: float | None
    over_s: float | None  # of so many seconds; None: of one sample of its daemon's to the next, about a second
    resident_bytes: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class ListView:
    """All sources: the live ones first, the newest of each first; and what cbtop itself costs, the viewer first."""

    keys: tuple[str, ...]
    ended: int  # so many of the last have ended
    row: Callable[[str], SourceRow]  # made when it is asked for, once
    costs: tuple[ProcessCost, ...] = ()
    is_compared: bool = False  # with a baseline

    def rows(self) -> tuple[SourceRow, ...]:
        """All of them."""
        return tuple(map(self.row, self.keys))


@dataclass(frozen=True, kw_only=True)
class SourceView:
    """Everything one profiled process shows, for one phase of its steps.

    With a `window` its steps, bricks, categories, roofline, graph and books are of those seconds; `loss`, `checks`
    and `traces` are always of all that was seen.

    What is `OnDemand` is made when it is first read, and as it is then: who keeps a view while more is taken in keeps
    it `held`.
    """

    key: str  # host:pid:start, stable for the life of the process
    pid: int
    host: str
    program: str
    state: SourceStatus
    state_reason: str
    activity: str  # what the process says it is doing ("measuring ceilings"), "" in the main loop
    activity_done: float | None  # 0..1
    model: str | None
    architecture: str | None
    backend: str | None
    quantization: str | None
    threads: int | None
    layers: int | None
    weights_bytes: int | None
    phase: str | None  # the phase shown; None when the process has no steps
    phases: tuple[StepsView, ...]
    steps: StepsView | None  # of the phase shown
    bricks: OnDemand[tuple[BrickRow, ...]] = OnDemand()  # by exclusive time, largest first
    categories: OnDemand[tuple[CategoryRow, ...]] = OnDemand()
    roofline: OnDemand[RooflineView] = OnDemand()
    graph: OnDemand[Sequence[GraphRow]] = OnDemand()
    books: BooksView | None  # None without steps
    loss: LossView
    checks: tuple[CheckRow, ...]
    tokens_per_sec_history: tuple[float, ...]  # one value per second, oldest first, at most 120
    steps_per_sec_history: tuple[float, ...] = ()  # the same of steps
    traces: OnDemand[tuple[TraceView, ...]] = OnDemand(())  # none where the process traces nothing
    window: WindowView | None = None  # None: all that was seen
    since_s: float | None = None  # Unix time at which what was seen of it began; None where that is not known
    stretch: StretchView | None = None  # None without steps, or while none has ended
    warm_up: WarmUpView | None = None  # None without such steps
    is_inside_of_all: bool = False  # bricks and layers are of all steps: the window has too few recorded ones
    compiling: CompilingView | None = None  # None where no compilation was told of, and of a merge
    rank: int | None = None  # what its launcher said
    local_rank: int | None = None
    world_size: int | None = None
    trains: bool = False  # it computes gradients between its steps
    waiting_percent: float | None = None  # of its last seconds its busiest thread had no processor; None: not known
    has_compiled: bool = False  # torch.compile compiled code of this process
    sample_every: int | None = 1  # of its steps it records one in so many; None: of several processes, each its own
    clock_resolution_ns: int | None = None  # the least by which two readings of its clock differ; None: not told
    overhead: Sampling | None = None  # what recording costs it; None where it does not measure that
    # What ran outside of every step; None where nothing did, or without steps.
    outside: OnDemand[BesideView | None] = OnDemand(None)
    stall: StallView | None = None  # None while it goes on, and where it has ended
    stale_s: float | None = None  # how long its daemon has not been heard; None while it is
    clock: ClockView | None = None  # None while no offset is known
    straggler: StragglerView | None = None  # of the ranks it is one of
    merged: MergedView | None = None  # None: one source; else `pid`, `host` and the like are its first member's
    ranks: RanksView | None = None  # with MergeMode.RANKS
    # None where everything is one sequence: all of it is critical.
    critical_path: OnDemand[CriticalPathView | None] = OnDemand(None)
    # None without layers, or of what is taken from several ranks.
    layer_times: OnDemand[LayersView | None] = OnDemand(None)
    machines: tuple[MachineView, ...] = ()  # where it runs; of several sources merged there may be several
    # Of the steps shown, in the last two minutes; none of a merge.
    pace: OnDemand[tuple[PaceView, ...]] = OnDemand(())
    brick_growth: OnDemand[tuple[BrickGrowth, ...]] = OnDemand(())  # none where the window is too short to tell
    # The mean step of each second, as the rates above; none of a merge.
    step_us_history: OnDemand[tuple[float | None, ...]] = OnDemand(())
    # Its last seconds with the baseline; None where there is none.
    baseline: OnDemand[Comparison | None] = OnDemand(None)
    verdicts: OnDemand[tuple[Verdict, ...]] = OnDemand(())  # of the stretch shown, the worst first
    # All sources, this one among them; None where nobody keeps a list.
    listed: OnDemand[ListView | None] = OnDemand(None)
    # Of the phase shown, as the last burst measured them; none without one.
    kernels: OnDemand[tuple[BrickKernels, ...]] = OnDemand(())
    # Of the last steps of all phases; None where no records are followed.
    timeline: OnDemand[TimelineView | None] = OnDemand(None)
    # Of its daemon's clock: pictures are drawn once in each. None: figures will not be followed by others.
    second: int | None = field(default=None, compare=False)

    @property
    def rate(self) -> Rate:
        """The rate to show: of tokens, or of steps."""
        return _rate(self)

    @property
    def are_rates_least(self) -> bool:
        """As in its row of the list."""
        return _are_rates_least(self)

    @property
    def failed_checks(self) -> list[CheckRow]:
        """First what bears that the others fail: what the guard met, which has looked for where it began, then what
        failed in the order in which it came to, and what is of a brick's input last."""
        failed = [check for check in self.checks if not check.passed]
        return sorted(failed, key=lambda check: (check.assertion != GUARD_CHECK, check.is_of_input))

    @property
    def standing(self) -> str:
        """In one word how it is: `live` where it runs and goes on."""
        return self.stall.word if self.stall else self.state

    @property
    def rows_of(self) -> tuple[object, ...]:
        """Whose rows these are, of which steps and stretch of time: while it is the same, they keep their places."""
        who = self.key if self.merged is None else self.merged.mode  # whose members come and go
        return who, self.phase, self.window is None

    @property
    def gpus(self) -> tuple[DeviceRow, ...]:
        """The GPUs it is known to use; the one GPU of its machine, where there is only one."""
        used = tuple(row for machine in self.machines for row in machine.gpus_of(self.key))
        all_there_are = tuple(row for machine in self.machines for row in machine.gpus)
        return used or (all_there_are if len(all_there_are) == 1 else ())

    @property
    def shares_close(self) -> bool | None:
        """Whether the bricks' shares are parts of one whole; None where there are none.

        What runs at the same time inside one step may add up to more than the step, and what is taken from several
        ranks is of several steps.
        """
        shares = [row.percent for row in self.bricks if row.percent is not None]
        return min(shares) >= 0 and sum(shares) <= 100 * (1 + 1e-9) if shares else None

    def held(self) -> SourceView:
        """The same as it is now, whatever is taken in later."""
        for row in (*self.phases, *self.bricks, *(self.layer_times.rows if self.layer_times else ())):
            made(row)
        if self.listed is not None:
            self.listed.rows()
        return made(with_parts(self, graph=tuple(self.graph), second=None))

    @property
    def moved_gb_per_sec(self) -> float | None:
        """Bytes that the bricks of the phase shown declare, of their shapes, over the wall-clock time shown: they
        move that much at least, for some declare none.

        None where none does, where not every step was recorded inside, or of several processes.
        """
        steps, stretch = self.steps, self.stretch
        known = [row.bytes for row in self.bricks if row.bytes is not None]
        if not known or steps is None or stretch is None or not stretch.wall_us or self.merged is not None:
            return None
        return sum(known) / stretch.wall_us / 1e3 if steps.recorded == steps.count else None

    @property
    def has_data(self) -> bool:
        """Whether a step has ended or, in a process that marks none, a brick."""
        return self.steps is not None or (self.phase is None and bool(self.bricks))


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """One entry in the list of sources."""

    key: str
    label: str  # program, pid@host
    state: SourceStatus
    stale_s: float | None = None  # how long its daemon has not been heard; None while it is


class Mark(StrEnum):
    """What stands out at a moment, the most urgent last."""

    PHASE = "phase"  # a process spends most of its time in another than before
    STARTED = "started"
    ENDED = "ended"
    VERDICT = "verdict"  # one begins, a warning or an error
    STALLED = "stalled"  # or suspended


@dataclass(frozen=True, slots=True)
class TimeView:
    """Where in time a screen is, in seconds from the beginning of what there is."""

    at_s: float
    duration_s: float
    marks: Mapping[int, Mark]  # by second
    chosen_s: tuple[float, float] | None = None  # the ends of a range
    is_now: bool = False  # held, and not looked back from yet


@dataclass(frozen=True, slots=True)
class ReplayView:
    """Where in which recording a screen or a report is. Times are seconds from its beginning."""

    file: str
    host: str
    recorded_s: float  # Unix time of its beginning
    at_s: float
    duration_s: float
    is_complete: bool  # closed by its recorder; else it was killed, or still writes
    is_history: bool = False  # no file, but what a daemon remembers of the last minutes
    range_s: tuple[float, float] | None = None  # shown instead of a moment
