"""Texts of screens and reports. Numbers and units are written by `cbtop.units`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from cbtop.protocol.messages import BUSY_PERCENT, KernelTimes, Sampling
from cbtop.protocol.vocabulary import LAUNCH_BOUND, SourceStatus

# isort: off
from cbtop.units import (  # also available under this module's name
    NOT_MEASURED as NOT_MEASURED,
    bytes_per_second as bytes_per_second,
    count as count,
    counted as counted,
    duration as duration,
    milliseconds as milliseconds,
    number as number,
    with_article as with_article,
    percent as percent,
    percent_number as percent_number,
    si as si,
    size_bytes as size_bytes,
    whole as whole,
    with_unit as with_unit,
)

# isort: on
from cbtop.profiler.roofline import NO_ROOF, SHARED
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.comparison import Comparison
from cbtop.viewmodels.kernels import BurstView
from cbtop.viewmodels.lanes import Lane, TimelineSpan
from cbtop.viewmodels.layers import MIN_STEPS
from cbtop.viewmodels.model import (
    BesideView,
    CeilingRow,
    ClockView,
    CriticalPathView,
    LossView,
    MergedView,
    MergeMode,
    ProcessCost,
    SourceRow,
    SourceView,
    StallKind,
    StallView,
    StepsView,
    StragglerView,
    TimeBreakdownView,
    TimeRangeView,
    TroubledMember,
    Verdict,
    WarmUpView,
)
from cbtop.viewmodels.noise import Change
from cbtop.viewmodels.places import WHOLE_STEP
from cbtop.viewmodels.timeline import TimelineView

NONE_THERE = "–"

_MAX_DATE_S = 250_000_000_000  # in the year 9892; a file may contain any number
_DATE_FROM_US = 12 * 3600e6  # for older times, a time of day alone is ambiguous
_NAMED = 3  # maximum number of names in a list


def position(value_s: float) -> str:
    """Format a place in a recording: `0:07`, `1:02:07`."""
    whole = int(value_s)
    hours = f"{whole // 3600}:{whole // 60 % 60:02}" if whole >= 3600 else f"{whole // 60}"
    return f"{hours}:{whole % 60:02}"


def age(value_s: float | None) -> str:
    """Format how long ago something was measured: `40 s`, `12 min`, `5 h`, `3 days`."""
    if value_s is None:
        return NOT_MEASURED
    for unit_s, limit_s, unit in ((1, 120, "s"), (60, 7_200, "min"), (3_600, 172_800, "h")):
        if value_s < limit_s:
            return f"{value_s / unit_s:.0f} {unit}"
    return f"{value_s / 86_400:,.0f} days"


def day(moment: str) -> str:
    """Return the day of a moment such as `2026-11-22T10:30:59+01:00`."""
    return moment[: len("2026-11-22")]


def limit(row: BrickRow) -> str:
    """Format which roof bounds a brick, and the used part of it: `memory 79 %`, `? latency 12 %`."""
    if row.roof is None:
        return NOT_MEASURED
    mark = "⚠ " if row.above_roof else "? " if row.roof_unsure else ""
    word = {NO_ROOF: "latency", SHARED: "shared"}.get(row.roof.bound, row.roof.bound)
    return f"{mark}{word} {whole(row.percent_of_roof)} %"


def ceiling_rounds(row: CeilingRow) -> str:
    """Format the rounds and the load: `best of 12 rounds, median 19.00, lowest 12.50, spread 5.0 %, load 3 %`.

    A short measurement is called `short`.
    """
    of = "" if row.rounds is None else f"best of {counted(row.rounds, 'round')}, "
    unsure = ": unsure" if row.is_unsure else ""
    load = with_unit(whole(row.load_percent), "%")
    spread = f"spread {percent(row.spread_percent)}{unsure}"
    short = ", short" if row.is_short else ""
    return f"{of}median {number(row.median)}, lowest {number(row.lowest)}, {spread}, load {load}{short}"


def ceiling_doubts(ceilings: Sequence[CeilingRow]) -> list[str]:
    """Return why roofs may be inaccurate: rounds that differ much, and use by others meanwhile."""
    found = []
    if unsure := [row for row in ceilings if row.is_unsure]:
        named = ", ".join(f"{row.name} (spread {percent(row.spread_percent)})" for row in unsure)
        found.append(f"unsure: {named}")
    if busy := [row for row in ceilings if (row.load_percent or 0) >= BUSY_PERCENT]:
        most = max(row.load_percent or 0 for row in busy)
        found.append(f"may be low: others used up to {whole(most)} % of the machine meanwhile")
    return found


def without_work(names: Sequence[str]) -> str:
    """Return the bricks missing on the roofline by reason: no declared work, or their device waited for the host."""
    waited = f", {LAUNCH_BOUND}"
    silent = [name for name in names if not name.endswith(waited)]
    bound = [name.removesuffix(waited) for name in names if name.endswith(waited)]
    whys = (("no FLOP or no bytes declared", silent), (f"{LAUNCH_BOUND}, so without a rate", bound))
    return "; ".join(f"{why}: {', '.join(those)}" for why, those in whys if those)


def date(unix_s: float) -> str:
    """Format a moment in local time: `2026-03-01 12:30:59`."""
    return moment(unix_s)[:19]


def moment(unix_s: float) -> str:
    """Format a moment to the millisecond: `2026-03-01 12:30:59.123`."""
    return f"{datetime.fromtimestamp(min(max(unix_s, 0), _MAX_DATE_S)):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def seconds(value: float) -> str:
    """Format a short configured time: `0.25 s`, `5 s`."""
    return f"{value:g} s"


def shown_time(source: SourceView, *, with_date: bool = False) -> str:
    """Format the time range of figures: `last 10.4 s`, `its last 10.4 s` if it has ended, `since 20:02:11`.

    For a merge with some running members, `last 10.4 s of the 2 that run`, because its window only has those. For a
    range, `20:02:11.3–20:02:19.8, 41 steps`. For a sum, whose members have different ranges, `since 20:02:11 at the
    earliest`.
    """
    if source.window is not None and source.window.range_s is not None:
        steps = f", {count(source.steps.count)} step{'s' * (source.steps.count != 1)}" if source.steps else ""
        return f"{between(source.window.range_s, with_date=with_date)}{steps}"
    if source.window is not None:
        runs, members = (source.merged.running, len(source.merged.members)) if source.merged is not None else (0, 0)
        its = "its " if source.state in ("ended", "gone", "faulty") and not runs else ""
        whose = f" of the {runs} that run{'s' * (runs == 1)}" if 0 < runs < members else ""
        return f"{its}last {source.window.covers_s:.1f} s{whose}"
    if source.since_s is None:
        return "all that was seen"
    is_sum = source.merged is not None and source.merged.mode is MergeMode.SUM
    begun = since(source.since_s, source.time_range.wall_us if source.time_range else None, with_date=with_date)
    return f"since {begun}{' at the earliest' * is_sum}"


def between(range_s: tuple[float, float], *, with_date: bool = False) -> str:
    """Format a range in local time to the tenth: `20:02:11.3–20:02:19.8`."""
    begin, end = (moment(unix_s)[:-2] for unix_s in range_s)
    return f"{begin[0 if with_date else 11 :]}–{end[11:]}"


def since(unix_s: float, wall_us: float | None, *, with_date: bool = False) -> str:
    """Format the begin of a range: the time of day, with its day if the range is long, with its year on request."""
    is_days = wall_us is not None and wall_us >= _DATE_FROM_US
    return date(unix_s)[0 if with_date else 5 if is_days else 11 :]


def between_steps(found: TimeRangeView | None) -> str:
    """Format `between steps 49.7 % (4.97 s of 10.0 s)`, `at least` if steps count whole; "" if unknown."""
    if found is None or found.between_us is None:
        return ""
    if found.since_last_us == found.wall_us:
        return f"no step has ended in these {duration(found.wall_us)}"
    share = f"{'at least ' * found.counts_whole}{percent(found.between_percent)}"
    return f"between steps {share} ({duration(found.between_us)} of {duration(found.wall_us)})"


def time_range(source: SourceView) -> str:
    """Format `wall clock 10.0 s = in steps 5.01 s + between steps 4.97 s (49.7 %) + since the last one …`."""
    found = source.time_range
    if found is None:
        return ""
    is_sum = source.merged is not None and source.merged.mode is not MergeMode.MAX
    is_last = source.window is not None and source.window.range_s is None
    many = 0 if source.merged is None else (is_last and source.merged.running) or len(source.merged.members)
    added = f" (of {many} processes, added up)" if is_sum else ""
    wall = f"wall clock {duration(found.wall_us)}{added}"
    if found.in_steps_us is None:
        return f"{wall}: in how much of it steps ran is {NOT_MEASURED}"
    phases = ", ".join(f"{phase.name} {duration(phase.us)}" for phase in found.by_phase)
    in_steps = f"in steps {duration(found.in_steps_us)}{f' ({phases})' if len(found.by_phase) > 1 else ''}"
    names = f"; outside of steps ran {_longest(source.outside)}" if source.outside else ""
    between = f"between steps {duration(found.between_us)} ({percent(found.between_percent)}{names})"
    parts = [in_steps, between]
    if found.since_last_us is not None:
        says = f" (it says: {source.activity})" if source.activity else ""
        parts.append(f"since the last one ended {duration(found.since_last_us)}{says}")
    whole = " (a step that began before counts whole: when it ran is not known)" if found.counts_whole else ""
    return f"{wall} = {' + '.join(parts)}{whole}"


def exact(ns: int) -> str:
    """Format nanoseconds as exact microseconds: `-1,234.567 µs`."""
    whole_us, rest = divmod(abs(ns), 1000)
    return f"{'-' * (ns < 0)}{whole_us:,}.{rest:03d} µs"


def lane_sum(lane: Lane, begin_ns: int, end_ns: int) -> str:
    """Format the time of a lane between two moments: `1.35 ms = bricks 1.29 ms + unattributed 61.2 µs`."""
    parts = lane.parts_ns(begin_ns, end_ns).items()
    return f"{duration((end_ns - begin_ns) / 1e3)} = " + " + ".join(
        f"{name} {duration(ns / 1e3)}" for name, ns in parts if ns or len(parts) == 1
    )


def timeline_notes(found: TimelineView) -> list[str]:
    """Return notes on records that are not drawn, and on what is unknown of the others."""
    notes = [
        (found.unplaced, "of steps that have not ended, or whose own record is missing"),
        (found.missing, "lost on the way or overwritten: gaps there have no name"),
        (found.older, "older"),
    ]
    told = [f"{counted(number, 'record')} {what}" for number, what in notes if number]
    return [*told, "which thread ran what is not recorded"]


def rank(number: int | None, of: int | None) -> str:
    """Format `rank 3 of 8`; "" for a process without a rank."""
    if number is None:
        return ""
    return f"rank {number}" if of is None else f"rank {number} of {of}"


def straggler(found: StragglerView) -> str:
    """Format `rank 3 is 15.0 % slower, most of it in …`, the most important fact first."""
    others = "the other's is" if found.ranks == 2 else f"the median of the other {found.ranks - 1} is"
    return (
        f"rank {found.rank} is {percent(found.percent)} slower, most of it in {found.brick} "
        f"(+{duration(found.brick_excess_us)}): busy {duration(found.busy_us)} "
        f"{with_article(f'{found.phase} step')}, "
        f"{others} {duration(found.others_us)} (pid {found.pid} on {found.host})"
        f"{'' if found.others_wait else '; in their steps the others do not wait for it'}"
    )


def gain(verdict: Verdict) -> str:
    """Format the gain of fixing it: `+3.10 tokens/s if it were as fast as the median layer (derived)`."""
    more = verdict.gain_tokens_per_sec
    return "" if more is None else f"+{number(more)} tokens/s if {verdict.gain_if} (derived)"


def change(found: Change) -> str:
    """Format the change of a figure: `+10.1 % ± 1.2`, or `noise: ± 4.0 %`."""
    if found.percent is None:
        return NOT_MEASURED
    if not found.is_beyond_noise:
        return f"noise: ± {percent(found.noise_percent)}"
    return f"{found.percent:+,.1f} % ± {percent_number(found.half_percent)}"


def rate_change(found: Change) -> str:
    """Format `41.20 tokens/s, was 42.10 (noise: ± 4.0 %)`."""
    return f"{number(found.now)} tokens/s, was {number(found.before)} ({change(found)})"


def step_beside(found: Comparison, step: TimelineSpan) -> str:
    """Format `decode 11.85 ms, was 11.20 ms (+5.8 %), the baseline's median`, or why it is unknown.

    One step is not judged as slower or faster.
    """
    median_us = found.median_us(step.name, WHOLE_STEP)
    if median_us is None:
        other = "" if step.name == found.phase else f"it is no {found.phase} step, as those compared"
        return f"{step.name} n/a: {found.why_not or other or 'no median is known'}"
    us = step.duration_ns / 1e3
    off = f" ({100 * (us / median_us - 1):+,.1f} %)" if median_us else ""
    return f"{step.name} {duration(us)}, was {duration(median_us)}{off}, the baseline's median"


def baseline_rates(found: Comparison) -> list[str]:
    """Format `41.20 tokens/s, was 42.10 (noise: ± 4.0 %)`, and the same for a step."""
    parts = []
    if found.tokens_per_sec is not None:
        parts.append(rate_change(found.tokens_per_sec))
    if found.step_us is not None:
        step = found.step_us
        parts.append(f"{duration(step.now)} a step, was {duration(step.before)} ({change(step)})")
    return parts


def baseline(found: Comparison) -> str:
    """Format the time range of the baseline: `the 10.0 s before 20:02:11`, with the process if it differs."""
    base, where = found.base, found.base.surroundings
    is_other = base.key != found.now.key
    when = "" if base.ended_s is None else f" before {date(base.ended_s)[0 if is_other else 11 :]}"
    return f"the {base.covers_s:.1f} s{when}{f' of pid {where.pid} on {where.host}' if is_other else ''}"


def merged(found: MergedView) -> str:
    """Format `sum of 4: rank 0–2, rank 7`."""
    what = {MergeMode.SUM: "sum", MergeMode.MAX: "slowest", MergeMode.RANKS: "side by side"}[found.mode]
    names = _spans(found.members)
    if len(names) > 4:
        names = [*names[:3], "…", names[-1]]
    left_out = f" ({found.left_out} left out)" if found.left_out else ""
    return f"{what} of {len(found.members)}: {', '.join(names)}{left_out}"


def _spans(names: Sequence[str]) -> list[str]:
    """Join `rank 0`, `rank 1`, `rank 2` to `rank 0–2`; other names stay single."""
    found: list[tuple[str, int, int]] = []  # name of the first, the first and the last rank
    for name in names:
        kind, _, number = name.partition(" ")
        at = int(number) if kind == "rank" else -2
        if found and at >= 0 and found[-1][2] == at - 1:
            found[-1] = (*found[-1][:2], at)
        else:
            found.append((name, at, at))
    return [name if first == last else f"{name}–{last}" for name, first, last in found]


_MERGED_MEANS = {
    MergeMode.SUM: "counts, times, tokens and tokens/s are added up; the rest is of the time added up",
    MergeMode.MAX: "each brick is that of the rank it takes longest a step, its share one of that rank's own steps",
    MergeMode.RANKS: "of each brick its exclusive time in every rank; everything else is the sum of all",
}


def merged_means(merged: MergedView) -> str:
    """Return how the figures of a merge were derived."""
    means = _MERGED_MEANS[merged.mode]
    if merged.mode is MergeMode.MAX:  # all steps are those of one rank
        return means
    if merged.together > 1:
        return f"tokens/s counts once what {merged.together} ranks compute together; {means}"
    return (
        f"tokens/s is a sum, even where ranks compute the same tokens; {means}" if merged.may_share_tokens else means
    )


def critical_path(found: CriticalPathView) -> str:
    """Format `critical path 1.20 ms, 5 of 9 timed nodes (derived, of the mean run)`."""
    if found.unknown:
        return f"critical path {NOT_MEASURED}: {found.unknown}"
    nodes = f"{count(found.nodes)} of {count(found.timed_nodes)} timed nodes"
    return f"critical path {duration(found.total_us)}, {nodes} (derived, of the mean run)"


def in_burst(times: KernelTimes) -> str:
    """Format a burst's times of a kernel: `2.10 µs ± 0.05, 1 a step, in a burst of 3 steps`."""
    deviation, launches = number(times.deviation_ns / 1e3), number(times.launches / times.steps).removesuffix(".00")
    burst = f"in a burst of {counted(times.steps, 'step')}"
    return f"{number(times.mean_ns / 1e3)} µs ± {deviation}, {launches} a step, {burst}"


