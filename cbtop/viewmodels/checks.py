"""Make rows of the checks of bricks that a process reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.protocol.messages import CheckResult
from cbtop.protocol.vocabulary import LOGITS_CHECK, PRECONDITION


@dataclass(frozen=True, slots=True)
class CheckRow:
    brick: str
    assertion: str
    passed: bool
    max_error: float | None
    tolerance: float | None
    not_finite: str = ""
    skipped: str = ""  # why the check was not evaluated, or ""
    note: str = ""  # where in the model the check is, and how often it ran there

    @property
    def is_of_input(self) -> bool:
        """Whether the check tests the input of its brick. If it fails, an earlier brick is the cause."""
        return self.assertion.startswith(PRECONDITION)

    @property
    def is_of_step(self) -> bool:
        """Whether the check tests a whole step. If it fails, any brick of the step may be the cause."""
        return self.assertion == LOGITS_CHECK

    @property
    def about(self) -> str:
        """The subject of the check as text: a brick, the input of a brick, or a step."""
        if self.is_of_step:
            return "a step"
        return f"the input of {self.brick}" if self.is_of_input else self.brick


def check_rows(checks: Iterable[CheckResult]) -> tuple[CheckRow, ...]:
    """Return the row of each check of the process. A skipped check counts as passed."""
    return tuple(
        CheckRow(
            check.brick,
            check.assertion,
            check.passed or bool(check.skipped),
            check.max_error,
            check.tolerance,
            check.not_finite,
            check.skipped,
            check.note,
        )
        for check in checks
    )
