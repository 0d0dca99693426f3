"""The wall-clock time range of figures: its begin, its length, and the time during which steps ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cbtop.client.source_record import SourceRecord
from cbtop.client.window import TimeRange
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.node_columns import ANY_STEP
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.messages import Compilation, Node
from cbtop.protocol.vocabulary import NodeKind, is_warm_up

# Tolerance. No record should end before the process's hello or in the future. A record that is further away has a
# different clock than the host, so its time is unknown.
OF_HOST_WITHIN_NS = 10_000_000_000


@dataclass(frozen=True, slots=True)
class NamedTime:
    name: str
    us: float


@dataclass(frozen=True, slots=True)
class TimeRangeView:
    """The wall-clock time of the figures: wall = in steps + between steps + since the last step ended (derived).

    The range begins with the window or, if there is no window, with the first step. It ends now, or with the last
    step of an ended process. If a step began before the range, only a part of it counts. After the end of the last
    step, another step may be running. A field is None if it is unknown when steps ran or when the last step ended.
    """

    wall_us: float
    in_steps_us: float | None
    by_phase: tuple[NamedTime, ...]  # time during which steps of each phase ran; phases may overlap
    between_us: float | None
    since_last_us: float | None
    # Whether steps that began before the range count in full, because the times of single steps are not reported.
    counts_whole: bool = False

    @property
    def between_percent(self) -> float | None:
        return 100 * self.between_us / self.wall_us if self.between_us is not None and self.wall_us else None


@dataclass(frozen=True, slots=True)
class CompilingView:
    """The compilations in the shown time that Dynamo reported: their number and duration.

    `again` is the number of recompilations: the existing code did not fit its inputs. Overlapping compilations count
    as one.
    """

    count: int
    us: float
    again: int
    again_us: float
    wall_us: float  # length of the shown time


def time_range_of(record: SourceRecord, window: TimeRange | None) -> TimeRange | None:
    """Return the time range of `window`, or of all data if it is None. Return None if no step has been seen.

    The range begins with the first step after the warm-up, because earlier time is not time between steps. If the
    window begins later, or is a chosen range, it keeps its begin. The range ends now, or with the last step of an
    ended process.
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
    before_ns = _warm_up_before(record, steps, first_ns) if len(steady) < len(steps) else {}
    return TimeRange(first_ns, last_ns if is_ended else max(last_ns, record.window.now_ns), before_ns)


