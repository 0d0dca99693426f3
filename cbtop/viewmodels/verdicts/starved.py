"""Verdict "starved": the process waits for a processor, because other programs use all of them."""

from __future__ import annotations

from cbtop.protocol.vocabulary import DeviceKind
from cbtop.units import percent
from cbtop.viewmodels.devices import LATEST, LEAST_SAMPLES
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

# Least load in percent of all processors together, if the kernel does not report waits.
BUSY_PERCENT = 95.0
# The process waits for a processor in at least this percentage of the last seconds. If the kernel does not report
# waits, this is the time of steps without a processor.
MISSING_PERCENT = 20.0
# Long steps are explained by waiting for a processor if these waits take at least this part of the extra time.
EXPLAINED = 0.5


def processor_times(view: SourceView) -> tuple[float, float, float] | None:
    """Return in percent of the last seconds: steps ran, the process had a processor, all processors were busy.

    None if one is unknown, or if the process uses a GPU, because it may wait for the GPU.
    """
    time_range = view.time_range
    if len(view.machines) != 1 or time_range is None or time_range.in_steps_us is None or not time_range.wall_us:
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
    return 100 * time_range.in_steps_us / time_range.wall_us, sum(had) / len(had), sum(busy) / len(busy)


def is_explained_by_waiting(view: SourceView, longer_percent: float) -> bool:
    """Return whether waits for a processor may explain the extra time of long steps, which is `longer_percent` of all
    step time.
    """
    return view.waiting_percent is not None and view.waiting_percent >= EXPLAINED * longer_percent


def why_starved(view: SourceView) -> str:
    """Return a clause that says how long the process waited for a processor."""
    waited = view.waiting_percent
    if waited is None:
        found = processor_times(view)
        waited = found[0] - found[1] if found is not None else None
    return f"the process waited for a processor {percent(waited)} of the time"


def _find(view: SourceView) -> Finding | None:
    waited = view.waiting_percent
    if waited is not None:
        return _by_the_kernel(view, waited) if waited >= MISSING_PERCENT else None
    found = processor_times(view)
    if found is None:
        return None
    in_steps, had, busy = found
    if busy < BUSY_PERCENT or in_steps - had < MISSING_PERCENT:
        return None
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


def _by_the_kernel(view: SourceView, waited: float) -> Finding:
    return Finding(
        f"The process waits for a processor: its busiest thread could run but had none {percent(waited)} of the time",
        (Evidence("waited for a processor", waited, "%"),),
        Subject(About.SOURCE, view.program),
    )


STARVED = Rule(
    id="starved",
    severity=Severity.WARNING,
    means="Other programs use the processors of the process. Times of steps and bricks say little about the code.",
    fires=f"The kernel reports that its busiest thread waited for a processor {MISSING_PERCENT:g} % or more of the "
    f"last seconds. If the kernel does not report it: the machine's processors are {BUSY_PERCENT:g} % busy or more, "
    f"the process has a processor for {MISSING_PERCENT:g} % less of the time than its steps take, and it uses no "
    "GPU. Verdicts about latency are then withheld, and those about bimodal times, outliers and warm-up also if "
    f"waits may explain {100 * EXPLAINED:g} % of what the longer steps take more.",
    advice="See in Devices which program has the processors. Stop it, or give the process its own processors "
    "(taskset, a larger container limit). Or it has too many threads (torch.set_num_threads). "
    "Until then, verdicts on latency are withheld.",
    find=_find,
)
