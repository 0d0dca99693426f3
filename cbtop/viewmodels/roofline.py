"""Roofline: the measured ceilings of the machine and each brick under them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cbtop.profiler.analysis.roofline import SHARED, Distance, distance, is_unsure, roof_applies, spread_percent
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.vocabulary import Provenance
from cbtop.units import number
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.steps import StepsView

NOT_MEASURED = "not measured by this source"
NOT_ANNOUNCED = f"{NOT_MEASURED}; measure_ceilings() in its program measures them"
_CALIBRATE = "`cbtop calibrate"
LOWER_PRECISIONS = frozenset({"tf32", "bfloat16", "float16"})  # lower than float32


@dataclass(frozen=True, slots=True)
class CeilingRow:
    """A roof: `kind` is `bandwidth` or `cache` (GB/s), or `compute` (GFLOP/s)."""

    name: str
    kind: str
    value: float
    unit: str
    provenance: Provenance
    median: float | None = None  # median of the rounds; `value` is the best round
    lowest: float | None = None
    measured_on: str = ""  # date, with or without time
    load_percent: float | None = None  # use of the processors or the GPU by others during the measurement
    age_s: float | None = None
    gpu: str = ""  # its UUID; "" for processors
    dtype: str = ""  # type multiplied under a compute roof; "" if not reported
    rounds: int | None = None  # number of rounds; None if not reported
    is_short: bool = False  # measured by cbtop itself in a quiet second

    @property
    def spread_percent(self) -> float | None:
        """Distance of the median round below the best one, or None if there is only one number."""
        return spread_percent(self.value, self.median)

    @property
    def is_unsure(self) -> bool | None:
        """Whether its rounds differ so much that it is uncertain, or None if unknown."""
        return is_unsure(self.value, self.median)


@dataclass(frozen=True, slots=True)
class RidgeRow:
    """The point where a bandwidth reaches a compute ceiling. Left of it, memory is the limit."""

    bandwidth: str
    compute: str
    flop_per_byte: float
    gflops: float
    dtype: str = ""  # of the compute ceiling


@dataclass(frozen=True, slots=True)
class RooflineView:
    ceilings: tuple[CeilingRow, ...]
    points: tuple[BrickRow, ...]  # bricks with a known intensity
    without_work: tuple[str, ...]  # bricks that declare no FLOP or no bytes, so without intensity
    note: str = ""  # why ceilings are unknown, and what to do

    @property
    def has_roofs(self) -> bool:
        """Whether there is anything to hold bricks against: a bandwidth or a compute ceiling."""
        return any(ceiling.kind in ("bandwidth", "compute") for ceiling in self.ceilings)

    @property
    def ridges(self) -> tuple[RidgeRow, ...]:
        """The point where each bandwidth reaches each compute ceiling."""
        return tuple(
            RidgeRow(bandwidth.name, peak.name, peak.value / bandwidth.value, peak.value, peak.dtype)
            for peak in self.ceilings
            for bandwidth in self.ceilings
            if (peak.kind, bandwidth.kind) == ("compute", "bandwidth")
        )


def ceiling_rows(ceilings: Iterable[Ceiling], now_s: float | None = None) -> tuple[CeilingRow, ...]:
    """Return the ceilings, with their age at `now_s` (Unix time)."""
    return tuple(
        CeilingRow(
            c.name, c.kind, c.value, c.unit, c.provenance, c.median, c.lowest, c.measured_on, c.load_percent,
            None if now_s is None or c.measured_s is None else max(now_s - c.measured_s, 0.0),
            c.gpu, c.dtype, c.rounds, c.is_short,
        )
        for c in ceilings
    )  # fmt: skip


def under_roofs(
    bricks: Iterable[BrickRow], ceilings: Sequence[CeilingRow], steps: StepsView | None
) -> tuple[BrickRow, ...]:
    """Return every brick with its distance from its roof, if its work and both roofs are known.

    If steps ran concurrently, the limit of a single one is unknown: together they may reach the roof.
    """
    bandwidths = [ceiling for ceiling in ceilings if ceiling.kind == "bandwidth"]
    roofs = [(row, _roof(row, peaks_over(row, ceilings), bandwidths)) for row in bricks]
    if steps is not None and steps.overlap:
        roofs = [(row, roof and replace(roof, bound=SHARED)) for row, roof in roofs]
    return tuple(with_parts(row, roof=roof) for row, roof in roofs)


def peaks_over(brick: BrickRow, ceilings: Iterable[CeilingRow]) -> list[CeilingRow]:
    """Return the compute roofs for the types that a brick multiplies.

    Empty if one of its types has no roof, because that roof may be the highest.
    """
    peaks = [ceiling for ceiling in ceilings if ceiling.kind == "compute"]
    over = [[peak for peak in peaks if roof_applies(dtype, peak.dtype)] for dtype in brick.dtypes or ("",)]
    return [peak for peak in peaks if any(peak in own for own in over)] if all(over) else []


def advice_at_a_peak(brick: BrickRow, ceilings: Iterable[CeilingRow]) -> str:
    """Return what to do about a brick that computes as fast as the machine can.

    A lower precision is advised if it multiplies float32 and the machine was measured to be faster in one.
    """
    ceilings = list(ceilings)
    here = max((peak.value for peak in peaks_over(brick, ceilings)), default=None)
    faster = [one for one in ceilings if one.kind == "compute" and one.dtype in LOWER_PRECISIONS]
    best = max(faster, key=_value, default=None)
    if brick.dtypes != ("float32",) or best is None or here is None or best.value <= here:
        return "Compute less."
    rate = f"{number(best.value)} {best.unit}"
    return f"Compute less, or in a lower precision: {best.dtype} was measured to reach {rate} here."


def shared_note(steps: StepsView | None) -> str:
    """Return a note that steps share the roofs, or "" if they ran one after the other."""
    if steps is None or not steps.overlap:
        return ""
    return (
        f"{number(steps.at_once)} {steps.phase} steps ran at once and share every roof: of one brick it is not said "
        "what limits it"
    )


def roofline(ceilings: Sequence[CeilingRow], bricks: Sequence[BrickRow], note: str = "") -> RooflineView:
    """Return every brick that declares FLOP and bytes as a point, the others by name."""
    return RooflineView(
        ceilings=tuple(ceilings),
        points=tuple(brick for brick in bricks if _is_point(brick)),
        without_work=tuple(brick.name for brick in bricks if not _is_point(brick)),
        note=note,
    )


def note_of_then(said: str) -> str:
    """Return what a process said about its roofs, without advice to measure them: a recording keeps those it has."""
    if _CALIBRATE not in said:
        return said
    why = "; ".join(clause for clause in said.split("; ") if _CALIBRATE not in clause)
    return f"{why or 'none were known'} when this was recorded"


def missing_ceilings(view: RooflineView) -> str:
    """Return which kinds of ceilings are unknown and why, or "" if all that apply to the bricks are known."""
    kinds = {ceiling.kind for ceiling in view.ceilings}
    missing = [name for name in ("bandwidth", "compute") if name not in kinds]
    if "compute" in kinds:
        missing += [f"{dtype} compute" for dtype in _without_peak(view)]
    return f"{' and '.join(missing)} ceiling n/a: {view.note or NOT_MEASURED}" if missing else ""


def _without_peak(view: RooflineView) -> list[str]:
    """Return the types that bricks multiply but no compute roof covers."""
    peaks = [ceiling for ceiling in view.ceilings if ceiling.kind == "compute"]
    dtypes = {dtype for point in view.points for dtype in point.dtypes}
    return sorted(one for one in dtypes if not any(roof_applies(one, peak.dtype) for peak in peaks))


def _is_point(brick: BrickRow) -> bool:
    return brick.intensity is not None and brick.gflops is not None and brick.gb_per_sec is not None


def _roof(brick: BrickRow, peaks: Sequence[CeilingRow], bandwidths: Sequence[CeilingRow]) -> Distance | None:
    if brick.intensity is None or brick.gflops is None:
        return None
    found = distance(brick.intensity, brick.gflops, [c.value for c in peaks], [c.value for c in bandwidths])
    if found is None:
        return None
    highest = max(peaks, key=_value)
    above = highest if found.attainable_gflops >= highest.value else max(bandwidths, key=_value)
    return replace(found, is_unsure=above.is_unsure)


def _value(ceiling: CeilingRow) -> float:
    return ceiling.value
