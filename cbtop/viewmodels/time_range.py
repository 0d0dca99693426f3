"""Compute the wall-clock time of figures: its begin, its length, and the time when steps ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cbtop.client.source_record import SourceRecord
from cbtop.client.window import TimeRange
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.node_columns import ANY_STEP
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.messages import Compilation, Node
from cbtop.protocol.vocabulary import NodeKind, is_warm_up

# Tolerance in ns. A record should end after its process's start message (hello), and not in the future. If it is
# outside by more than this, the clock is not the host's, and its time is unknown.
OF_HOST_WITHIN_NS = 10_000_000_000
# If a time range and the sum of its parts differ by at most this share of wall-clock time, the difference is not
# shown.
CLOSES_WITHIN = 0.01


@dataclass(frozen=True, slots=True)
class NamedTime:
    name: str
    us: float


@dataclass(frozen=True, slots=True)
class TimeRangeView:
    """The wall-clock time of the figures (derived):

    wall = in steps + warm-up + between steps + since the last step ended

    `warm_up_us` is the time when only warm-up steps ran, or None if unknown. If it is None, or if all steps are
    warm-ups, `in_steps_us` and `by_phase` include the warm-ups. The range begins with the window, or without one with
    the first step. It ends now, or with an ended process's last step. Of a step that began earlier, only a part
    counts. After the last step's end, another may be running. A field is None if it is unknown when steps ran, or
    when the last one ended.
    """

    wall_us: float
    in_steps_us: float | None
    by_phase: tuple[NamedTime, ...]  # time when steps of each phase ran; phases may overlap
    between_us: float | None
    since_last_us: float | None
    warm_up_us: float | None = 0.0
    # Whether steps that began before the range count in full, because the times of single steps are not reported.
    counts_whole: bool = False

    @property
    def between_percent(self) -> float | None:
        return 100 * self.between_us / self.wall_us if self.between_us is not None and self.wall_us else None


@dataclass(frozen=True, slots=True)
class CompilingView:
    """Dynamo's compilations in the shown time: number and duration.

    `again` counts recompilations: the existing code did not fit its inputs. Overlapping compilations count as one.
    """

    count: int
    us: float
    again: int
    again_us: float
    wall_us: float  # length in µs of the shown time range that contains the compilations


def time_range_of(record: SourceRecord, window: TimeRange | None) -> TimeRange | None:
    """Return the time range of `window`, or of all data without a window. None if no step was seen.

    It begins with the first step after the warm-up, because earlier time does not count as time between steps. The
    beginning of a chosen range does not change, nor that of a window that begins later. It ends now, or with an ended
    process's last step.
    """
    steps = _steps(record)
    if not steps:
        return None
    steady = _steady(steps)
    first_ns, last_ns = _first_ns(record, steady), _last_ns(record, steps)
    if window is not None:
        is_late = window.begin_ns < first_ns <= window.end_ns and _is_of_host(record, first_ns)
        if is_late and not record.window.is_range:
            window = TimeRange(first_ns, window.end_ns, {})
        if not (record.has_ended and _is_of_host(record, last_ns)):
            return window
        return replace(window, end_ns=min(max(last_ns, window.begin_ns), window.end_ns))
    is_ended = record.has_ended or not _is_of_host(record, last_ns)
    return TimeRange(first_ns, last_ns if is_ended else max(last_ns, record.window.now_ns), {})


def of_model(record: SourceRecord, time_range: TimeRange, model: str) -> TimeRange:
    """Return the part of `time_range` for the rates of the model whose steps have the label `model`.

    If models run one after another, it begins with the first step of this model. If another model has begun after its
    last step, it ends with this step.
    """
    steps = _steps(record)
    own = [step for step in steps if step.label == model]
    others = [step for step in steps if step.label != model]
    if not own or not others:
        return time_range
    first_ns, last_ns = _first_ns(record, _steady(own)), _last_ns(record, own)
    begin_ns = first_ns if time_range.begin_ns < first_ns <= time_range.end_ns else time_range.begin_ns
    has_gone_on = any(record.stats.rare("first_ns", (other.id,)) >= last_ns for other in others)
    end_ns = last_ns if has_gone_on and begin_ns < last_ns < time_range.end_ns else time_range.end_ns
    return replace(time_range, begin_ns=begin_ns, end_ns=end_ns)


def heard_ns(record: SourceRecord) -> int:
    """Return when the source last showed that it is alive, on the daemon's clock. For an ended process, the end of
    its last step.
    """
    steps = _steps(record)
    if record.has_ended and steps and _is_of_host(record, last_ns := _last_ns(record, steps)):
        return last_ns
    return record.window.now_ns


def compiling_view(compilations: Iterable[Compilation], time_range: TimeRange | None) -> CompilingView | None:
    """Return the number and time of the compilations in `time_range`. None without any, and without steps."""
    if time_range is None:
        return None
    found = [
        (one.is_again, taken_ns / 1000)
        for one in compilations
        if (taken_ns := min(one.ended_ns, time_range.end_ns) - max(one.begun_ns, time_range.begin_ns)) > 0
    ]
    if not found:
        return None
    again = [us for is_again, us in found if is_again]
    wall_us = (time_range.end_ns - time_range.begin_ns) / 1000
    # Compilations are assumed not to overlap, so add up their durations.
    took_us, again_us = (min(sum(each), wall_us) for each in ([us for _, us in found], again))
    return CompilingView(len(found), took_us, len(again), again_us, wall_us)


def compiling_in_warm_up(record: SourceRecord) -> CompilingView | None:
    """Return the compilations before the first step after the warm-up. If all steps are warm-ups, all
    compilations.
    """
    steps = _steps(record)
    steady = [step for step in steps if not is_warm_up(step.name)]
    end_ns = _first_ns(record, steady) if steady else record.window.now_ns
    return compiling_view(record.compilations.values(), TimeRange(0, end_ns, {}))


def time_range_view(record: SourceRecord, stats: NodeStats, time_range: TimeRange) -> TimeRangeView:
    """Divide `time_range` into the time in steps and between steps. `stats` are of the same range."""
    steps = _steps(record)
    wall_ns, last_ns = time_range.end_ns - time_range.begin_ns, _last_ns(record, steps)
    is_of_host = _is_of_host(record, last_ns)
    since_last_ns = min(max(time_range.end_ns - last_ns, 0), wall_ns) if is_of_host else None
    # With different clocks, the end of the window cannot be compared with the last step's end. The time between steps
    # is then unknown.
    is_known = is_of_host or time_range.end_ns == last_ns
    before_ns = (time_range.before_ns if is_of_host else None) or {}
    room_ns = wall_ns - (since_last_ns or 0)
    in_range_ns = {
        step: stats.rare("union_ns", (step,)) - before_ns.get(step, 0) for step in (ANY_STEP, *_ids(steps))
    }
    early_ns, doubt_ns = _early_warm_ups(record, time_range, steps, in_range_ns)
    ran_ns = {step: min(max(in_range_ns[step] - early_ns.get(step, 0), 0), room_ns) for step in _ids(steps)}
    any_step = _any_step(record, steps)
    any_ns = warm_ns = in_steps_us = None
    if any_step is not None:
        least_ns = max(ran_ns[step] for step in _ids(_steady(steps)))
        most_ns = in_range_ns[any_step] - sum(early_ns.values())
        any_ns = min(max(most_ns, least_ns), room_ns)
        doubt_ns = any_ns - min(max(most_ns - doubt_ns, least_ns), any_ns)
        warm_ns = _warm_up_ns(any_ns, steps, ran_ns, doubt_ns, wall_ns)
        in_steps_us = (any_ns - (warm_ns or 0)) / 1e3
    return TimeRangeView(
        wall_us=wall_ns / 1e3,
        in_steps_us=in_steps_us,
        by_phase=tuple(
            NamedTime(display_name(step), ran_ns[step.id] / 1e3)
            for step in (steps if warm_ns is None else _steady(steps))
            if ran_ns[step.id]
        ),
        between_us=None if any_ns is None or not is_known else (room_ns - any_ns) / 1e3,
        since_last_us=None if since_last_ns is None else since_last_ns / 1e3,
        warm_up_us=None if warm_ns is None else warm_ns / 1e3,
        counts_whole=(time_range.before_ns is None and bool(in_steps_us)) or doubt_ns > CLOSES_WITHIN * wall_ns,
    )


def since_s(record: SourceRecord) -> float | None:
    """Return the Unix time of the source's first step, or of its first record if it has no steps."""
    steps, hello = _steps(record), record.hello
    first_ns = record.stats.sparse["first_ns"].get(ANY_STEP)
    if steps:
        first_ns = _first_ns(record, _steady(steps))
    if first_ns is None or hello is None or not _is_of_host(record, first_ns):
        return None
    return (hello.realtime_ns + first_ns - hello.monotonic_ns) / 1e9