def burst(found: BurstView) -> list[str]:
    """Return a line for each phase of a burst: `decode: 3 steps recorded of pid 7, 8 launches a step, 12 µs in …`."""
    heads = [
        f"{phase.phase}: {counted(phase.steps, 'step')} recorded of pid {found.pid}, "
        f"{per_step(phase.launches_per_step)} launches a step, {duration(phase.us_per_step)} in kernels"
        for phase in found.phases
    ]
    return heads or [f"{counted(found.steps, 'step')} recorded of pid {found.pid}, and no kernel in them"]


def burst_notes(found: BurstView) -> list[str]:
    """Return notes on what was recorded but is not included in the numbers."""
    notes = (
        (found.unplaced, "launches in no call of a module that is known"),
        (found.lost, "records lost"),
        (found.left_out, "launches left out: too many different ones"),
    )
    return [f"{count(number)} {what}" for number, what in notes if number]


def per_step(launches: float) -> str:
    """Format launches per step, without decimals if whole: `8`, `2.7`."""
    return f"{launches:,.0f}" if launches == round(launches) else f"{launches:,.1f}"


OVERLAP = "overlap"  # in the books


def no_books(source: SourceView) -> str:
    """Return why the books have no data for this time, or ""."""
    steps = source.steps
    if steps is None or steps.recorded:
        return ""
    if not steps.count:
        return f"no {source.phase} step ended in this time"
    return f"none of {counted(steps.count, f'{source.phase} step')} of this time was recorded inside"


