"""Verdict not-finite: a brick's output was NaN, Inf, or over the guard's bound."""

from __future__ import annotations

from cbtop.protocol.guard_messages import FAULTY, FINITE
from cbtop.units import count
from cbtop.viewmodels.guard import GuardFaultView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule


def _find(view: SourceView) -> Finding | None:
    guard = view.guard
    if guard is None or guard.fault is None:
        return None
    fault = guard.fault
    steps = "was faulty" if guard.faulty == 1 else "were faulty"
    sentence = f"{_sentence(fault)}; {count(guard.faulty)} of {count(guard.checked)} checked steps {steps}"
    return Finding(
        sentence,
        (
            Evidence("first step", fault.step, ""),
            Evidence("latest such step", fault.last_step, ""),
            Evidence("faulty steps", guard.faulty, "steps"),
            Evidence("steps checked", guard.checked, "steps"),
        ),
        Subject(About.BRICK, fault.brick) if fault.brick else Subject(About.STEPS, fault.phase),
        advice=_advice(fault),
    )


def _sentence(fault: GuardFaultView) -> str:
    """Return a sentence about the wrong value: `Output of layers.2.down (DownProjection, layer 2) was NaN in step 61
    of …`.
    """
    places = [fault.brick] if fault.brick else []
    places += [] if fault.layer is None else [f"layer {fault.layer}"]
    where = fault.module or ", ".join(places) or "the model"
    about = f" ({', '.join(places)})" if fault.module and places else ""
    sentence = f"Output of {where}{about} was {fault.kind} in step {count(fault.step)} of {fault.phase}"
    if fault.input is not None:
        sentence += "; its input was finite" if fault.input == FINITE else "; its input was faulty already"
    if fault.inside is not None:
        sentence += f", and that of {fault.inside} around it was finite"
    if fault.weight is None:
        return sentence
    return f"{sentence}; its {fault.weight} was not finite, so an update or its file made it"


def may_follow_gradients(view: SourceView) -> bool:
    """Return whether the guard's faulty weight may come from a gradient that was not finite.

    A faulty weight makes all gradients of its step faulty, so only gradients of an earlier step can have caused it.
    """
    guarded = view.guard.fault if view.guard else None
    if guarded is None or guarded.weight is None:
        return False
    gradients = view.training.gradients if view.training else None
    fault = gradients.fault if gradients else None
    return fault is not None and (fault.step < guarded.step or not fault.is_certain)


def _advice(fault: GuardFaultView) -> str:
    if fault.weight is not None:
        return (
            "Look at the verdict gradient-not-finite, which then stands first, and at the step that it names. "
            "Without it, look at the checkpoint."
        )
    if fault.input != FAULTY:
        return ""
    if fault.inside is not None:
        return f"Code of {fault.inside} outside of its bricks made it: look at its attention, sums and divisions."
    return "It came with the input of the model, or from code before this brick that is in no brick."


NOT_FINITE = Rule(
    id="not-finite",
    severity=Severity.ERROR,
    means="A brick returned NaN, Inf or a value over the bound.",
    fires="With `--guard`, in recorded steps. It names the first such call. Not for -Inf alone, nor in padding. "
    "Gradients that may have made its weight stand first.",
    advice="The brick made it: look at its kernel and the range of its type.",
    find=_find,
)
