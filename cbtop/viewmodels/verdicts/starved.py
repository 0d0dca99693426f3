"""Starved: the process waits for a processor in its steps, because others use them."""

from __future__ import annotations

from cbtop.protocol.vocabulary import DeviceKind
from cbtop.units import percent
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

LATEST = 10  # samples, one a second
LEAST_SAMPLES = 3
BUSY_PERCENT = 95.0  # of all processors' time
MISSING_PERCENT = 20.0  # of the time: in steps, but without a processor


def processor_times(view: SourceView) -> tuple[float, float, float] | None:
    """Three shares (%) of the last seconds: steps ran, the process had a processor, all processors worked.

    None if any of them is not known, or if the process uses a GPU: it may wait for that.
    """
    stretch = view.stretch
    if len(view.machines) != 1 or stretch is None or stretch.in_steps_us is None or not stretch.wall_us:
        return None
    (machine,) = view.machines
    if machine.gpus_of(view.key):
        return None
    row = next((row for row in machine.devices if row.device.kind is DeviceKind.CPU), None)
    process = next((one for one in machine.processes if one.source == view.key), None)
    if row is None or row.is_stale or process is None:
        return None
    busy = [each for each in row.busy_percent[-LATEST:] if each is not None]
    had = [each.cpu_percent for each in process.history[-LATEST:] if each.cpu_percent is not None]
    if min(len(busy), len(had)) < LEAST_SAMPLES:
        return None
    return 100 * stretch.in_steps_us / stretch.wall_us, sum(had) / len(had), sum(busy) / len(busy)


def is_starved(view: SourceView) -> bool:
    """Whether the process waits for a processor, so that its latency says nothing of its code."""
    found = processor_times(view)
    if found is None:
        return False
    in_steps, had, busy = found
    return busy >= BUSY_PERCENT and in_steps - had >= MISSING_PERCENT


def _find(view: SourceView) -> Finding | None:
    found = processor_times(view)
    if found is None or not is_starved(view):
        return None
    in_steps, had, busy = found
    return Finding(
        f"The process waits for a processor: steps ran {percent(in_steps)} of the time, and it had a processor "
        f"{percent(had)} of it; the machine's processors are {percent(busy)} busy",
        (
            Evidence("in steps", in_steps, "%"),
            Evidence("with a processor", had, "%"),
            Evidence("processors busy", busy, "%"),
        ),
        Subject(About.SOURCE, view.program),
    )


STARVED = Rule(
    id="starved",
    severity=Severity.WARNING,
    means="Other programs use the machine's processors. Times of steps and bricks say little about the code.",
    fires=f"The machine's processors are {BUSY_PERCENT:g} % busy or more, and the process has a processor for "
    f"{MISSING_PERCENT:g} % less of the time than its steps take. Not of a process on a GPU. Verdicts about kinds of "
    "steps and outliers are withheld then.",
    advice="Look in Devices who has the processors; stop it, or give the process processors of its own (taskset).",
    find=_find,
)
