"""The communication of training steps, and how much of it is waiting for a slower rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cbtop.client.source_record import SourceRecord
from cbtop.protocol.training_messages import CommunicationTimes, TrainingTimes
from cbtop.protocol.vocabulary import TrainingPart
from cbtop.viewmodels.straggler import WAIT_WITHIN, job_of


@dataclass(frozen=True, slots=True)
class ExposedRow:
    """One kind of communication that a training step waits for, for example `AllGather, backward`."""

    name: str
    mean_us: float  # Mean of a step.
    p50_us: float  # Median of a step.


@dataclass(frozen=True, slots=True)
class RankWaits:
    """The exposed communication of a rank, divided by a comparison of all ranks of its job (derived).

    The rank that arrives last waits for no other rank, so its exposed time is the communication itself.
    """

    ranks: int
    slowest: int  # The rank with the least exposed communication. The others wait for it.
    communication_us: float  # At most. The least exposed time of any rank, in the mean or the median step.
    waiting_us: float  # How much more this rank waits than the slowest one, in the mean or the median step.


@dataclass(frozen=True, slots=True)
class CommunicationView:
    """The communication of the latest training steps. Exposed times are in the part `communication`."""

    exposed: tuple[ExposedRow, ...]  # The longest first.
    overlapped_us: float | None  # At most, in the mean step. It runs during other parts. None if unknown.
    why_unknown: str  # Why a time is not known.
    ranks: RankWaits | None = None  # None if not all ranks are seen, or if they cannot be compared.


def communication_view(times: CommunicationTimes | None, steps: int) -> CommunicationView | None:
    """Return the communication of `steps` steps, or None if there was none."""
    if times is None:
        return None
    rows = [ExposedRow(kind.name, kind.sum_ns / steps / 1e3, kind.p50_ns / 1e3) for kind in times.exposed]
    overlapped_us = None if times.overlapped_ns is None else times.overlapped_ns / steps / 1e3
    return CommunicationView(tuple(sorted(rows, key=lambda row: -row.mean_us)), overlapped_us, times.why_unknown)


def with_ranks(
    found: CommunicationView, record: SourceRecord, others: Iterable[SourceRecord], phase: str
) -> CommunicationView:
    """Return `found`, the communication of `record`, compared with that of all ranks of its job among `others`."""
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
            return None  # two processes of one rank belong to two jobs
        of_rank[other.hello.rank or 0] = found
    if len(of_rank) < record.hello.world_size or len(of_rank) < 2:
        return None
    if any(abs(one.step_us - own.step_us) > WAIT_WITHIN * own.step_us for one in of_rank.values()):
        return None  # their latest steps are not the same ones
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
    """The exposed communication of the latest steps of a rank, and their mean time."""

    mean_us: float
    p50_us: float
    step_us: float


def _exposed(record: SourceRecord, phase: str) -> _Exposed | None:
    """Return the exposed communication of a rank. Returns None without steps of `phase`, or if models share it."""
    of_phase: list[TrainingTimes] = [times for (name, _), times in record.training_times.items() if name == phase]
    if len(of_phase) != 1:
        return None
    (times,) = of_phase
    part = next((part for part in times.parts if part.name == TrainingPart.COMMUNICATION), None)
    step_us = times.wall_ns / times.steps / 1e3
    if part is None:
        return _Exposed(0.0, 0.0, step_us)
    return _Exposed(part.sum_ns / times.steps / 1e3, part.p50_ns / 1e3, step_us)
