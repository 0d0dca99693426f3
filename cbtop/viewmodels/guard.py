"""View of the guard, which looks for values that are not finite (NaN or Inf) in the outputs of bricks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.protocol.guard_messages import UNKNOWN, GuardedSteps, GuardFault


@dataclass(frozen=True, slots=True)
class GuardFaultView:
    """The guard's first fault: the brick with a faulty output in the first faulty step."""

    kind: str  # the kind of the fault: NaN, Inf or "over the bound"
    # Name of the brick. None if the output of a layer was faulty, but all outputs of its bricks were valid.
    brick: str | None
    module: str | None  # the name of the brick's module in the model, such as `layers.2.mlp.down_proj`
    layer: int | None  # number of the layer; None outside of layers
    phase: str
    step: int  # number of the faulty step in its phase, from 1
    last_step: int  # number of the latest faulty step of the phase
    # Whether the brick's input was "finite" or "faulty". None if none of its tensors was checked.
    input: str | None
    inside: str | None  # If the input was faulty: the innermost module around the brick with a finite input.
    weight: str | None  # the brick's first weight that is not finite
    file: str | None  # path of the file with the brick's saved inputs


@dataclass(frozen=True, slots=True)
class GuardView:
    """How many steps of a model the guard has checked, and the first fault that it found."""

    model: str | None  # name of the model; None if the process runs only one model
    steps: int | None  # number of all steps, checked or not; None if not known
    checked: int
    faulty: int
    fault: GuardFaultView | None


def guard_view(reports: Iterable[GuardedSteps]) -> GuardView | None:
    """Return the guard's report on the model with a fault, or else on the first model. None without a guard."""
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
