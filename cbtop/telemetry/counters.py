"""Counters that never go down, whatever becomes of what they are read from."""

# What a series is read from may fall: a keyframe is lost in part, a process leaves and comes back, another one begins
# under its labels, a brick's exclusive time shrinks when what ran inside it is told late. Prometheus takes every fall
# for a restart and adds the whole value to the rate once more.

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from operator import add

from cbtop.client.store import Store
from cbtop.protocol.messages import HostHello
from cbtop.telemetry.metrics import MAX_SERIES, Durations, Kind, Metric, Point, Snapshot

MAX_KEPT = 4 * MAX_SERIES  # those exported last; a series that was not for so long begins anew


@dataclass(slots=True)
class _Counted:
    """A series so far: the lives of its source that are over, and the highest value of this one."""

    life: HostHello | None
    since_ns: int
    before: float | Durations  # 0 where none is over
    highest: float | Durations


class Counters:
    """What was exported so far, so that what is exported next is no less.

    Within the life of a process a counter stays at its highest value until it grows beyond it. Of a process that
    begins anew under the same labels the counts are added to those before.
    """

    def __init__(self) -> None:
        self._counted: OrderedDict[tuple[Metric, tuple[str, ...]], _Counted] = OrderedDict()

    def held(self, found: Snapshot, store: Store) -> Snapshot:
        """`found`, made from `store`, with each counter and histogram at least where it was before."""
        held: Snapshot = {}
        for metric, points in found.items():
            is_cumulative = metric.kind in (Kind.COUNTER, Kind.HISTOGRAM)
            held[metric] = [self._held(metric, point, store) for point in points] if is_cumulative else points
        while len(self._counted) > MAX_KEPT:
            self._counted.popitem(last=False)
        return held

    def _held(self, metric: Metric, point: Point, store: Store) -> Point:
        source = dict(zip(metric.labels, point.labels, strict=True))["source"]
        life = store.sources[source].hello
        counted = self._counted.get((metric, point.labels))
        if counted is None:
            self._counted[metric, point.labels] = _Counted(life, point.since_ns, 0, point.value)
            return point
        self._counted.move_to_end((metric, point.labels))
        if counted.life != life:
            counted.life, counted.before = life, _sum(counted.before, counted.highest)
            counted.highest = point.value
        else:
            counted.highest = _highest(counted.highest, point.value)
        return replace(point, value=_sum(counted.before, counted.highest), since_ns=counted.since_ns)


def _sum(before: float | Durations, value: float | Durations) -> float | Durations:
    if not isinstance(before, Durations):
        return value if isinstance(value, Durations) else before + value
    assert isinstance(value, Durations)
    is_same = before.bounds_ns == value.bounds_ns
    return Durations(
        bounds_ns=value.bounds_ns if is_same else (),
        counts=tuple(map(add, before.counts, value.counts)) if is_same else (sum(before.counts) + sum(value.counts),),
        total_ns=before.total_ns + value.total_ns,
        min_ns=min(before.min_ns, value.min_ns),
        max_ns=max(before.max_ns, value.max_ns),
    )


def _highest(before: float | Durations, value: float | Durations) -> float | Durations:
    if not isinstance(before, Durations):
        assert not isinstance(value, Durations)
        return max(before, value)
    assert isinstance(value, Durations)
    is_same = before.bounds_ns == value.bounds_ns
    counts = tuple(map(max, before.counts, value.counts)) if is_same else value.counts
    is_known = sum(counts) >= sum(before.counts)  # else it is not known how long those were that are missing
    return Durations(
        bounds_ns=value.bounds_ns if is_known else (),
        counts=counts if is_known else (sum(before.counts),),
        total_ns=max(before.total_ns, value.total_ns),
        min_ns=min(before.min_ns, value.min_ns),
        max_ns=max(before.max_ns, value.max_ns),
    )
