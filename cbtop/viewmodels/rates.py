"""The rate at which a phase runs, in tokens/s or steps/s."""

from __future__ import annotations

from typing import NamedTuple

from cbtop.viewmodels.loss import LossView
from cbtop.viewmodels.selection import WindowView
from cbtop.viewmodels.steps import StepsView


class Rate(NamedTuple):
    """How fast a phase runs: tokens/s, or steps/s if tokens are unknown."""

    unit: str  # "tokens/s" or "steps/s"
    per_sec: float | None
    history: tuple[float, ...]  # the rate in each second, as in SourceView.tokens_per_sec_history


def rate_of(steps: StepsView | None, tokens_per_sec: tuple[float, ...], steps_per_sec: tuple[float, ...]) -> Rate:
    """Return the rate of `steps` with its history: tokens/s, or steps/s without tokens."""
    if steps is None or steps.has_tokens:
        return Rate("tokens/s", steps.tokens_per_sec if steps else None, tokens_per_sec)
    return Rate("steps/s", steps.steps_per_sec, steps_per_sec)


def are_rates_least(window: WindowView | None, loss: LossView) -> bool:
    """Return whether the true rates may be higher, because records of steps were lost."""
    return (window.lost if window else loss.lost) > 0
