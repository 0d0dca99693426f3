"""The straggler: the rank that is busy longer with each step than the others are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from cbtop.client.busy import Slice
from cbtop.client.store import SourceRecord
from cbtop.viewmodels.model import StragglerView

THRESHOLD = 0.10  # slower than the median of the others by this part
MIN_SLICES = 3  # fewer prove nothing
# Time in a collective is mostly waiting for the slowest: counted, it would make all ranks equally busy.
_COLLECTIVE = re.compile(
    r"all_?-?reduce|all_?-?gather|reduce_?-?scatter|all_?-?to_?-?all|broadcast|barrier|nccl|(^|_)(send|recv|wait)",
    re.IGNORECASE,
)


def job_of(record: SourceRecord) -> tuple[str, str, int | None] | None:
    """What the ranks of one job have in common: program, model and world size. None for what is no rank."""
    hello, manifest = record.hello, record.manifest
    if hello is None or hello.rank is None:
        return None
    return hello.program, manifest.model if manifest else "", hello.world_size


@dataclass(frozen=True, slots=True)
class _Rank:
    record: SourceRecord
    slices: list[Slice]
    exclusive_ns: dict[str, float]  # a step, by brick

    @property
    def busy_ns(self) -> float:
        return sum(self.exclusive_ns.values())


def straggler(records: Iterable[SourceRecord], phase: str) -> StragglerView | None:
    """The slowest of `records`, the ranks of one job; None where none is clearly slower in most of the last steps.

    A rank's busy time is what its bricks took for themselves, less what they spent in collectives.
    """
    ranks = [rank for record in records if (rank := _rank(record, phase))]
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda rank: rank.busy_ns)
    others = [rank for rank in ranks if rank is not slowest]
    usual_ns = median(rank.busy_ns for rank in others)
    bound_ns = usual_ns * (1 + THRESHOLD)
    late = sum(s.steps for s in slowest.slices if sum(s.exclusive_ns.values()) / s.steps > bound_ns)
    steps = sum(s.steps for s in slowest.slices)
    hello = slowest.record.hello
    if usual_ns <= 0 or slowest.busy_ns <= bound_ns or 2 * late <= steps or hello is None or hello.rank is None:
        return None
    excess_ns = {
        name: exclusive_ns - median(rank.exclusive_ns.get(name, 0.0) for rank in others)
        for name, exclusive_ns in slowest.exclusive_ns.items()
    }
    brick = max(excess_ns, key=lambda name: excess_ns[name])
    return StragglerView(
        key=slowest.record.key,
        rank=hello.rank,
        pid=hello.pid,
        host=hello.host,
        ranks=len(ranks),
        phase=phase,
        steps=steps,
        busy_us=slowest.busy_ns / 1e3,
        others_us=usual_ns / 1e3,
        percent=100 * (slowest.busy_ns / usual_ns - 1),
        brick=brick,
        brick_excess_us=excess_ns[brick] / 1e3,
    )


def _rank(record: SourceRecord, phase: str) -> _Rank | None:
    slices = [
        Slice(s.steps, {name: ns for name, ns in s.exclusive_ns.items() if not _COLLECTIVE.search(name)})
        for s in (record.busy.slices(record.nodes, phase) if record.busy else [])
    ]
    if len(slices) < MIN_SLICES:
        return None
    steps = sum(s.steps for s in slices)
    names = {name for s in slices for name in s.exclusive_ns}
    return _Rank(record, slices, {name: sum(s.exclusive_ns.get(name, 0) for s in slices) / steps for name in names})
