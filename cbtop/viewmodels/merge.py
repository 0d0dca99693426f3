"""Merge several sources into one view: their sum, each brick's slowest rank, or all ranks in columns. Every figure of
a merge is derived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from math import inf
from operator import attrgetter
from statistics import median

import numpy as np

from cbtop.client.source_record import SourceRecord
from cbtop.client.window import TimeRange, Window
from cbtop.profiler.analysis.graph.node_table import MAX_NODES, NodeTable
from cbtop.profiler.analysis.histograms import BUCKETS, Column
from cbtop.profiler.analysis.node_columns import COLUMNS
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.messages import Dependency, Node, SourceState
from cbtop.protocol.vocabulary import BrickCategory, SourceStatus
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.categories import CategoryRow
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.merged import MergedView, RankColumn, RankRow, RanksView, TroubledMember
from cbtop.viewmodels.roofline import RooflineView, roofline
from cbtop.viewmodels.selection import shown, state_of, window_view
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.stall import StallKind, StallView, stall_view
from cbtop.viewmodels.steps import StepsView, steps_per_sec_history, tokens_per_sec_history
from cbtop.viewmodels.straggler import job_of
from cbtop.viewmodels.time_range import NamedTime, TimeRangeView, since_s, time_range_of

KEYS_JOINED_BY = "+"  # text between the keys of the members in the key of a merge

# Returns the properties of a node that do not depend on the process. Nodes of two processes are merged if these
# properties are equal and if the parents of the nodes are merged.
_static = attrgetter(*(f.name for f in fields(Node) if f.name not in ("id", "parent", "function")))

# States of processes from good to bad. A merge is in the worst state of its members.
_BAD: tuple[SourceStatus | StallKind, ...] = (
    SourceStatus.LIVE,
    StallKind.IDLE,
    StallKind.QUIET,
    SourceStatus.ENDED,
    StallKind.SUSPENDED,
    StallKind.STALLED,
    SourceStatus.GONE,
    SourceStatus.FAULTY,
)


def merged_view(
    records: Sequence[SourceRecord], mode: MergeMode, phase: str | None = None, *, window: bool = False
) -> SourceView:
    """Return one view of `records`, sources of one program and model.

    Mode `sum` adds up counts, times, tokens and histograms of nodes that several members have. The parts of the time
    breakdown still add up, and percentiles are over all calls. If members report that they compute the same tokens
    together, rates count these tokens once.

    Mode `max` takes each brick from the rank in which it has the longest time per step. Mode `ranks` shows the sum,
    and the time of every brick in each rank.
    """
    ordered = sorted(records, key=_by_rank)
    summed, taken = _sum(ordered)
    window = window and summed.window.has_watched
    together = _together(taken)
    view = source_view(summed, phase, window=window)
    view = _with_rates(view, _watched(taken) if window else taken, together, window=window)
    names = _names(taken)
    running = sum(record.window.has_watched and not record.has_ended for record in taken)
    keys = tuple(record.key for record in taken)
    merged = MergedView(mode, tuple(names.values()), keys, left_out=len(ordered) - len(taken), running=running)
    exchange = any(row.category is BrickCategory.COMMUNICATION for row in view.categories)
    may_share = exchange and not any(record.manifest and record.manifest.ranks for record in taken)
    merged = replace(merged, troubled=tuple(_troubled(taken)), together=together, may_share_tokens=may_share)
    # A roof belongs to one machine, so a merge has none.
    factors = {record.sample_every for record in taken}
    plain = replace(
        view,
        window=view.window and replace(view.window, range_s=_range_of(_watched(taken))),
        roofline=_no_roof(view.bricks),
        rank=None,
        local_rank=None,
        sample_every=factors.pop() if len(factors) == 1 else None,
        clock_resolution_ns=None,
        overhead=None,
        merged=merged,
        stall=_stall_of_worst(taken),
    )
    if mode is MergeMode.SUM:
        return plain
    views = [(names[record.key], source_view(record, view.phase, window=window)) for record in taken]
    # Leave out sources that have not run this phase, because their views would show another.
    members = [(name, member) for name, member in views if member.phase == view.phase]
    return _slowest(plain, members) if mode is MergeMode.MAX else replace(plain, ranks=_ranks(view, members))


def _range_of(records: Sequence[SourceRecord]) -> tuple[float, float] | None:
    """Return the time from the first range's begin to the last one's end. None without ranges."""
    windows = [window_view(record, found) for record in records if (found := shown(record, window=True).window)]
    ranges = [window.range_s for window in windows if window.range_s is not None]
    return (min(begin_s for begin_s, _ in ranges), max(end_s for _, end_s in ranges)) if ranges else None


def members_of(record: SourceRecord, records: Iterable[SourceRecord]) -> list[SourceRecord]:
    """Return the members of `records` that can be merged with `record`.

    They have the same model, program and state. A killed process is merged with processes that ran at the same time,
    so that the loss is visible. Of a job, the newest process of each rank is returned, in any state. If two processes
    of a rank ran at the same time, both are returned, because they are from two jobs that look equal.
    """
    job = job_of(record)
    if job is None:
        alike = [other for other in records if job_of(other) is None and _what_runs(other) == _what_runs(record)]
        return [other for other in alike if other is record or _go_together(record, other)]
    ranks: dict[int | None, list[SourceRecord]] = {}
    for other in records:
        if other.hello is not None and job_of(other) == job:
            ranks.setdefault(other.hello.rank, []).append(other)
    return [member for alike in ranks.values() for member in _in_their_place(alike)]


def _in_their_place(alike: list[SourceRecord]) -> list[SourceRecord]:
    """Return the running processes of a rank. If none runs, return the ones that no later process has replaced."""
    run = [record for record in alike if not record.has_ended]
    last_ns = max((record.hello.realtime_ns for record in alike if record.hello), default=0)
    return run or [record for record in alike if last_ns <= _ended_at_ns(record)]


def _ended_at_ns(record: SourceRecord) -> float:
    """Return when the last step of an ended process ended, as Unix time of its host. Without steps, when the process
    began.
    """
    if record.hello is None:
        return inf
    return record.hello.realtime_ns + max(0, _ran_until_ns(record) - record.hello.monotonic_ns)


def _what_runs(record: SourceRecord) -> tuple[str, str]:
    hello, manifest = record.hello, record.manifest
    return hello.program if hello else "", manifest.model if manifest else ""


def _go_together(one: SourceRecord, other: SourceRecord) -> bool:
    """Return whether the states of two processes allow to merge them.

    The states must be the same, or one was killed and both ran at the same time.
    """
    states = {state_of(one), state_of(other)}
    if not (SourceStatus.GONE in states and states <= {SourceStatus.LIVE, SourceStatus.GONE}):
        return len(states) == 1
    if one.hello is None or other.hello is None or one.hello.boot_id != other.hello.boot_id:
        return False
    return one.hello.monotonic_ns <= _ran_until_ns(other) and other.hello.monotonic_ns <= _ran_until_ns(one)


def _ran_until_ns(record: SourceRecord) -> float:
    """Return when the last step of a killed process ended, on the host's monotonic clock."""
    if state_of(record) is SourceStatus.LIVE:
        return inf
    return max((record.stats.rare("last_ns", (node.id,)) for node in record.nodes.children[None]), default=0)