def books_trouble(books: TimeBreakdownView | None) -> str:
    """Return why the books do not close, and by how much: then shares of wall time may be above 100 % or below 0."""
    if books is None or books.close:
        return ""
    why = []
    if books.unattributed_us < 0:
        parts = 100 * (books.bricks_us + books.gaps_us - books.overlap_us) / books.wall_us if books.wall_us else None
        why.append(f"bricks and gaps measured {percent(parts)} of the steps' wall time")
    if books.over:
        why.append(f"in {counted(books.over, 'step')} what ran took {duration(books.over_us)} more than there was")
    if books.exceeded:
        named = ", ".join(f"{one.name} by {duration(one.us)}" for one in books.exceeded[:_NAMED])
        more = f" and {len(books.exceeded) - _NAMED} more" if len(books.exceeded) > _NAMED else ""
        why.append(f"what ran inside outdid {named}{more}")
    return f"books do not close: {'; '.join(why)}"


def books_notes(books: TimeBreakdownView | None, outside: BesideView | None) -> list[str]:
    """Return notes on time outside the books, and on missing data.

    The part before the first comma is the short form.
    """
    found = []
    if books is not None and books.adopted is not None:
        found.append(f"in other threads for these steps: {_beside(books.adopted)}, beside the wall time")
    if outside is not None:
        found.append(f"outside steps: {_beside(outside)}, in no step's wall time")
    if books is not None and books.unmatched_calls:
        calls = counted(books.unmatched_calls, "call")
        found.append(f"in no books: {duration(books.unmatched_us)} in {calls}, stopped twice, out of order or late")
    if books is not None and books.cancelled:
        steps = counted(books.cancelled, "step")
        found.append(f"in no books: bricks of {steps} cancelled or renamed inside, which the rows hold")
    if books is not None and books.in_shared_lane:
        found.append(
            f"{counted(books.in_shared_lane, 'step')} ran beside fifteen others, whose bricks are whose is not known"
        )
    return found