def steady_since_ns(record: SourceRecord) -> int | None:
    """Return when the source's first step after the warm-up began, on the daemon's clock. None without steps, or if
    the source has another clock.
    """
    steps = _steps(record)
    first_ns = _first_ns(record, _steady(steps)) if steps else 0
    return first_ns if steps and _is_of_host(record, first_ns) else None


def _steps(record: SourceRecord) -> list[Node]:
    """Return the step nodes that have at least one ended step."""
    known = record.stats.sparse["first_ns"].keys()
    return [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP and node.id in known]


def _steady(steps: list[Node]) -> list[Node]:
    """Return the step nodes without warm-ups, or all of them if all are warm-ups."""
    return [step for step in steps if not is_warm_up(step.name)] or steps


def _ids(steps: Iterable[Node]) -> list[int]:
    return [step.id for step in steps]


def _early_warm_ups(
    record: SourceRecord, time_range: TimeRange, steps: list[Node], in_range_ns: Mapping[int, int]
) -> tuple[dict[int, int], int]:
    """Return how much time (ns) to subtract from `in_range_ns` for each step node, and how wrong this can be.

    If a range begins after the warm-up, the statistics contain earlier warm-up steps, which are subtracted. A warm-up
    that went on in another thread cannot be divided, so the error includes its time.
    """
    warm = [step.id for step in steps if is_warm_up(step.name)]
    if len(warm) == len(steps) or time_range.begin_ns != _first_ns(record, _steady(steps)):
        return {}, 0
    began_ns = {step: record.stats.rare("first_ns", (step,)) for step in warm}
    begun = [step for step in warm if began_ns[step] < time_range.begin_ns]
    ended = [step for step in begun if record.stats.rare("last_ns", (step,)) <= time_range.begin_ns]
    longest_ns = max((time_range.begin_ns - began_ns[step] for step in begun if step not in ended), default=0)
    continued_ns = sum(in_range_ns[step] for step in begun if step not in ended)
    return {step: in_range_ns[step] for step in ended}, min(longest_ns, continued_ns)