def _names(records: Sequence[SourceRecord]) -> dict[str, str]:
    """Return a name for each source by key: `rank 3`, or `pid 7` if its rank is not unique."""
    ranks = Counter(record.hello.rank for record in records if record.hello)

    def name(record: SourceRecord) -> str:
        if (hello := record.hello) is None:
            return record.key
        is_rank = hello.rank is not None and ranks[hello.rank] == 1
        return f"rank {hello.rank}" if is_rank else f"pid {hello.pid}"

    return {record.key: name(record) for record in records}


def _by_rank(record: SourceRecord) -> tuple[int, str]:
    rank = record.hello.rank if record.hello else None
    return (MAX_NODES if rank is None else rank), record.key


def _no_roof(bricks: Sequence[BrickRow]) -> RooflineView:
    return roofline((), bricks, "each of the processes has its own")


# --- the sum: one record that is made from several records ----------------------------------------------------


class _WindowOfAll(Window):
    """The sum of several sources' windows. It is as long as a single window."""

    def __init__(self, length_s: float, has_watched: bool, statistics: Callable[[], tuple[NodeStats, TimeRange]]):
        super().__init__(length_s)
        self._has_watched = has_watched
        self._statistics = statistics

    @property
    def has_watched(self) -> bool:
        return self._has_watched

    def statistics(self, stats: NodeStats) -> tuple[NodeStats, TimeRange]:
        return self._statistics()


