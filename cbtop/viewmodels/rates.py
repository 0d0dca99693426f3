"""The speed of a phase: tokens or steps a second."""

from __future__ import annotations

from typing import NamedTuple

from cbtop.viewmodels.loss import LossView
from cbtop.viewmodels.selection import WindowView
from cbtop.viewmodels.steps import StepsView


class Rate(NamedTuple):
    """The speed of a phase: tokens a second, or steps a second if tokens are not known."""

    unit: str  # tokens/s or steps/s
    per_sec: float | None
    history: tuple[float, ...]  # one value a second, as SourceView.tokens_per_sec_history


def rate_of(steps: StepsView | None, tokens_per_sec: tuple[float, ...], steps_per_sec: tuple[float, ...]) -> Rate:
    """Return the rate to show of `steps`: tokens/s, or steps/s if it has no tokens; each with its history."""
    if steps is None or steps.has_tokens:
        return Rate("tokens/s", steps.tokens_per_sec if steps else None, tokens_per_sec)
    return Rate("steps/s", steps.steps_per_sec, steps_per_sec)


def are_rates_least(window: WindowView | None, loss: LossView) -> bool:
    """Whether records in the time of the rates were lost, so that there were more steps than are known."""
    return (window.lost if window else loss.lost) > 0
