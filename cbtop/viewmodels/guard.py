"""The report of the guard, which looks for values that are not finite in the outputs of bricks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.protocol.guard_messages import UNKNOWN, GuardedSteps, GuardFault


@dataclass(frozen=True, slots=True)
class GuardFaultView:
    """The first brick with a faulty output, in the first such step."""

    kind: str  # NaN, Inf or "over the bound".
    brick: str | None  # None if the output of a layer was faulty, and those of its bricks were not.
    module: str | None  # Its name in the model, such as `layers.2.mlp.down_proj`.
    layer: int | None  # None outside of layers.
    phase: str
    step: int  # The first step of a phase is 1.
    last_step: int  # The latest faulty step of the phase.
    input: str | None  # "finite" or "faulty". None if it got no tensor that was checked.
    inside: str | None  # With a faulty input: the innermost module around it with a finite input.
    weight: str | None  # Its first weight that is not finite.
    file: str | None  # Path of its saved inputs.


@dataclass(frozen=True, slots=True)
class GuardView:
    """The steps that the guard has checked."""

    model: str | None  # None if the process runs only one.
    steps: int | None  # All steps, checked or not. None if not known.
    checked: int
    faulty: int
    fault: GuardFaultView | None


def guard_view(reports: Iterable[GuardedSteps]) -> GuardView | None:
    """Return the report of the model with a fault, or of the first model. None without a guard."""
    found = sorted(reports, key=lambda report: report.fault is None)
    if not found:
        return None
    first = found[0]
    fault = None if first.fault is None else _fault(first.fault)
    return GuardView(first.model or None, first.steps or None, first.checked, first.faulty, fault)


def _fault(fault: GuardFault) -> GuardFaultView:
    return GuardFaultView(
        fault.kind,
        fault.brick or None,
        fault.module or None,
        fault.layer,
        fault.phase,
        fault.step,
        fault.last_step,
        None if fault.given == UNKNOWN else fault.given,
        fault.inside or None,
        fault.weight or None,
        fault.file or None,
    )