def _warm_up_ns(any_ns: int, steps: list[Node], ran_ns: Mapping[int, int], doubt_ns: int, wall_ns: int) -> int | None:
    """Return the time when only warm-up steps ran. None if phases overlap, so that it is unknown.

    `any_ns` is the time when any step ran. It may be too long by `doubt_ns`.
    """
    steady_ns = [ran_ns[step] for step in _ids(_steady(steps))]
    warm_ns = sum(ran_ns.values()) - sum(steady_ns)
    most_ns = min(warm_ns, any_ns - max(steady_ns))
    least_ns = min(max(any_ns - doubt_ns - sum(steady_ns), 0), most_ns)
    return most_ns if most_ns - least_ns <= CLOSES_WITHIN * wall_ns else None


def _first_ns(record: SourceRecord, steps: Sequence[Node]) -> int:
    return min(record.stats.rare("first_ns", (step.id,)) for step in steps)


def _last_ns(record: SourceRecord, steps: Sequence[Node]) -> int:
    return max(record.stats.rare("last_ns", (step.id,)) for step in steps)


def _is_of_host(record: SourceRecord, moment_ns: int) -> bool:
    """Return whether the time of a record is on the clock of the host."""
    hello, now_ns = record.hello, record.window.now_ns
    if hello is None or moment_ns + OF_HOST_WITHIN_NS < hello.monotonic_ns:
        return False
    return moment_ns <= now_ns + OF_HOST_WITHIN_NS


def _any_step(record: SourceRecord, steps: Sequence[Node]) -> int | None:
    """Return the node id for the time when any step ran. None if this time is unknown."""
    if record.stats.sparse["union_ns"].get(ANY_STEP) is not None:
        return ANY_STEP
    # Older daemons do not send the time when any step ran. With a single phase it is known, but several may overlap.
    return steps[0].id if len(steps) == 1 else None
