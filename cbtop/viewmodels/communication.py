"""The communication of training steps, and how long a rank waits for slower ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cbtop.client.source_record import SourceRecord
from cbtop.protocol.training_messages import CommunicationTimes, TrainingTimes
from cbtop.protocol.vocabulary import TrainingPart
from cbtop.viewmodels.selection import is_live
from cbtop.viewmodels.straggler import WAIT_WITHIN, job_of


@dataclass(frozen=True, slots=True)
class ExposedRow:
    """A kind of communication that a training step waits for, such as `AllGather, backward`."""

    name: str
    mean_us: float  # mean time of this communication per step
    p50_us: float  # median time of this communication per step


@dataclass(frozen=True, slots=True)
class RankWaits:
    """The time that a rank waits for communication, divided into the communication itself and the wait for other
    ranks (derived).

    All ranks of the job are compared. The last rank to arrive waits for nobody else, so its whole time is
    communication.
    """

    ranks: int
    # number of the slowest rank, which has the least exposed communication because the others wait for it
    slowest: int
    # Upper limit for the communication itself: the smallest exposed time of any rank. A rank's exposed time is its
    # mean or its median, whichever is smaller.
    communication_us: float
    waiting_us: float  # how long this rank waits for others: its exposed time minus `communication_us`


@dataclass(frozen=True, slots=True)
class CommunicationView:
    """The communication of the newest training steps.

    A step waits for exposed communication, because it does not overlap with computation. The part `communication` of
    a step is this time.
    """

    exposed: tuple[ExposedRow, ...]  # the communication that a step waits for, by kind, longest first
    # Upper limit of the overlap of communication with other parts of the mean step; None if unknown.
    overlapped_us: float | None
    why_unknown: str  # the reason why the time of exposed or overlapped communication is unknown, or ""
    # Communication and waiting. None if ranks are not visible or cannot be compared.
    ranks: RankWaits | None = None


def communication_view(times: CommunicationTimes | None, steps: int) -> CommunicationView | None:
    """Return the communication of `steps` training steps, or None without communication."""
    if times is None:
        return None
    rows = [ExposedRow(kind.name, kind.sum_ns / steps / 1e3, kind.p50_ns / 1e3) for kind in times.exposed]
    overlapped_us = None if times.overlapped_ns is None else times.overlapped_ns / steps / 1e3
    return CommunicationView(tuple(sorted(rows, key=lambda row: -row.mean_us)), overlapped_us, times.why_unknown)


def ranks_alongside(record: SourceRecord, records: Iterable[SourceRecord]) -> list[SourceRecord]:
    """Return the other ranks of the job of `record` that ran at the same time.

    An ended rank is included, unless it runs again.
    """
    job = job_of(record)
    if job is None:
        return []
    of_job = [other for other in records if other is not record and job_of(other) == job]
    others = [other for other in of_job if _ran_together(record, other)]
    running = {_rank(other) for other in [record, *others] if is_live(other)}
    return [other for other in others if is_live(other) or _rank(other) not in running]


def _rank(record: SourceRecord) -> int | None:
    return record.hello.rank if record.hello else None


def _ran_together(record: SourceRecord, other: SourceRecord) -> bool:
    (begun_s, ended_s), (other_begun_s, other_ended_s) = _life_s(record), _life_s(other)
    return begun_s <= other_ended_s and other_begun_s <= ended_s


def _life_s(record: SourceRecord) -> tuple[float, float]:
    """Return when the process of `record` began and ended, as Unix times in s. A running process has no end."""
    if record.hello is None:
        return 0.0, 0.0
    begun_s = record.hello.realtime_ns / 1e9
    if is_live(record):
        return begun_s, math.inf
    return begun_s, begun_s + max(0, record.window.now_ns - record.hello.monotonic_ns) / 1e9


def with_ranks(
    found: CommunicationView, record: SourceRecord, others: Iterable[SourceRecord], phase: str
) -> CommunicationView:
    """Return a copy of `found`, the communication of `record`, with the comparison of all ranks of the job.

    `others` are the records of the other ranks.
    """
    return replace(found, ranks=_rank_waits(record, others, phase))


def _rank_waits(record: SourceRecord, others: Iterable[SourceRecord], phase: str) -> RankWaits | None:
    job = job_of(record)
    own = _exposed(record, phase)
    if job is None or own is None or record.hello is None or not record.hello.world_size:
        return None
    of_rank: dict[int, _Exposed] = {record.hello.rank or 0: own}
    for other in others:
        if other is record or job_of(other) != job or other.hello is None:
            continue
        found = _exposed(other, phase)
        if found is None or found.step_us <= 0 or (other.hello.rank or 0) in of_rank:
            return None  # Two processes with the same rank belong to two jobs.
        of_rank[other.hello.rank or 0] = found
    if len(of_rank) < record.hello.world_size or len(of_rank) < 2:
        return None
    if any(abs(one.step_us - own.step_us) > WAIT_WITHIN * own.step_us for one in of_rank.values()):
        # The times of steps differ, so these are not the same steps in all ranks.
        return None
    slowest = min(of_rank, key=lambda rank: of_rank[rank].mean_us)
    least = of_rank[slowest]
    return RankWaits(
        ranks=len(of_rank),
        slowest=slowest,
        communication_us=min(min(one.mean_us, one.p50_us) for one in of_rank.values()),
        waiting_us=max(0.0, min(own.mean_us - least.mean_us, own.p50_us - least.p50_us)),
    )


@dataclass(frozen=True, slots=True)
class _Exposed:
    """The communication that the newest steps of a rank wait for, and their mean time."""

    mean_us: float
    p50_us: float
    step_us: float


def _exposed(record: SourceRecord, phase: str) -> _Exposed | None:
    """Return the communication that a rank's steps wait for. None without steps of `phase`, or if several models have
    such steps.
    """
    of_phase: list[TrainingTimes] = [times for (name, _), times in record.training_times.items() if name == phase]
    if len(of_phase) != 1:
        return None
    (times,) = of_phase
    part = next((part for part in times.parts if part.name == TrainingPart.COMMUNICATION), None)
    step_us = times.wall_ns / times.steps / 1e3
    if part is None:
        return _Exposed(0.0, 0.0, step_us)
    return _Exposed(part.sum_ns / times.steps / 1e3, part.p50_ns / 1e3, step_us)
