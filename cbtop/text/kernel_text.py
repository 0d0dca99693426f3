"""Write the kernels that were recorded in a few steps (a burst), and the critical path of a graph."""

from __future__ import annotations

from cbtop.protocol.kernel_messages import KernelTimes
from cbtop.units import NOT_MEASURED, count, counted, duration, number
from cbtop.viewmodels.graph import CriticalPathView
from cbtop.viewmodels.kernels import BurstView, Waves


def critical_path(found: CriticalPathView) -> str:
    """Format a critical path: `critical path 1.20 ms, 5 of 9 timed nodes (derived, of the mean run)`."""
    if found.unknown:
        return f"critical path {NOT_MEASURED}: {found.unknown}"
    nodes = f"{count(found.nodes)} of {count(found.timed_nodes)} timed nodes"
    return f"critical path {duration(found.total_us)}, {nodes} (derived, of the mean run)"


def in_burst(times: KernelTimes) -> str:
    """Format the times of a kernel in a burst (a few recorded steps): `2.10 µs ± 0.05, 1 a step, in a burst of 3
    steps`. A single launch has no deviation.
    """
    deviation = f" ± {number(times.deviation_ns / 1e3)}" if times.launches > 1 else ""
    launches = number(times.launches / times.steps).removesuffix(".00")
    burst = f"in a burst of {counted(times.steps, 'step')}"
    return f"{number(times.mean_ns / 1e3)} µs{deviation}, {launches} a step, {burst}"


def waves(found: Waves) -> str:
    """Format the waves of a kernel launch: `2.10, the last 10 % full (132 × 8 blocks a wave)`."""
    size = f"{found.multiprocessors} × {found.blocks_per_multiprocessor} blocks a wave"
    return f"{number(found.waves)}, the last {100 * found.tail:.0f} % full ({size})"


def burst(found: BurstView) -> list[str]:
    """Return a line for each phase of a burst (a few recorded steps), such as `decode: 3 steps recorded of pid 7, 8
    launches a step, 12 µs in …`.
    """
    heads = [
        f"{phase.phase}: {counted(phase.steps, 'step')} recorded of pid {found.pid}, "
        f"{per_step(phase.launches_per_step)} launches a step, {duration(phase.us_per_step)} in kernels"
        for phase in found.phases
    ]
    return heads or [f"{counted(found.steps, 'step')} recorded of pid {found.pid}, and no kernel in them"]


def burst_notes(found: BurstView) -> list[str]:
    """Return notes about kernels that were recorded but are not part of the numbers."""
    notes = (
        (found.unplaced, "launches in no call of a module that is known"),
        (found.lost, "records lost"),
        (found.left_out, "launches left out: too many different ones"),
    )
    return [f"{count(number)} {what}" for number, what in notes if number]


def per_step(launches: float) -> str:
    """Format the number of launches of a kernel per step: `8`, `2.7`."""
    return f"{launches:,.0f}" if launches == round(launches) else f"{launches:,.1f}"
