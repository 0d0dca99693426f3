"""The roofline: the measured roofs (speed limits) of the machine, and how far each brick is below them."""

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
ONLY_ON_GPUS = frozenset({"float16", "tf32"})  # For these data types, a compute roof is only measured on GPUs.
NEVER_MEASURED = "cbtop measures such products only on GPUs"
LOWER_PRECISIONS = frozenset({"tf32", "bfloat16", "float16"})  # These data types have a lower precision than float32.


@dataclass(frozen=True, slots=True)
class CeilingRow:
    """A roof (speed limit of the machine): `bandwidth` or `cache` in GB/s, or `compute` in GFLOP/s."""

    name: str
    kind: str
    value: float
    unit: str
    provenance: Provenance
    median: float | None = None  # median of the measured rounds; `value` is the best round
    lowest: float | None = None
    measured_on: str = ""  # date of the measurement, with or without time of day
    # How busy other programs kept the processors or the GPU during the measurement.
    load_percent: float | None = None
    age_s: float | None = None
    gpu: str = ""  # UUID of the GPU, or "" for processors
    dtype: str = ""  # compute roof: data type of the measured matrix products, or "" if not reported
    rounds: int | None = None  # number of measured rounds; None if not reported
    is_short: bool = False  # whether cbtop has measured the roof by itself, while the machine was quiet

    @property
    def spread_percent(self) -> float | None:
        """How far the median round of the measurement is below the best, in percent. None if one of them is
        unknown.
        """
        return spread_percent(self.value, self.median)

    @property
    def is_unsure(self) -> bool | None:
        """Whether the roof is uncertain because its rounds differ too much. None if unknown."""
        return is_unsure(self.value, self.median)


@dataclass(frozen=True, slots=True)
class RidgeRow:
    """The intensity at which a bandwidth line reaches a compute roof. Below it, memory is the limit."""

    bandwidth: str
    compute: str
    flop_per_byte: float
    gflops: float
    dtype: str = ""  # data type of the compute roof's measurement


@dataclass(frozen=True, slots=True)
class RooflineView:
    ceilings: tuple[CeilingRow, ...]
    points: tuple[BrickRow, ...]  # bricks with a known intensity (FLOP per byte): the points in the plot
    # Names of bricks that do not declare both FLOP and bytes, so their intensity is unknown.
    without_work: tuple[str, ...]
    note: str = ""  # why some roofs are unknown, with advice

    @property
    def has_roofs(self) -> bool:
        """Whether bricks can be compared with a roof: bandwidth or compute."""
        return any(ceiling.kind in ("bandwidth", "compute") for ceiling in self.ceilings)

    @property
    def ridges(self) -> tuple[RidgeRow, ...]:
        """The ridge points: one for each pair of a bandwidth roof and a compute roof."""
        return tuple(
            RidgeRow(bandwidth.name, peak.name, peak.value / bandwidth.value, peak.value, peak.dtype)
            for peak in self.ceilings
            for bandwidth in self.ceilings
            if (peak.kind, bandwidth.kind) == ("compute", "bandwidth")
        )


def ceiling_rows(ceilings: Iterable[Ceiling], now_s: float | None = None) -> tuple[CeilingRow, ...]:
    """Return the roofs as rows, with their age at `now_s` (Unix time)."""
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
    """Return the bricks with their distances from the roofs, if their work and both kinds of roofs are known.

    Steps that ran at the same time share the roofs, so the limit of a single brick is then unknown.
    """
    bandwidths = [ceiling for ceiling in ceilings if ceiling.kind == "bandwidth"]
    roofs = [(row, _roof(row, peaks_over(row, ceilings), bandwidths)) for row in bricks]
    if steps is not None and steps.overlap:
        roofs = [(row, roof and replace(roof, bound=SHARED)) for row, roof in roofs]
    return tuple(with_parts(row, roof=roof) for row, roof in roofs)


