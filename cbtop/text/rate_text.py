"""Write rates, and the speed-up that fixing a problem can bring."""

from __future__ import annotations

from cbtop.units import number
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.sources import SourceRow
from cbtop.viewmodels.steps import StepsView
from cbtop.viewmodels.verdict import Verdict


def rate(of: SourceRow | SourceView, per_sec: float | None) -> str:
    """Format a rate: `42.1`. If records were lost, the true rate may be higher, so the text is `≥42.1`."""
    return f"{'≥' if of.are_rates_least and per_sec is not None else ''}{number(per_sec)}"


def throughput(of: SourceRow | SourceView, steps: StepsView) -> str:
    """Format the throughput: `42.1 tokens/s`. Without tokens, `12.5 steps/s` or `12.5 steps/s, 100 samples/s`."""
    if steps.has_tokens:
        return f"{rate(of, steps.tokens_per_sec)} tokens/s"
    found = f"{rate(of, steps.steps_per_sec)} steps/s"
    return found if steps.samples_per_sec is None else f"{found}, {rate(of, steps.samples_per_sec)} samples/s"


def gain(verdict: Verdict) -> str:
    """Format the speed-up that is possible if a problem is fixed: `+3.10 tokens/s if it were as fast as the median
    layer (derived)`.
    """
    more = verdict.gain_tokens_per_sec
    return "" if more is None else f"+{number(more)} tokens/s if {verdict.gain_if} (derived)"