def _watched(records: Sequence[SourceRecord]) -> list[SourceRecord]:
    """Return the records with windows that can be summed. Ended sources are left out, because their windows are
    older.

    In a chosen range, only sources that ended before it are left out.
    """
    watched = [record for record in records if record.window.has_watched]
    run = [record for record in watched if not record.has_ended or _lies_in_range(record)]
    return watched if all(record.has_ended for record in records) and not run else run


def _lies_in_range(record: SourceRecord) -> bool:
    return record.window.is_range and record.window.statistics(record.stats)[1].covers_s > 0


def _sum(records: Sequence[SourceRecord]) -> tuple[SourceRecord, list[SourceRecord]]:
    """Return the sum of the sources, and the list of them. Sources whose nodes do not fit into the node table are
    left out.
    """
    table = NodeTable()
    known: dict[Hashable, int] = {}
    taken: list[SourceRecord] = []
    places: list[Column] = []
    dependencies: dict[Dependency, None] = {}
    for record in records:
        if len(table) + len(record.nodes) > MAX_NODES:
            continue
        place = _place_nodes(record.nodes, table, known)
        for dependency in record.dependencies:
            if max(dependency.first, dependency.then) < len(place):
                dependencies[Dependency(int(place[dependency.first]), int(place[dependency.then]))] = None
        taken.append(record)
        places.append(place)

    watched = _watched(taken)

    def windows() -> tuple[NodeStats, TimeRange]:
        found = [record.window.statistics(record.stats) for record in watched]
        place_of = {record.key: place for record, place in zip(taken, places, strict=True)}
        their_places = [place_of[record.key] for record in watched]
        time_ranges = [
            time_range_of(record, window) or window for record, (_, window) in zip(watched, found, strict=True)
        ]
        # A source that ended inside a chosen range covers less. So use the longest range.
        covers = max if first.window.is_range else min
        covered_ns = covers(time_range.end_ns - time_range.begin_ns for time_range in time_ranges)
        return _sum_of_stats([stats for stats, _ in found], their_places, len(table)), TimeRange(0, covered_ns)

    first = taken[0]
    said = [check for record in taken for check in record.checks.items()]
    failed = {key: check for key, check in said if not check.passed}
    guarded = [report for record in taken for report in record.guarded.items()]
    summed = SourceRecord(
        key=KEYS_JOINED_BY.join(record.key for record in taken),
        window=_WindowOfAll(first.window.length_s, bool(watched), windows),
        hello=first.hello,
        nodes=table,
        dependencies=dependencies,
        manifest=first.manifest,
        checks={key: check for key, check in said if key not in failed} | failed,
        guarded=dict(sorted(guarded, key=lambda report: report[1].fault is not None)),
        state=_sum_of_states(taken),
        stats=_sum_of_stats([record.stats for record in taken], places, len(table)),
    )
    return summed, taken