def _beside(found: BesideView) -> str:
    """Format `5.00 ms in 10 calls, added up (Sampling 4.00 ms, detokenize 1.00 ms)`."""
    return f"{duration(found.us)} in {counted(found.calls, 'call')}, added up ({_longest(found)})"


def _longest(found: BesideView) -> str:
    """Format `Sampling 4.00 ms, detokenize 1.00 ms`."""
    named = ", ".join(f"{one.name} {duration(one.us)}" for one in found.by_name[:_NAMED])
    return f"{named}{', …' if len(found.by_name) > _NAMED else ''}"


def sample(every: int | None) -> str:
    """Format `a sample: one step in 10`; "" if every step is recorded."""
    if every is None:
        return "a sample: some processes leave steps out"
    return f"a sample: one step in {every:,}" if every > 1 else ""


def inside_of_all(source: SourceView) -> str:
    """Return the number of recorded steps behind bricks and layers, if it is small or covers all steps; else ""."""
    steps = source.steps
    if steps is None or not steps.recorded:
        return ""
    few = f"{counted(steps.recorded, 'recorded step')}"
    if source.is_inside_of_all:
        return f"bricks and layers: of {few} since the warm-up, for these seconds have fewer than {MIN_STEPS}"
    return f"bricks and layers: of {few} only" if steps.recorded < min(MIN_STEPS, steps.count) else ""


