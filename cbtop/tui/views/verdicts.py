"""Verdicts on the screen: a sentence with its numbers, what to do, and what that would give."""

from __future__ import annotations

from cbtop import formatting
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit_line, rule
from cbtop.viewmodels.model import Severity, SourceView, Verdict

_LOOKS = {Severity.ERROR: ("✗", "strong bad"), Severity.WARNING: ("▲", "strong warn"), Severity.NOTE: ("·", "accent")}


def verdict_lines(source: SourceView, width: int, height: int) -> list[Line]:
    """The worst first, as many with their advice as leaves room for the others; those without a line are counted."""
    verdicts = source.verdicts
    if not verdicts:
        return [rule((("verdicts", "dim"),), width), (("  ✓ no rule found anything to say", "good"),)]
    shown = verdicts[: height - 1]
    with_advice = min(len(shown), height - 1 - len(shown))
    left_out = len(verdicts) - len(shown)
    head = rule((("verdicts", "dim"),), width, ((f"{left_out} more", "warn"),) if left_out else BLANK)
    lines = [head]
    for at, verdict in enumerate(shown):
        lines.append(_sentence(verdict, width))
        if at < with_advice:
            lines.append(_advice(verdict, width))
    return lines


def _sentence(verdict: Verdict, width: int) -> Line:
    glyph, role = _LOOKS[verdict.severity]
    return fit_line(((f"  {glyph} ", role), (clean(verdict.sentence), "strong")), width)


def _advice(verdict: Verdict, width: int) -> Line:
    gain: Line = ()
    if verdict.gain_tokens_per_sec is not None:
        gain = (
            (
                f"+{formatting.number(verdict.gain_tokens_per_sec)} tokens/s if {clean(verdict.gain_if)} (derived). ",
                "good",
            ),
        )
    return fit_line((("    → ", "faint"), *gain, (clean(verdict.advice), "dim")), width)