def _place_nodes(nodes: NodeTable, table: NodeTable, known: dict[Hashable, int]) -> Column:
    """Add the nodes of a source to a merged table. Return their ids there.

    New nodes are added to `table` and `known`.
    """
    place = np.zeros(len(nodes) + 1, np.int64)
    # (parent, properties) -> index of the source's newest node with both
    seen: dict[Hashable, int] = {}
    for node in nodes.nodes:
        parent = None if node.parent is None else int(place[node.parent])
        like = (parent, _static(node))
        number = seen[like] = seen.get(like, -1) + 1
        found = known.get((like, number))
        if found is None:
            found = known[like, number] = len(table) + 1
            table.add(replace(node, id=found, parent=parent))
        place[node.id] = found
    return place


def _sum_of_stats(members: Sequence[NodeStats], places: Sequence[Column], nodes: int) -> NodeStats:
    total = NodeStats()
    total.grow(nodes + 1)
    columns = {name: total.column(name).copy() for name in COLUMNS}
    keys, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for stats, place in zip(members, places, strict=True):
        size = min(len(stats), len(place))
        for name, column in columns.items():
            add = {"min_ns": np.minimum, "max_ns": np.maximum}.get(name, np.add)
            add.at(column, place[:size], stats.column(name)[:size])
        cell = stats.all_buckets()
        cell = cell[cell < size * BUCKETS]
        keys.append(place[cell // BUCKETS] * BUCKETS + cell % BUCKETS)
        counts.append(stats.buckets(cell))
        total.sparse.add_all(stats.sparse, place[:size])
    cell, at = np.unique(np.concatenate(keys), return_inverse=True)
    count = np.zeros(len(cell), np.int64)
    np.add.at(count, at, np.concatenate(counts))
    total.take_over(np.arange(nodes + 1), np.array([columns[name] for name in COLUMNS]), cell, count, {})
    return total


def _sum_of_states(records: Sequence[SourceRecord]) -> SourceState | None:
    """Return a state with the sums of all counters of the sources. The status comes from the worst source."""
    states = [record.state for record in records if record.state]
    if not states:
        return None
    worst = _worst(records)
    reason = worst.state.reason if worst.state else ""
    counters = [f.name for f in fields(SourceState) if f.name not in ("source", "state", "reason", "quiet")]
    sums = {name: sum(getattr(state, name) for state in states) for name in counters}
    return SourceState("", state_of(worst), f"{_names(records)[worst.key]}: {reason}" if reason else "", **sums)


def _worst(records: Sequence[SourceRecord]) -> SourceRecord:
    """Return the source in the worst state. If several have stopped, this is the first that stopped."""
    return max(records, key=_badness)


def _badness(record: SourceRecord) -> tuple[int, float]:
    stall = stall_view(record)
    return _BAD.index(stall.word if stall else state_of(record)), stall.age_s if stall else 0.0


def _stall_of_worst(records: Sequence[SourceRecord]) -> StallView | None:
    worst = _worst(records)
    stall = stall_view(worst)
    return None if stall is None else replace(stall, member=_names(records)[worst.key])


def _troubled(records: Sequence[SourceRecord]) -> Iterator[TroubledMember]:
    """Yield members that are suspended, stalled, gone or faulty, except the worst one."""
    names, worst = _names(records), _worst(records)
    for record in sorted(records, key=_badness, reverse=True):
        stall, state = stall_view(record), state_of(record)
        if record is not worst and _BAD.index(stall.word if stall else state) >= _BAD.index(StallKind.SUSPENDED):
            name, reason = names[record.key], record.state.reason if record.state else ""
            yield TroubledMember(name, stall.word if stall else state, reason, stall and replace(stall, member=name))


def _together(records: Sequence[SourceRecord]) -> int:
    """Return how many of the sources compute each token together. 1 if their reports differ."""
    said = {record.manifest.ranks if record.manifest else 0 for record in records}
    return max(min(said.pop(), len(records)), 1) if len(said) == 1 else 1


def _with_rates(view: SourceView, records: Sequence[SourceRecord], together: int, *, window: bool) -> SourceView:
    """Return `view` with the summed rates of a merge's members.

    A member's rate is over its own time, or over a chosen range. If `together` members compute the same tokens, the
    sum is divided by `together`.
    """
    members = [shown(record, window=window) for record in records]
    walls_us = [member.time_range_view.wall_us if member.time_range_view else 0.0 for member in members]
    range_us = max(walls_us, default=0.0) if window and all(record.window.is_range for record in records) else 0.0
    every = [
        _over(steps, wall_us, range_us)
        for member, wall_us in zip(members, walls_us, strict=True)
        for steps in member.phases
    ]
    phases = tuple(
        _with_rates_of(steps, [m for m in every if m.phase == steps.phase], together) for steps in view.phases
    )
    of_tokens, of_steps = (
        [
            # Add zeros for the seconds since a source has ended.
            (*history(record, steps), *[0.0] * round((range_us - wall_us) / 1e6))
            for record, member, wall_us in zip(records, members, walls_us, strict=True)
            for steps in member.phases
            if steps.phase == view.phase
        ]
        for history in (tokens_per_sec_history, steps_per_sec_history)
    )
    return replace(
        view,
        phases=phases,
        steps=next((steps for steps in phases if steps.phase == view.phase), None),
        tokens_per_sec_history=_sum_of_histories(of_tokens, together),
        steps_per_sec_history=_sum_of_histories(of_steps, together),
        since_s=min((began_s for record in records if (began_s := since_s(record)) is not None), default=None),
        time_range=_sum_of_time_ranges(
            [found for member in members if (found := member.time_range_view) is not None]
        ),
    )


def _sum_of_histories(histories: Sequence[Sequence[float]], together: int) -> tuple[float, ...]:
    # The hosts' clocks may differ, so align histories at their newest values.
    length = min(map(len, histories), default=0)
    newest = (history[len(history) - length :] for history in histories)
    return tuple(sum(rates) / together for rates in zip(*newest, strict=True))


def _over(steps: StepsView, wall_us: float, range_us: float) -> StepsView:
    """Convert rates of `steps` over `wall_us` to rates over the time range `range_us`. 0: no change."""
    if not range_us:
        return steps

    def over_all(rate: float | None) -> float | None:
        return None if rate is None else rate * wall_us / range_us

    return replace(
        steps,
        tokens_per_sec=over_all(steps.tokens_per_sec),
        steps_per_sec=over_all(steps.steps_per_sec),
        samples_per_sec=over_all(steps.samples_per_sec),
    )


def _with_rates_of(steps: StepsView, members: Sequence[StepsView], together: int) -> StepsView:
    return replace(
        steps,
        tokens_per_sec=_sum_of_rates([(member.tokens_per_sec, member.count) for member in members], together),
        steps_per_sec=_sum_of_rates([(member.steps_per_sec, member.count) for member in members], together),
        samples_per_sec=_sum_of_rates([(member.samples_per_sec, member.count) for member in members], together),
        tokens_per_sec_in_steps=_sum_of_rates([(m.tokens_per_sec_in_steps, m.count) for m in members], together),
        # With several members, it is unknown how their steps overlapped.
        at_once=members[0].at_once if len(members) == 1 else None,
        wall_us=max(member.wall_us for member in members),
        rates_us=max(member.rates_us for member in members),
        is_sample=any(member.is_sample for member in members),
    )


def _sum_of_rates(rates: Iterable[tuple[float | None, int]], together: int) -> float | None:
    """Return the sum of rates, divided by `together` (how many members compute the same tokens).

    None if a member ran steps at an unknown rate, because the sum would be wrong.
    """
    found = [(rate, count) for rate, count in rates if rate is not None or count]
    known = [rate for rate, _ in found if rate is not None]
    return sum(known) / together if known and len(known) == len(found) else None


def _sum_of_time_ranges(members: Sequence[TimeRangeView]) -> TimeRangeView | None:
    if not members:
        return None
    by_phase: dict[str, float] = {}
    for phase in (phase for member in members for phase in member.by_phase):
        by_phase[phase.name] = by_phase.get(phase.name, 0) + phase.us
    return TimeRangeView(
        wall_us=sum(member.wall_us for member in members),
        in_steps_us=_sum_or_none([member.in_steps_us for member in members]),
        counts_whole=any(member.counts_whole for member in members),
        by_phase=tuple(NamedTime(name, us) for name, us in by_phase.items()),
        between_us=_sum_or_none([member.between_us for member in members]),
        since_last_us=_sum_or_none([member.since_last_us for member in members]),
        warm_up_us=_sum_or_none([member.warm_up_us for member in members]),
    )


def _sum_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


# --- the slowest rank of each brick, and ranks in columns -----------------------------------------------------


def _slowest(view: SourceView, members: Sequence[tuple[str, SourceView]]) -> SourceView:
    """Return `view` with each brick and category of its slowest rank, and with the steps of the slowest rank.

    Time breakdown and graph are removed, because values of different ranks do not add up.
    """
    slowest = max((member for _, member in members), key=lambda one: (one.steps and one.steps.mean_us) or 0)
    bricks: dict[tuple[str, BrickCategory], BrickRow] = {}
    categories: dict[BrickCategory, CategoryRow] = {}
    max_us: dict[object, float] = {}
    for name, member in members:
        for brick in member.bricks:
            if (us := _a_step(brick, member)) > max_us.get(brick.key, -1):
                # If the parts of the step do not add up, leave out the shares, because a row cannot mark a share as
                # doubtful.
                percent = brick.percent if _closes(member) else None
                max_us[brick.key], bricks[brick.key] = us, replace(brick, rank=name, roof=None, percent=percent)
        for category in member.categories:
            if (us := _a_step(category, member)) > max_us.get(category.category, -1):
                percent = category.percent if _closes(member) else None
                max_us[category.category], categories[category.category] = us, replace(category, percent=percent)
    return replace(
        view,
        steps=slowest.steps,
        phases=slowest.phases,
        bricks=tuple(sorted(bricks.values(), key=lambda row: -row.total_exclusive_us)),
        categories=tuple(sorted(categories.values(), key=lambda row: row.category)),
        roofline=_no_roof(tuple(bricks.values())),
        graph=(),
        layer_times=None,
        training=None,
        critical_path=None,
        books=None,
        outside=None,
        sampled=(),
        counters=None,
        tokens_per_sec_history=slowest.tokens_per_sec_history,
        steps_per_sec_history=slowest.steps_per_sec_history,
        since_s=slowest.since_s,
        time_range=slowest.time_range,
    )


def _closes(member: SourceView) -> bool:
    return member.books is None or member.books.close


def _ranks(view: SourceView, members: Sequence[tuple[str, SourceView]]) -> RanksView:
    columns = tuple(
        RankColumn(
            name=name,
            key=member.key,
            pid=member.pid,
            host=member.host,
            rank=member.rank,
            steps=member.steps.count if member.steps else None,
            step_us=member.steps.mean_us if member.steps else None,
        )
        for name, member in members
    )
    took = [{row.key: _a_step(row, member) for row in member.bricks} for _, member in members]
    rows = [_rank_row(brick, [us.get(brick.key) for us in took]) for brick in view.bricks]
    return RanksView("step" if view.steps else "call", columns, tuple(rows))


def _rank_row(brick: BrickRow, us: Sequence[float | None]) -> RankRow:
    known = [value for value in us if value is not None]
    usual = median(known)
    at = us.index(max(known))
    spread_percent = 100 * (max(known) / usual - 1) if usual else None
    return RankRow(brick.name, brick.category.display_name, tuple(us), slowest=at, spread_percent=spread_percent)


def _a_step(row: BrickRow | CategoryRow, member: SourceView) -> float:
    """Return a brick's exclusive µs per recorded, ended step. Without steps, per call."""
    if row.percent is None or member.steps is None or member.books is None or not member.steps.recorded:
        return row.total_exclusive_us / row.count
    return row.percent / 100 * member.books.wall_us / member.steps.recorded