def warm_up(found: WarmUpView) -> str:
    """Return a line about the warm-up steps."""
    line = f"warm-up: {counted(found.steps, 'step')}, {duration(found.took_us)}"
    return (
        f"{line}, in no other figure" if found.has_ended else f"{line}; figures are of these: nothing else has ended"
    )


def overhead(sampling: Sampling) -> str:
    """Format the cost of recording: `costs at least 0.62% of its steps' time (95 %: 0.41 to 0.80; …)`.

    Costs that are invisible in the process are not included, such as the model's loss of processor cache.
    """
    cost, low, high = sampling.overhead_percent, sampling.low_percent, sampling.high_percent
    allowed = f"at most {sampling.allowed_percent:g} is allowed"
    if cost is None or low is None or high is None:
        return f"what recording costs its steps is {NOT_MEASURED}: too few were compared yet ({allowed})"
    return f"recording costs at least {cost:.2f}% of its steps' time (95 %: {low:.2f} to {high:.2f}; {allowed})"


def no_bricks(view: SourceView) -> str:
    """Return why no brick is shown, and what to do.

    For example `none of the 7,000 decode steps was recorded: one in 10,000 is: recording costs …`.
    """
    steps, every = view.steps, view.sample_every
    if steps is None or not steps.count or steps.recorded or every is None or every <= 1:
        return "no brick of this phase was recorded in this time"
    way_out = "`cbtop run --overhead PERCENT` lets it cost more"
    why = f": {overhead(view.overhead)}; {way_out}" if view.overhead is not None else ""
    return f"none of the {counted(steps.count, f'{steps.phase} step')} was recorded: one in {every:,} is{why}"


