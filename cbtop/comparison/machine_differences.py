"""Find what changes times between two runs of the same program: another machine, other sampling, or lost records."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.comparison.baseline import Surroundings
from cbtop.comparison.comparison import MAX_LOST_PERCENT
from cbtop.comparison.runs import Run
from cbtop.protocol.vocabulary import BY_KERNELS
from cbtop.units import count, percent

ALIKE_CLOCK = 0.03  # GPU clocks are equal up to this relative difference.
ALIKE_PACE = 0.10  # The new run's pace may be this far outside of the baseline's range (relative).
# If less than one step in RARELY is recorded, not even a p99 of steps depends on how many are. That number follows
# the cost of recording, so it is rarely the same in two runs.
RARELY, ALIKE_SAMPLING = 100, 0.25
# Processor loads are equal up to this many percentage points.
ALIKE_LOAD_POINTS = 15


def losses(base: Run, now: Run, base_name: str = "the baseline") -> str:
    """Return a text if one of the runs lost too many records, else ""."""
    for whose, run in (("", now), (f"of {base_name} ", base)):
        if run.lost_percent > MAX_LOST_PERCENT:
            return f"{percent(run.lost_percent)} of the records {whose}were lost"
    return ""


def other_machine(base: Run, now: Run, base_name: str = "the baseline") -> str:
    """Return a text if the machine, the sampling or the GPU clock differs between the runs, else ""."""
    for what, was, other in _machine(base.surroundings, now.surroundings):
        if was != other:
            return f"another {what}: {other or 'none'}, {base_name} has {was or 'none'}"
    return other_clock(base, now, base_name)


def other_clock(base: Run, now: Run, base_name: str = "the baseline") -> str:
    """Return a text if a GPU ran at a different clock. "" if the clocks are about equal or unknown."""
    if base.gpu_clock_mhz is None or now.gpu_clock_mhz is None:
        return ""
    if abs(now.gpu_clock_mhz - base.gpu_clock_mhz) <= ALIKE_CLOCK * base.gpu_clock_mhz:
        return ""
    return f"another GPU clock: {count(now.gpu_clock_mhz)} MHz, of {base_name} {count(base.gpu_clock_mhz)}"


def other_pace(base: Run, now: Run) -> str:
    """Return a text if the machine's pace in the new run was outside of the baseline's range. "" if not, or if
    unknown.

    The pace is the time of constant work, directly before and after a run.
    """
    for where in ("cache", "memory"):
        was, is_now = (sorted(getattr(pace, f"{where}_us") for pace in run.paces) for run in (base, now))
        if was and is_now and (is_now[0] > (1 + ALIKE_PACE) * was[-1] or was[0] > (1 + ALIKE_PACE) * is_now[-1]):
            return (
                f"another pace of the machine itself: the same work in its {where} took {count(is_now[0])} to "
                f"{count(is_now[-1])} µs before and behind this run, {count(was[0])} to {count(was[-1])} of the "
                "baseline"
            )
    return ""


def other_load(base: Run, now: Run) -> str:
    """Return a text if the processors' load differs from the baseline. "" if it is about equal or unknown."""
    if base.host_busy_percent is None or now.host_busy_percent is None:
        return ""
    if abs(now.host_busy_percent - base.host_busy_percent) <= ALIKE_LOAD_POINTS:
        return ""
    return f"processors busy {percent(now.host_busy_percent)} of the time, were {percent(base.host_busy_percent)}"


def _machine(then: Surroundings, now: Surroundings) -> Iterator[tuple[str, str, str]]:
    """Yield (name, old value, new value) for each difference of machine or sampling that affects times."""
    yield "host", then.host, now.host
    yield "GPU", ", ".join(then.devices), ", ".join(now.devices)
    if not _is_sampled_alike(then, now):
        yield "part of steps recorded, one in", count(then.sample_every), count(now.sample_every)


def _is_sampled_alike(then: Surroundings, now: Surroundings) -> bool:
    """Whether the steps of two runs took about the same time for recording."""
    rarest, most_often = (of_both(then.sample_every, now.sample_every) for of_both in (max, min))
    if rarest <= (1 + ALIKE_SAMPLING) * most_often or most_often >= RARELY:
        return True
    return all(BY_KERNELS in (run.backend or "") for run in (then, now))  # recorded steps are as long as plain ones
