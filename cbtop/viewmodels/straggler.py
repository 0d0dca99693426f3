"""The straggler: the rank that is busy longer with its steps than each of the others is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from statistics import median

from cbtop.client.busy import Slice
from cbtop.client.store import SourceRecord
from cbtop.viewmodels.model import StragglerView

THRESHOLD = 0.10  # slower than each of the others by this part
ALPHA = 0.1  # how likely a bound of a median may be on its wrong side; a verdict takes two of them
MIN_SLICES = 4  # fewer have no such bounds
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
    """A rank by its slices; times are exclusive, of one step, without collectives."""

    record: SourceRecord
    steps: int
    busy_ns: list[float]  # slice by slice, ascending
    brick_ns: dict[str, float]  # median

    @property
    def median_ns(self) -> float:
        return median(self.busy_ns)

    def is_slower_than(self, other: _Rank) -> bool:
        """Whether its median is higher by more than THRESHOLD, beyond what pauses and noise explain.

        Compared are bounds of the two medians that hold whatever the times are distributed like: the k-th smallest
        and the k-th largest slice (W. R. Thompson, "On confidence ranges for the median and other expectation
        distributions for populations of unknown distribution form", Annals of Mathematical Statistics 7, 1936). So
        pauses in some slices, however long, prove nothing: neither here nor there.
        """
        low_ns = self.busy_ns[bound_of_median(len(self.busy_ns)) - 1]
        high_ns = other.busy_ns[-bound_of_median(len(other.busy_ns))]
        return low_ns > (1 + THRESHOLD) * high_ns


@cache
def bound_of_median(count: int) -> int:
    """The highest k so that the k-th smallest of `count` values lies above their median at most ALPHA of the time.

    0 where there is none. A value is below the median as often as above it: how many are is binomial.
    """
    at_most, k = 0.0, 0
    while (at_most := at_most + comb(count, k) / 2**count) <= ALPHA:
        k += 1
    return k


def straggler(records: Iterable[SourceRecord], phase: str) -> StragglerView | None:
    """The rank among `records`, those of one job, that is clearly slower than every other; None where none is.

    A rank's busy time is what its bricks took for themselves, less what they spent in collectives. While a rank that
    runs has not been seen for long enough to be compared, there is no verdict: it may be as slow.
    """
    ranks: list[_Rank] = []
    for record in records:
        if record.busy is None or record.busy.has_stopped:
            continue
        slices = record.busy.slices(record.nodes, phase)
        if record.busy.count < MIN_SLICES or 0 < len(slices) < MIN_SLICES:
            return None
        if slices:
            ranks.append(_rank(record, slices))
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda rank: rank.median_ns)
    others = [rank for rank in ranks if rank is not slowest]
    usual_ns = median(rank.median_ns for rank in others)
    hello = slowest.record.hello
    if usual_ns <= 0 or hello is None or hello.rank is None or not all(map(slowest.is_slower_than, others)):
        return None
    excess_ns = {
        name: brick_ns - median(rank.brick_ns.get(name, 0.0) for rank in others)
        for name, brick_ns in slowest.brick_ns.items()
    }
    brick = max(excess_ns, key=lambda name: excess_ns[name])
    return StragglerView(
        key=slowest.record.key,
        rank=hello.rank,
        pid=hello.pid,
        host=hello.host,
        ranks=len(ranks),
        phase=phase,
        steps=slowest.steps,
        busy_us=slowest.median_ns / 1e3,
        others_us=usual_ns / 1e3,
        percent=100 * (slowest.median_ns / usual_ns - 1),
        brick=brick,
        brick_excess_us=excess_ns[brick] / 1e3,
    )


def _rank(record: SourceRecord, slices: Sequence[Slice]) -> _Rank:
    names = {name for s in slices for name in s.exclusive_ns if not _COLLECTIVE.search(name)}
    took_ns = {name: [s.exclusive_ns.get(name, 0) / s.steps for s in slices] for name in names}
    return _Rank(
        record,
        steps=sum(s.steps for s in slices),
        busy_ns=sorted(map(sum, zip(*took_ns.values(), strict=True))) if names else [0.0] * len(slices),
        brick_ns={name: median(of_slices) for name, of_slices in took_ns.items()},
    )
