"""The verdict "failed checks": a brick computes a wrong result."""

from __future__ import annotations

from cbtop.units import count
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule


def _find(view: SourceView) -> Finding | None:
    failed = view.failed_checks
    if not failed:
        return None
    first = failed[0]
    error = ""
    if first.not_finite:
        error = f" (met {first.not_finite})"
    elif first.max_error is not None and first.tolerance is not None:
        error = f" (error {first.max_error:.1e}, tolerance {first.tolerance:.1e})"
    if first.note:
        error += f" ({first.note})"
    others = f"; {count(len(failed) - 1)} more of {count(len(view.checks))} failed" if len(failed) > 1 else ""
    evidence = [
        Evidence("checks failed", len(failed), "checks"),
        Evidence("checks", len(view.checks), "checks"),
    ]
    evidence += [
        Evidence(name, value, "")
        for name, value in (("error", first.max_error), ("tolerance", first.tolerance))
        if value is not None
    ]
    advice = ""
    if first.is_of_input:
        advice = "Look at what runs before it, not at its kernel: the input of the kernel is invalid."
    elif first.is_of_step:
        advice = "It was wrong once, at an unknown place. --check-contracts checks every call of every kernel."
    return Finding(
        f"{first.about} fails its check `{first.assertion}`{error}{others}",
        tuple(evidence),
        Subject(About.BRICK, first.brick),
        advice=advice,
    )


FAILED_CHECKS = Rule(
    id="failed-checks",
    severity=Severity.ERROR,
    means="A brick's assertion does not hold. Its speed is irrelevant while its result is wrong.",
    fires="A check failed, at any time. The likely origin is named: the value that the guard found, else the first "
    "failed check. A precondition (on a kernel's input) is named only if nothing else failed.",
    advice="Fix the kernel first; compare it with its reference.",
    find=_find,
)
