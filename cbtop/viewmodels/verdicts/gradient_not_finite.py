"""Verdict "gradient not finite": an optimizer used a gradient that was NaN or Inf."""

from __future__ import annotations

from cbtop.units import count
from cbtop.viewmodels.gradients import GradientFaultView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

OF_ALL = (
    "All gradients are affected, so the loss or a weight was not finite. Look at the loss, the learning rate and the "
    "batch of that step."
)


def _find(view: SourceView) -> Finding | None:
    gradients = view.training.gradients if view.training else None
    fault = gradients.fault if gradients else None
    if view.steps is None or fault is None:
        return None
    first = Evidence("first step", fault.step, "")
    finite = () if fault.finite_step is None else (Evidence("latest finite step before", fault.finite_step, ""),)
    return Finding(
        _sentence(fault),
        (
            first,
            *finite,
            Evidence("latest such step", fault.last_step, ""),
            Evidence("latest step checked", fault.checked_step, ""),
            Evidence("gradients not finite", fault.faulty, "parameters"),
            Evidence("gradients", fault.parameters, "parameters"),
        ),
        Subject(About.STEPS, view.steps.phase),
        advice=OF_ALL if fault.faulty == fault.parameters > 1 else "",
    )


def _sentence(fault: GradientFaultView) -> str:
    """Return a sentence such as `Gradient of layers.3.up.weight is NaN since step 118; so were 25 of the 73
    others`.
    """
    others = fault.faulty - 1
    if others and fault.faulty == fault.parameters:
        verb = "were" if fault.is_over else "are"
        sentence = f"Gradients of all {count(fault.parameters)} parameters {verb} {fault.kind} {_when(fault)}"
    else:
        verb = "was" if fault.is_over else "is"
        sentence = f"Gradient of {fault.parameter or 'a parameter'} {verb} {fault.kind} {_when(fault)}"
        if others:
            were = "was" if others == 1 else "were"
            sentence += f"; so {were} {count(others)} of the {count(fault.parameters - 1)} others"
    return f"{sentence}; all are finite again" if fault.is_over else sentence


def _when(fault: GradientFaultView) -> str:
    if fault.is_over and fault.last_step == fault.step:
        return f"in step {count(fault.step)}"
    if fault.is_over:
        return f"from step {count(fault.step)} to step {count(fault.last_step)}"
    if fault.is_certain:
        return f"since step {count(fault.step)}"
    if fault.finite_step is None:
        return f"since step {count(fault.step)} at the latest"
    return f"since step {count(fault.step)} at the latest (all were finite in step {count(fault.finite_step)})"


GRADIENT_NOT_FINITE = Rule(
    id="gradient-not-finite",
    severity=Severity.ERROR,
    means="An optimizer used a gradient that was NaN or Inf. Its weights are now useless.",
    fires="When the optimizer begins its step. It names the first parameter that the backward pass reached. Not for "
    "steps that a gradient scaler skips.",
    advice="Look at the operation after this parameter: a division by 0, a square root or logarithm of 0, an "
    "overflow. torch.autograd.set_detect_anomaly(True) finds its line.",
    find=_find,
)