def peaks_over(brick: BrickRow, ceilings: Iterable[CeilingRow]) -> list[CeilingRow]:
    """Return the compute roofs for the data types that a brick multiplies.

    [] if one of these types has no roof, because it may be the highest.
    """
    peaks = [ceiling for ceiling in ceilings if ceiling.kind == "compute"]
    over = [[peak for peak in peaks if roof_applies(dtype, peak.dtype)] for dtype in brick.dtypes or ("",)]
    return [peak for peak in peaks if any(peak in own for own in over)] if all(over) else []


def advice_at_a_peak(brick: BrickRow, ceilings: Iterable[CeilingRow]) -> str:
    """Return advice for a brick that computes as fast as the machine can.

    If it multiplies float32 and a lower precision was measured to be faster: use that.
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
    """Return a note if steps ran at the same time and share the roofs, else ""."""
    if steps is None or not steps.overlap:
        return ""
    return (
        f"{number(steps.at_once)} {steps.phase} steps ran at once and share every roof: of one brick it is not said "
        "what limits it"
    )


def roofline(ceilings: Sequence[CeilingRow], bricks: Sequence[BrickRow], note: str = "") -> RooflineView:
    """Return the roofline view. Bricks with FLOP and bytes are points. The others are only named."""
    return RooflineView(
        ceilings=tuple(ceilings),
        points=tuple(brick for brick in bricks if _is_point(brick)),
        without_work=tuple(brick.name for brick in bricks if not _is_point(brick)),
        note=note,
    )


def note_of_then(said: str) -> str:
    """Return what a process says about its roofs. Advice to measure them is left out, because a recording's roofs
    cannot change.
    """
    if _CALIBRATE not in said:
        return said
    why = "; ".join(clause for clause in said.split("; ") if _CALIBRATE not in clause)
    return f"{why or 'none were known'} when this was recorded"


def missing_ceilings(view: RooflineView) -> str:
    """Return which roofs are unknown, and why. "" if all needed ones are known."""
    kinds = {ceiling.kind for ceiling in view.ceilings}
    missing = [name for name in ("bandwidth", "compute") if name not in kinds]
    dtypes = _without_peak(view.points, view.ceilings) if "compute" in kinds else []
    never = _never_measured(dtypes, view.ceilings)
    missing += [f"{dtype} compute" for dtype in dtypes if dtype not in never]
    said = [f"{' and '.join(missing)} ceiling n/a: {view.note or NOT_MEASURED}"] if missing else []
    return "; ".join(said + ([f"{' and '.join(never)} compute ceiling n/a: {NEVER_MEASURED}"] if never else []))


def why_no_roof(brick: BrickRow, ceilings: Sequence[CeilingRow]) -> str:
    """Return why no compute roof applies to the brick. "" if one does, or if none was measured."""
    if not any(ceiling.kind == "compute" for ceiling in ceilings):
        return ""
    dtypes = _without_peak([brick], ceilings)
    if not dtypes:
        return ""
    is_never = dtypes == _never_measured(dtypes, ceilings)
    return f"no compute roof in {' or '.join(dtypes)}: {NEVER_MEASURED if is_never else NOT_MEASURED}"


def _without_peak(bricks: Iterable[BrickRow], ceilings: Iterable[CeilingRow]) -> list[str]:
    """Return the data types that bricks multiply and for which there is no compute roof."""
    peaks = [ceiling for ceiling in ceilings if ceiling.kind == "compute"]
    dtypes = {dtype for brick in bricks for dtype in brick.dtypes}
    return sorted(one for one in dtypes if not any(roof_applies(one, peak.dtype) for peak in peaks))


def _never_measured(dtypes: Iterable[str], ceilings: Iterable[CeilingRow]) -> list[str]:
    """Return the `dtypes` without a measured compute roof of a processor. [] if `ceilings` has a GPU's roof."""
    if any(ceiling.gpu for ceiling in ceilings):
        return []
    return [dtype for dtype in dtypes if dtype in ONLY_ON_GPUS]


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
