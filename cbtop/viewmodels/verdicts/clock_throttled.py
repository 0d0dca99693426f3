"""Verdict "clock throttled": a GPU of the process runs below its highest clock."""

from __future__ import annotations

from cbtop.units import percent, whole
from cbtop.viewmodels.devices import DeviceRow
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

# The clock is at least this many percent below its maximum. The power limit always lowers it by about one percent.
SLOWED_PERCENT = 5.0


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
        f"GPU {row.label} is slowed by its {device.slowed_by}: {whole(device.clock_mhz)} of "
        f"{whole(device.clock_max_mhz)} MHz, {percent(lost_percent)} less{more}",
        tuple(evidence),
        Subject(About.DEVICE, row.label),
    )


def _slowed_percent(row: DeviceRow) -> float | None:
    """Return how many percent a GPU's clock is below its maximum.

    None if the driver reports no reason, or if the difference is small or unknown.
    """
    device = row.device
    if not device.slowed_by or not device.clock_mhz or not device.clock_max_mhz:
        return None
    lost = 100 * (1 - device.clock_mhz / device.clock_max_mhz)
    return lost if lost > SLOWED_PERCENT else None


CLOCK_THROTTLED = Rule(
    id="clock-throttled",
    severity=Severity.WARNING,
    means="The driver lowers the clock of a GPU because of its power cap, heat or a setting. Times are worse than "
    "the hardware allows, and two runs do not compare.",
    fires=f"A GPU of the process reports a reason for slowing down and runs over {SLOWED_PERCENT:g} % below its "
    "highest clock.",
    advice="See its power, limit and temperature (view Devices). Raise the cap, cool the GPU, or compare at a fixed "
    "clock.",
    find=_find,
)
