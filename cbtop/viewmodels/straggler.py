"""Find the straggler: the rank of a job that is busy in its steps for longer than every other rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from statistics import median

from cbtop.client.busy import Brick, Slice
from cbtop.client.source_record import SourceRecord
from cbtop.protocol.vocabulary import LAUNCHES, BrickCategory, TrainingPart

THRESHOLD = 0.10  # The straggler takes longer than every other rank by at least this share.
# A rank waits for the straggler if whole steps of both take about equally long. The difference is at most the first
# number times the straggler's step, and at most the second number times the difference of their busy times.
WAIT_WITHIN, NEARER = 0.10, 0.5
ALPHA = 0.1  # Probability that a confidence bound of a median is wrong. A verdict uses two.
# A rank needs at least this many slices of time. The median of fewer has no confidence bounds.
MIN_SLICES = 4
BETWEEN_BRICKS: Brick = ("gaps between its bricks", BrickCategory.OTHER)
# Communication is mostly a wait for the slowest rank, so its time would make all ranks look equally busy. It is also
# recognised by name, because custom bricks have no category.
_COLLECTIVE = re.compile(
    r"all_?-?reduce|all_?-?gather|reduce_?-?scatter|all_?-?to_?-?all|broadcast|barrier|nccl|(^|_)(send|recv|wait)",
    re.IGNORECASE,
)


# what the ranks of a job have in common: (program, model, world size, job id of the launcher)
Job = tuple[str, str, int | None, str]


@dataclass(frozen=True, slots=True)
class StragglerView:
    """The straggler: the rank that was busier per step than every other rank in the last five seconds (derived)."""

    key: str
    rank: int
    pid: int
    host: str
    ranks: int  # number of ranks that were compared, including this one
    phase: str
    steps: int  # number of this rank's steps in the comparison
    busy_us: float  # time of a step outside of communication; median over slices of time
    others_us: float  # busy time per step of the other ranks (median over them)
    percent: float  # how much larger `busy_us` is than `others_us`, in percent
    # Where the straggler loses most: a brick, gaps between bricks, or a part of a training step.
    brick: str
    # the straggler's time per step in this brick, minus the median of the other ranks
    brick_excess_us: float
    step_us: float  # time of a whole step, including communication; median over slices of time
    others_step_us: float  # time of the other ranks' whole steps (median over them)
    # whether all other ranks wait for the straggler, because their whole steps take about as long
    others_wait: bool

    @property
    def waited_us(self) -> float:
        """Upper limit of the other ranks' wait per step: the whole step minus their busy time."""
        return max(0.0, self.others_step_us - self.others_us)


def job_of(record: SourceRecord) -> Job | None:
    """Return what all ranks of a job have in common. None without a rank, or for an only rank."""
    hello, manifest = record.hello, record.manifest
    if hello is None or hello.rank is None or hello.world_size == 1:
        return None
    return hello.program, manifest.model if manifest else "", hello.world_size, hello.job


@dataclass(frozen=True, slots=True)
class _Rank:
    """What is known of one rank, from its slices of time.

    Times are exclusive, per step, and without communication, unless noted.
    """

    record: SourceRecord
    steps: int
    busy_ns: list[float]  # busy time per step in each slice of time, in ascending order
    brick_ns: dict[Brick, float]  # time per step of each brick; median over slices of time
    step_ns: float  # time of a whole step, including communication; median over slices of time

    @property
    def median_ns(self) -> float:
        return median(self.busy_ns)

    def is_waited_for_by(self, other: _Rank) -> bool:
        """Return whether the rank `other` waits for this rank.

        It does if it is less busy, although whole steps of both ranks take about equally long.
        """
        apart_ns = abs(self.step_ns - other.step_ns)
        return apart_ns <= min(WAIT_WITHIN * self.step_ns, NEARER * (self.median_ns - other.median_ns))

    def is_slower_than(self, other: _Rank) -> bool:
        """Return whether this rank's median busy time is longer than the other's by more than THRESHOLD.

        Noise alone must not explain it. So the lower bound of this median is compared with the upper bound of the
        other. The bounds are the k-th smallest and k-th largest slice, for any distribution (W. R. Thompson, "On
        confidence ranges for the median and other expectation distributions for populations of unknown distribution
        form", Annals of Mathematical Statistics 7, 1936). Pauses in a few slices have no effect, however long they
        are.
        """
        low_ns = self.busy_ns[bound_of_median(len(self.busy_ns)) - 1]
        high_ns = other.busy_ns[-bound_of_median(len(other.busy_ns))]
        return low_ns > (1 + THRESHOLD) * high_ns