def of_model(record: SourceRecord, time_range: TimeRange, model: str) -> TimeRange:
    """Return the part of `time_range` for the rates of one model. Steps of the model have the label `model`.

    If models run one after another, the part begins with the first step of this model. If another model has begun
    since its last step, the part ends with this last step.
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
    """Return the time of the source's last sign of life, on its daemon's clock.

    For an ended process: the end of its last step.
    """
    steps = _steps(record)
    if record.has_ended and steps and _is_of_host(record, last_ns := _last_ns(record, steps)):
        return last_ns
    return record.window.now_ns


def compiling_view(compilations: Iterable[Compilation], time_range: TimeRange | None) -> CompilingView | None:
    """Return the compilations in `time_range` and their time. Return None without compilations or steps."""
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
    # Add up the durations, assuming that compilations do not overlap.
    took_us, again_us = (min(sum(each), wall_us) for each in ([us for _, us in found], again))
    return CompilingView(len(found), took_us, len(again), again_us, wall_us)


def compiling_in_warm_up(record: SourceRecord) -> CompilingView | None:
    """Return the compilations before the first step that is no warm-up. If all steps are warm-ups, return all."""
    steps = _steps(record)
    steady = [step for step in steps if not is_warm_up(step.name)]
    end_ns = _first_ns(record, steady) if steady else record.window.now_ns
    return compiling_view(record.compilations.values(), TimeRange(0, end_ns, {}))


def time_range_view(record: SourceRecord, stats: NodeStats, time_range: TimeRange) -> TimeRangeView:
    """Return the time in steps and between steps in `time_range`. `stats` cover the same range."""
    steps = _steps(record)
    wall_ns, last_ns = time_range.end_ns - time_range.begin_ns, _last_ns(record, steps)
    is_of_host = _is_of_host(record, last_ns)
    since_last_ns = min(max(time_range.end_ns - last_ns, 0), wall_ns) if is_of_host else None
    # With different clocks, the end of the window cannot be compared with the end of the last step. Then the time
    # between steps is unknown.
    is_known = is_of_host or time_range.end_ns == last_ns
    before_ns = (time_range.before_ns if is_of_host else None) or {}
    room_ns = wall_ns - (since_last_ns or 0)

    def ran_ns(step: int) -> int:
        return min(stats.rare("union_ns", (step,)) - before_ns.get(step, 0), room_ns)

    any_step = _any_step(record, steps)
    in_steps_us = None if any_step is None else ran_ns(any_step) / 1e3
    ran = [(display_name(step), ran_ns(step.id)) for step in steps]
    return TimeRangeView(
        wall_us=wall_ns / 1e3,
        in_steps_us=in_steps_us,
        by_phase=tuple(NamedTime(phase, ns / 1e3) for phase, ns in ran if ns),
        between_us=None if in_steps_us is None or not is_known else room_ns / 1e3 - in_steps_us,
        since_last_us=None if since_last_ns is None else since_last_ns / 1e3,
        counts_whole=time_range.before_ns is None and bool(in_steps_us),
    )


def since_s(record: SourceRecord) -> float | None:
    """Return the Unix time when the data begins: the first step or, without steps, the first record."""
    steps, hello = _steps(record), record.hello
    first_ns = record.stats.sparse["first_ns"].get(ANY_STEP)
    if steps:
        first_ns = _first_ns(record, _steady(steps))
    if first_ns is None or hello is None or not _is_of_host(record, first_ns):
        return None
    return (hello.realtime_ns + first_ns - hello.monotonic_ns) / 1e9


def _steps(record: SourceRecord) -> list[Node]:
    """Return the step nodes with at least one ended step."""
    known = record.stats.sparse["first_ns"].keys()
    return [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP and node.id in known]


def _steady(steps: list[Node]) -> list[Node]:
    """Return the steps that are not warm-ups. If all are warm-ups, return all."""
    return [step for step in steps if not is_warm_up(step.name)] or steps


def _warm_up_before(record: SourceRecord, steps: list[Node], first_ns: int) -> dict[int, int]:
    """Return the time (ns) of warm-ups that ended before `first_ns`, by step node. The key ANY_STEP has the sum."""
    warm = [step.id for step in steps if is_warm_up(step.name)]
    before = [step for step in warm if record.stats.rare("last_ns", (step,)) <= first_ns]
    times_ns = {step: record.stats.rare("union_ns", (step,)) for step in before}
    return times_ns | {ANY_STEP: sum(times_ns.values())}


def _first_ns(record: SourceRecord, steps: Sequence[Node]) -> int:
    return min(record.stats.rare("first_ns", (step.id,)) for step in steps)


def _last_ns(record: SourceRecord, steps: Sequence[Node]) -> int:
    return max(record.stats.rare("last_ns", (step.id,)) for step in steps)


def _is_of_host(record: SourceRecord, moment_ns: int) -> bool:
    """Return whether a time in a record is on the clock of the host."""
    hello, now_ns = record.hello, record.window.now_ns
    if hello is None or moment_ns + OF_HOST_WITHIN_NS < hello.monotonic_ns:
        return False
    return moment_ns <= now_ns + OF_HOST_WITHIN_NS


def _any_step(record: SourceRecord, steps: Sequence[Node]) -> int | None:
    """Return the node with the time during which any step ran. Return None if this time is unknown."""
    if record.stats.sparse["union_ns"].get(ANY_STEP) is not None:
        return ANY_STEP
    # Older daemons do not send this time. It is only known if there is a single phase, because phases may overlap.
    return steps[0].id if len(steps) == 1 else None