def process_cost(cost: ProcessCost) -> str:
    """Format the cost of a cbtop process: `this viewer 3.4 % of a core over 10.0 s, 84.1 MB`."""
    if cost.cpu_percent is None and cost.resident_bytes is None:
        return f"{cost.name} {NOT_MEASURED}: {cost.why}"
    over = f" over {cost.over_s:.1f} s" if cost.over_s else ""
    core = NOT_MEASURED if cost.cpu_percent is None else f"{percent(cost.cpu_percent)} of a core{over}"
    why = f" ({cost.why})" if cost.why else ""
    return f"{cost.name} {core}{why}, {size_bytes(cost.resident_bytes)}"


def losses(loss: LossView) -> str:
    """Format `95,879 produced, 1,200 lost (1.3 % since the daemon looked), 300 before attach, 4 unread`."""
    share = f" ({percent(loss.lost_percent)} since the daemon looked)" if loss.lost else ""
    parts = [f"{count(loss.produced)} produced", f"{count(loss.lost)} lost{share}"]
    parts += [f"{count(loss.before_attach)} before attach", f"{count(loss.unread)} unread"]
    parts += [f"{count(loss.left_out)} announcements left out"] if loss.left_out else []
    return ", ".join(parts)


# Titles of a source's figures in the list, by their JSON keys.
SOURCE_FIGURES = {
    "model": "model",
    "tokens_per_sec": "tokens/s",
    "rate_change": "Δ",
    "steps_per_sec": "steps/s",
    "lag_s": "lag",
    "clock_offset_us": "clock",
    "devices": "on",
    "overhead_percent": "recording costs",
}


