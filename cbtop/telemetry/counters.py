"""Keep the counters of an export from decreasing, even if the data of their sources does."""

# A counter exports a sum. The source's sum may decrease: if a keyframe was partly lost, if a process returns, or if
# another one begins with the same labels. A brick's exclusive time decreases when records of inner bricks arrive
# late. Prometheus takes a decrease for a restart, and adds the whole value to the rate again.

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from operator import add

from cbtop.client.store import Store
from cbtop.protocol.messages import HostHello
from cbtop.telemetry.metrics import MAX_SERIES, DurationHistogram, Metric, MetricType, Point, Snapshot

# At most this many series are stored. If there are more, the series with the oldest export is dropped. A dropped
# series starts again at zero.
MAX_KEPT = 4 * MAX_SERIES


@dataclass(slots=True)
class _Counted:
    """The state of one exported series. `highest` is the highest value since the process of the series started."""

    life: HostHello | None
    since_ns: int
    # sum of this series over earlier processes with the same labels, 0 without such processes
    before: float | DurationHistogram
    highest: float | DurationHistogram


class Counters:
    """Stores the exported values, so that later exports are never lower.

    The exported value of a living process is its highest until now. If a process begins again with the same labels,
    its values are added to the earlier ones.
    """

    def __init__(self) -> None:
        self._counted: OrderedDict[tuple[Metric, tuple[str, ...]], _Counted] = OrderedDict()

    def held(self, found: Snapshot, store: Store) -> Snapshot:
        """Return the snapshot `found` with corrected values: a counter or histogram that has decreased gets its
        previous value.

        `found` must be a snapshot of `store`.
        """
        held: Snapshot = {}
        for metric, points in found.items():
            is_cumulative = metric.kind in (MetricType.COUNTER, MetricType.HISTOGRAM)
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


def _sum(before: float | DurationHistogram, value: float | DurationHistogram) -> float | DurationHistogram:
    if not isinstance(before, DurationHistogram):
        return value if isinstance(value, DurationHistogram) else before + value
    assert isinstance(value, DurationHistogram)
    is_same = before.bounds_ns == value.bounds_ns
    return DurationHistogram(
        bounds_ns=value.bounds_ns if is_same else (),
        counts=tuple(map(add, before.counts, value.counts)) if is_same else (sum(before.counts) + sum(value.counts),),
        total_ns=before.total_ns + value.total_ns,
        min_ns=min(before.min_ns, value.min_ns),
        max_ns=max(before.max_ns, value.max_ns),
    )


def _highest(before: float | DurationHistogram, value: float | DurationHistogram) -> float | DurationHistogram:
    if not isinstance(before, DurationHistogram):
        assert not isinstance(value, DurationHistogram)
        return max(before, value)
    assert isinstance(value, DurationHistogram)
    is_same = before.bounds_ns == value.bounds_ns
    counts = tuple(map(max, before.counts, value.counts)) if is_same else value.counts
    # If counts are missing, the distribution of the durations of calls is unknown.
    is_known = sum(counts) >= sum(before.counts)
    return DurationHistogram(
        bounds_ns=value.bounds_ns if is_known else (),
        counts=counts if is_known else (sum(before.counts),),
        total_ns=max(before.total_ns, value.total_ns),
        min_ns=min(before.min_ns, value.min_ns),
        max_ns=max(before.max_ns, value.max_ns),
    )
