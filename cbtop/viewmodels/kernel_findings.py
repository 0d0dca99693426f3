"""Find losses in kernel launches, from their waves (derived). The kernel with the most time comes first."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.viewmodels.kernels import KernelRow, PhaseKernels, Waves

# A loss is reported if at least this share of the room in all waves is empty.
LEAST_EMPTY = 0.2


@dataclass(frozen=True, slots=True)
class KernelFinding:
    """A loss in the launches of a kernel. `us_per_step` is their measured time.

    The loss itself is not measured.
    """

    brick: str
    kernel: str
    what: str
    us_per_step: float


def findings_of(phase: PhaseKernels) -> tuple[KernelFinding, ...]:
    """Return the losses in a phase's kernel launches, by the kernel's measured time in a step, longest first."""
    found = [
        KernelFinding(f"{brick.brick} {brick.label}".strip(), row.name, what, row.us_per_step)
        for brick in phase.bricks
        for row in brick.kernels
        if (what := _loss(row))
    ]
    return tuple(sorted(found, key=lambda one: -one.us_per_step))


def _loss(row: KernelRow) -> str:
    waves = row.waves
    if waves is None:
        return ""
    if waves.blocks < waves.multiprocessors:
        idle = waves.multiprocessors - waves.blocks
        return f"{waves.blocks} blocks for {waves.multiprocessors} multiprocessors: {idle} have nothing to do"
    return _tail(waves) if waves.waves > 1 and waves.empty >= LEAST_EMPTY else ""


def _tail(waves: Waves) -> str:
    size = f"{waves.multiprocessors} x {waves.blocks_per_multiprocessor} blocks"
    return f"{waves.waves:.2f} waves of {size}: the last is {100 * waves.tail:.0f} % full"