def unknown_figures(rows: Sequence[SourceRow]) -> list[str]:
    """Return each reason once: `recording costs of pid 7, pid 8: it does not measure …`."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for unknown in row.unknown:
            found.setdefault((SOURCE_FIGURES[unknown.figure], unknown.why), []).append(f"pid {row.pid}")
    return [f"{figure} of {_some(pids)}: {why}" for (figure, why), pids in found.items()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def placed_rank(row: SourceRow) -> str:
    """Format `3/8`, `3/?`; a dash for a process without a rank."""
    return NONE_THERE if row.rank is None else f"{row.rank}/{'?' if row.world_size is None else row.world_size}"


def rates_since(row: SourceRow) -> str:
    """Format the time range of its rates: `20:02:11`, `last 10.4 s`."""
    if row.window is not None and row.window.range_s is not None:
        return between(row.window.range_s)
    if row.window is not None:
        return f"last {row.window.covers_s:.1f} s"
    return NOT_MEASURED if row.since_s is None else since(row.since_s, row.wall_us)


def rate(of: SourceRow | SourceView, per_sec: float | None) -> str:
    """Format `42.1`, or `≥42.1` if records of that time were lost."""
    return f"{'≥' if of.are_rates_least and per_sec is not None else ''}{number(per_sec)}"


def throughput(of: SourceRow | SourceView, steps: StepsView) -> str:
    """Format `42.1 tokens/s`; for a model without tokens `12.5 steps/s`, or `12.5 steps/s, 100 samples/s`."""
    if steps.has_tokens:
        return f"{rate(of, steps.tokens_per_sec)} tokens/s"
    found = f"{rate(of, steps.steps_per_sec)} steps/s"
    return found if steps.samples_per_sec is None else f"{found}, {rate(of, steps.samples_per_sec)} samples/s"


def lag(row: SourceRow) -> str:
    """Format the age of its newest data: `0.1 s`; a dash if it has ended."""
    if row.state is not SourceStatus.LIVE:
        return NONE_THERE
    return NOT_MEASURED if row.lag_s is None else f"{row.lag_s:.1f} s"


def clock(found: ClockView | None) -> str:
    """Format the clock of a different host, `3.21 ms ahead ± 110.0 µs`; a dash on the same clock."""
    if found is None:
        return NOT_MEASURED
    return clock_offset(found.offset_us, found.uncertainty_us) if found.uncertainty_us else NONE_THERE


def on_devices(row: SourceRow) -> str:
    """Format `GPU 0–3`, `cpu`; a dash if it has ended."""
    if row.state is not SourceStatus.LIVE:
        return NONE_THERE
    if row.devices is None:
        return NOT_MEASURED
    return "cpu" if row.devices == ("cpu",) else f"GPU {labels(row.devices)}"


def short_overhead(sampling: Sampling | None) -> str:
    """Format the lower bound of recording's cost in steps, with its interval (95 %): `≥0.62 % (0.41–0.80)`."""
    if sampling is None or sampling.overhead_percent is None:
        return NOT_MEASURED
    low, high = sampling.low_percent, sampling.high_percent
    bounds = "" if low is None or high is None else f" ({low:.2f}–{high:.2f})"
    return f"≥{sampling.overhead_percent:.2f} %{bounds}"