@cache
def bound_of_median(count: int, alpha: float = ALPHA) -> int:
    """Return the largest k for which the k-th smallest of `count` values is a lower bound of the median (0: none).

    The bound is above the median with a probability of at most `alpha`. The number of values below the median is
    binomial with p = 1/2.
    """
    at_most, k = 0.0, 0
    while (at_most := at_most + comb(count, k) / 2**count) <= alpha:
        k += 1
    return k


def straggler(records: Iterable[SourceRecord], phase: str) -> StragglerView | None:
    """Return the rank among `records` of one job that is clearly slower than every other, or None.

    A rank waits in communication, so its busy time is its step time outside of communication. If communication is not
    recorded, or if the host times only launches, it is the time of bricks without gaps.

    Returns None while a running rank has too little data, because it may be equally slow. Also returns None if two
    processes have the same rank, because they are from two jobs.
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
    numbers = {rank.record.hello.rank for rank in ranks if rank.record.hello}
    if len(ranks) < 2 or len(numbers) < len(ranks):
        return None
    slowest = max(ranks, key=lambda rank: rank.median_ns)
    others = [rank for rank in ranks if rank is not slowest]
    usual_ns = median(rank.median_ns for rank in others)
    hello = slowest.record.hello
    if usual_ns <= 0 or hello is None or hello.rank is None or not all(map(slowest.is_slower_than, others)):
        return None
    excess_ns = {
        brick: brick_ns - median(rank.brick_ns.get(brick, 0.0) for rank in others)
        for brick, brick_ns in slowest.brick_ns.items()
    }
    brick = max(excess_ns, key=lambda brick: excess_ns[brick])
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
        brick=_outside_bricks(slowest, others, phase) if brick == BETWEEN_BRICKS else brick[0],
        brick_excess_us=excess_ns[brick] / 1e3,
        step_us=slowest.step_ns / 1e3,
        others_step_us=median(rank.step_ns for rank in others) / 1e3,
        others_wait=all(map(slowest.is_waited_for_by, others)),
    )


def _outside_bricks(slowest: _Rank, others: Sequence[_Rank], phase: str) -> str:
    """Return a name for the time between the slowest rank's bricks.

    In training, it is the part of the step that takes longest compared with the other ranks.
    """
    own = _parts_ns(slowest.record, phase)
    usual = [_parts_ns(other.record, phase) for other in others]
    excess_ns = {part: took - median(each.get(part, 0.0) for each in usual) for part, took in own.items()}
    part = max(excess_ns, key=lambda part: excess_ns[part], default=None)
    if part is None or excess_ns[part] <= 0 or not all(usual):
        return BETWEEN_BRICKS[0]
    if part == TrainingPart.OTHER:
        return f"the part `{part}` of its step, code of the loop itself"
    return f"the part `{part}` of its step, outside of bricks"


def _parts_ns(record: SourceRecord, phase: str) -> dict[str, float]:
    """Return the mean times of the newest training steps' parts, without communication.

    {} if unknown, or if several models have steps of this phase.
    """
    of_phase = [times for (name, _), times in record.training_times.items() if name == phase]
    if len(of_phase) != 1:
        return {}
    (times,) = of_phase
    return {part.name: part.sum_ns / times.steps for part in times.parts if part.name != TrainingPart.COMMUNICATION}


def _rank(record: SourceRecord, slices: Sequence[Slice]) -> _Rank:
    bricks = {brick for s in slices for brick in s.exclusive_ns}
    own = {brick for brick in bricks if not _is_communication(brick)}
    took_ns = {brick: [s.exclusive_ns.get(brick, 0) / s.steps for s in slices] for brick in own}
    if own != bricks and not _only_launches(record):
        took_ns[BETWEEN_BRICKS] = [max(0, s.wall_ns - sum(s.exclusive_ns.values())) / s.steps for s in slices]
    return _Rank(
        record,
        steps=sum(s.steps for s in slices),
        busy_ns=sorted(map(sum, zip(*took_ns.values(), strict=True))) if took_ns else [0.0] * len(slices),
        brick_ns={brick: median(of_slices) for brick, of_slices in took_ns.items()},
        step_ns=median(s.wall_ns / s.steps for s in slices),
    )


def _is_communication(brick: Brick) -> bool:
    name, category = brick
    return category is BrickCategory.COMMUNICATION or _COLLECTIVE.search(name) is not None


def _only_launches(record: SourceRecord) -> bool:
    """Return whether the host's times of bricks are only times of launches, because the model runs on a device."""
    return record.manifest is not None and LAUNCHES in record.manifest.backend
