"""Draw the comparison with a baseline: the changes since the baseline, or why they are unknown."""

from __future__ import annotations

from cbtop import units
from cbtop.comparison.comparison import Comparison
from cbtop.comparison.noise import Change
from cbtop.text import comparison_text
from cbtop.tui.widgets.lines import Line, clean, join, join_fitting, width_of


def baseline_lines(found: Comparison | None, width: int) -> list[Line]:
    """Return lines with tokens/s and step time compared with the baseline, followed by other differences.

    Tokens/s and step time share one line if the screen is wide enough. Returns [] without a baseline.
    """
    if found is None:
        return []
    head: Line = (("  Δ ", "accent"), ("(derived) ", "dim"))
    which: Line = ((f"baseline: {clean(comparison_text.baseline(found))}", "dim"),)
    if found.why_not:
        return [join_fitting([(*head, (f"n/a: {clean(found.why_not)}", "warn")), which], width, " · ")]
    rates: list[Line] = [((clean(rate), ""),) for rate in comparison_text.baseline_rates(found)]
    first = join([(*head, *rates[0]), *rates[1:]], " · ")
    if width_of(first) <= width:
        lines = [join_fitting([first, which], width, " · ")]
    else:
        lines = [(*head, *rates[0]), *((("    ", ""), *rate) for rate in rates[1:])]
    if found.notes:
        notes: list[Line] = [((clean(note), "warn"),) for note in found.notes]
        lines.append(join_fitting([(("    but: ", "dim"), *notes[0]), *notes[1:]], width, " · "))
    return lines


def change_text(change: Change | None) -> str:
    """Return a change since the baseline as text for a table cell: `+10.1 %`, `noise`, or `n/a`."""
    if change is None or change.percent is None:
        return units.NOT_MEASURED
    return f"{change.decisive.percent:+,.1f} %" if change.is_beyond_noise else "noise"


def change_role(change: Change | None, *, of_rate: bool = False) -> str:
    """Return the colour role for the change of a time or, with `of_rate`, of a rate.

    The role is bad for a longer time and for a lower rate.
    """
    if change is None or not change.is_beyond_noise:
        return "faint"
    return "strong bad" if (change.delta < 0 if of_rate else change.delta > 0) else "good"