def stale_sampler(sampler: str, age_s: float) -> str:
    """Format the age of device figures: `nvml has not answered for 12 s: its figures are so old`."""
    return f"{sampler} has not answered for {age_s:.0f} s: its figures are so old"


def labels(found: Sequence[str]) -> str:
    """Format `0`, `1`, `2` as `0–2`; other labels are listed one by one."""
    numbers = [int(label) for label in found if label.isdecimal()]
    if len(numbers) == len(found) > 2 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        return f"{numbers[0]}–{numbers[-1]}"
    return ", ".join(found)


def stale(seconds: float) -> str:
    """Format the age of what is shown: `nothing heard for 12 s`."""
    return f"nothing heard for {seconds:.0f} s"


def standing(view: SourceView | SourceRow) -> str:
    """Format the state of a process in capitals, with the time without progress: `LIVE`, `STALLED 32 s`, `GONE`."""
    age = f" {view.stall.age_s:.0f} s" if view.stall else ""
    return f"{view.standing.upper()}{age}"


def stall(found: StallView) -> str:
    """Format `stalled for 32 s in decode → Layer 17 → AllReduce (p99 of every decode: 12.3 ms)`."""
    place, after = " → ".join(found.place), " → ".join(found.after)
    member = f"{found.member}: " if found.member else ""
    # The process may have made no progress before it was suspended.
    standing = "suspended, without progress" if found.word is StallKind.SUSPENDED else found.word
    parts = [f"{member}{standing} for {found.age_s:.0f} s{f' in {place}' if place else ''}"]
    if after:
        parts.append(f", after {after}")
    if found.threads > 1:
        parts.append(f", begun last of {found.threads} threads or tasks that are in something")
    if found.why:
        parts.append(f": {found.why}")
    if found.usual_s is not None:
        parts.append(f" (p99 of every {found.usual_of}: {duration(1e6 * found.usual_s)})")
    return "".join(parts)


def troubled(found: TroubledMember) -> str:
    """Format `rank 2: suspended for 20 s`, `rank 3: gone: it left`."""
    if found.stall is not None:
        return stall(found.stall)
    return f"{found.name}: {found.state}{f': {found.reason}' if found.reason else ''}"


def clock_offset(offset_us: float, uncertainty_us: float) -> str:
    """Format the offset of another host's clock: `3.21 ms ahead ± 110.0 µs`."""
    direction = "ahead" if offset_us >= 0 else "behind"
    return f"{duration(abs(offset_us))} {direction} ± {duration(uncertainty_us)}"


def scientific(value: float | None) -> str:
    """Format an error or a tolerance: `1.2e-06`."""
    return NOT_MEASURED if value is None else f"{value:.1e}"
