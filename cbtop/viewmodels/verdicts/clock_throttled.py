"""Clock throttled: a GPU it uses is held below its clock."""

from __future__ import annotations

from cbtop.units import percent, whole
from cbtop.viewmodels.devices import DeviceRow
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

SLOWED_PERCENT = 5.0  # so much below its maximum: the last percent of a clock is its power limit's play, always


def _find(view: SourceView) -> Finding | None:
    slowed = [(row, found) for row in view.gpus if not row.is_stale and (found := _slowed_percent(row)) is not None]
    if not slowed:
        return None
    row, lost_percent = max(slowed, key=lambda one: one[1])
    device = row.device
    evidence = [Evidence("below its maximum", lost_percent, "%")]
    evidence += [
        Evidence(name, value, "MHz")
        for name, value in (("clock", device.clock_mhz), ("highest clock", device.clock_max_mhz))
        if value is not None
    ]
    more = f"; so are {len(slowed) - 1} more of its GPUs" if len(slowed) > 1 else ""
    return Finding(
        f"GPU {row.label} is held down by its {device.slowed_by}: {whole(device.clock_mhz)} of "
        f"{whole(device.clock_max_mhz)} MHz, {percent(lost_percent)} less{more}",
        tuple(evidence),
        Subject(About.DEVICE, row.label),
    )


def _slowed_percent(row: DeviceRow) -> float | None:
    """How far its clock is held below the maximum; None where it is not, or that is not known."""
    device = row.device
    if not device.slowed_by or not device.clock_mhz or not device.clock_max_mhz:
        return None
    lost = 100 * (1 - device.clock_mhz / device.clock_max_mhz)
    return lost if lost > SLOWED_PERCENT else None


CLOCK_THROTTLED = Rule(
    id="clock-throttled",
    severity=Severity.WARNING,
    means="The driver holds the clock of a GPU down, by its power cap, heat or a setting: times are not those of the "
    "hardware at its best, and two runs do not compare.",
    fires=f"A GPU that it uses names what slows it and runs over {SLOWED_PERCENT:g} % below its highest clock.",
    advice="See its power, limit and temperature (view Devices): raise the cap, cool it, or compare at a fixed "
    "clock.",
    find=_find,
)
