"""Make the JSON fields for a change of the number of calls."""

from __future__ import annotations

from typing import Any

from cbtop.comparison.call_counts import CallsChange


def calls_fields(calls: CallsChange | None) -> dict[str, Any] | None:
    """Return the change in the number of calls of a brick or layer per step.

    `exact` means that in both runs, all blocks of steps have the same number of calls.
    """
    if calls is None:
        return None
    sides = {"before": calls.before, "now": calls.now, "half": calls.half}
    return {**sides, "ratio": calls.ratio, "ratio_half": calls.ratio_half, "exact": calls.is_exact}
