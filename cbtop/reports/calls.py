"""Make the JSON fields for the change of a number of calls."""

from __future__ import annotations

from typing import Any

from cbtop.comparison.call_counts import CallsChange


def calls_fields(calls: CallsChange | None) -> dict[str, Any] | None:
    """Return the change of the calls per step of a brick or layer.

    `exact` means that every block of steps in both runs has equally many calls.
    """
    if calls is None:
        return None
    sides = {"before": calls.before, "now": calls.now, "half": calls.half}
    return {**sides, "ratio": calls.ratio, "ratio_half": calls.ratio_half, "exact": calls.is_exact}
