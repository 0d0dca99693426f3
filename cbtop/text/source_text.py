"""Write the state of processes and daemons as short texts."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.protocol.vocabulary import SourceStatus
from cbtop.units import NONE_THERE, NOT_MEASURED, count, counted, duration, percent, size_bytes
from cbtop.viewmodels.guard import GuardView
from cbtop.viewmodels.merged import TroubledMember
from cbtop.viewmodels.not_instrumented import not_instrumented as not_instrumented_in
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.sources import ClockView, ProcessCost, SourceRow
from cbtop.viewmodels.stall import StallKind, StallView
from cbtop.viewmodels.verdict import Withheld

_MAX_PIDS = 3  # A list of processes names at most this many pids.

# maps the JSON key of a source's figure to its title in the list of sources
SOURCE_FIGURES = {
    "model": "model",
    "tokens_per_sec": "tokens/s",
    "rate_change": "Δ",
    "steps_per_sec": "steps/s",
    "lag_s": "lag",
    "clock_offset_us": "clock",
    "devices": "on",
    "overhead_percent": "recording costs",
}

# If this share of the steps is checked, more overhead does not help: the rest failed, or measures the cost.
ALL_BUT_A_FEW = 0.9


def process_cost(cost: ProcessCost) -> str:
    """Format the cost of a cbtop process: `this viewer 3.4 % of a core over 10.0 s, 84.1 MB`."""
    if cost.cpu_percent is None and cost.resident_bytes is None:
        return f"{cost.name} {NOT_MEASURED}: {cost.why}"
    over = f" over {cost.over_s:.1f} s" if cost.over_s else ""
    core = NOT_MEASURED if cost.cpu_percent is None else f"{percent(cost.cpu_percent)} of a core{over}"
    why = f" ({cost.why})" if cost.why else ""
    return f"{cost.name} {core}{why}, {size_bytes(cost.resident_bytes)}"


def unknown_figures(rows: Sequence[SourceRow]) -> list[str]:
    """Return a line for each reason why a figure is unknown.

    The line names the figure and all processes with this reason: `recording costs of pid 7, pid 8: it does not
    measure …`.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for unknown in row.unknown:
            found.setdefault((SOURCE_FIGURES[unknown.figure], unknown.why), []).append(f"pid {row.pid}")
    return [f"{figure} of {_some(pids)}: {why}" for (figure, why), pids in found.items()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_PIDS} more" if len(names) > _MAX_PIDS else ""
    return ", ".join(names[:_MAX_PIDS]) + more


def lag(row: SourceRow) -> str:
    """Format the age of a process's newest data: `0.1 s`. Return a dash if the process has ended."""
    if row.state is not SourceStatus.LIVE:
        return NONE_THERE
    return NOT_MEASURED if row.lag_s is None else f"{row.lag_s:.1f} s"


def clock(found: ClockView | None) -> str:
    """Format the offset of a host's clock: `3.21 ms ahead ± 110.0 µs`. Return a dash if its clock is ours."""
    if found is None:
        return NOT_MEASURED
    return clock_offset(found.offset_us, found.uncertainty_us) if found.uncertainty_us else NONE_THERE


def clock_offset(offset_us: float, uncertainty_us: float) -> str:
    """Format the offset between the clock of a remote host and ours: `3.21 ms ahead ± 110.0 µs`."""
    direction = "ahead" if offset_us >= 0 else "behind"
    return f"{duration(abs(offset_us))} {direction} ± {duration(uncertainty_us)}"


def on_devices(row: SourceRow) -> str:
    """Format the devices of a process: `GPU 0–3`, `cpu`. Return a dash if the process has ended."""
    if row.state is not SourceStatus.LIVE:
        return NONE_THERE
    if row.devices is None:
        return NOT_MEASURED
    return "cpu" if row.devices == ("cpu",) else f"GPU {labels(row.devices)}"


def stale_sampler(sampler: str, age_s: float) -> str:
    """Format how long a sampler has been silent: `nvml has not answered for 12 s: its figures are so old`."""
    return f"{sampler} has not answered for {age_s:.0f} s: its figures are so old"


def labels(found: Sequence[str]) -> str:
    """Join consecutive labels of devices: `0`, `1`, `2` become `0–2`. Other labels are listed one by one."""
    numbers = [int(label) for label in found if label.isdecimal()]
    if len(numbers) == len(found) > 2 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        return f"{numbers[0]}–{numbers[-1]}"
    return ", ".join(found)


def stale(seconds: float) -> str:
    """Format the time since a daemon's last message: `nothing heard for 12 s`."""
    return f"nothing heard for {seconds:.0f} s"


def standing(view: SourceView | SourceRow) -> str:
    """Format the state of a process in capitals: `LIVE` or `GONE`. A stall has its duration: `STALLED 32 s`."""
    age = f" {view.stall.age_s:.0f} s" if view.stall else ""
    return f"{view.standing.upper()}{age}"


def stall(found: StallView) -> str:
    """Format a stall of a process: `stalled for 32 s in decode → Layer 17 → AllReduce (p99 of every decode: 12.3
    ms)`.
    """
    place, after = " → ".join(found.place), " → ".join(found.after)
    member = f"{found.member}: " if found.member else ""
    # A process may have stalled before it was suspended, so the text mentions the suspension and the stall.
    standing = "suspended, without progress" if found.word is StallKind.SUSPENDED else found.word
    parts = [f"{member}{standing} for {found.age_s:.0f} s{f' in {place}' if place else ''}"]
    if after:
        parts.append(f", after {after}")
    if found.threads > 1:
        parts.append(f", begun last of {found.threads} threads or tasks that are in something")
    if found.why:
        parts.append(f": {found.why}")
    if found.usual_s is not None:
        parts.append(f" (p99 of every {found.usual_of}: {duration(1e6 * found.usual_s)})")
    return "".join(parts)


def troubled(found: TroubledMember) -> str:
    """Format the problem of a process in a merge: `rank 2: suspended for 20 s`, `rank 3: gone: it left`."""
    if found.stall is not None:
        return stall(found.stall)
    return f"{found.name}: {found.state}{f': {found.reason}' if found.reason else ''}"


def withheld(found: Withheld | None) -> str:
    """Return how many verdicts are withheld, and why. Return "" if none are withheld."""
    if found is None:
        return ""
    number = counted(len(found.ids), "verdict")
    return f"withheld: {number} on {found.about} ({', '.join(found.ids)}), because {found.reason}"


def guarded(guard: GuardView) -> str:
    """Return a text about the guard (the check for wrong values), such as `guard: checked 23 of 200 steps, no fault;
    --overhead 100% checks nearly all`.
    """
    of = "" if guard.steps is None else f"{count(guard.checked)} of "
    fault = f"{count(guard.faulty)} faulty" if guard.faulty else "no fault"
    hint = "; --overhead 100% checks nearly all" if guard.checked < ALL_BUT_A_FEW * (guard.steps or 0) else ""
    return f"guard: checked {of}{counted(guard.steps or guard.checked, 'step')}, {fault}{hint}"


def not_instrumented(view: SourceView) -> str:
    """Return a line about the time of steps outside of bricks, or "" if its share is small."""
    found = not_instrumented_in(view)
    if found is None:
        return ""
    parts = ", ".join(f"{part.name} {duration(part.us)}" for part in found.parts)
    return f"not instrumented: {percent(found.percent)} of the step time ({parts}): {found.why}"
