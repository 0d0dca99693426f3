"""The verdict "outlier-driven mean": a few long steps raise the mean."""

from __future__ import annotations

from cbtop.units import duration, percent
from cbtop.viewmodels.run_ahead import may_run_ahead
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain, steps_alike
from cbtop.viewmodels.verdicts.recompilation import RECOMPILATION
from cbtop.viewmodels.verdicts.starved import is_explained_by_waiting
from cbtop.viewmodels.verdicts.warm_up import WARM_UP

# The mean step time is this many times the median. Without outliers, they differ by a few percent.
MEAN_OVER_MEDIAN = 1.10
# At most this percentage of the steps is long. More would be a mode, not outliers.
RARE_PERCENT = 10.0


def _find(view: SourceView) -> Finding | None:
    steps = None if may_run_ahead(view) else steps_alike(view)
    if steps is None or not steps.mean_us or not steps.p50_us or steps.mean_us < MEAN_OVER_MEDIAN * steps.p50_us:
        return None
    if is_explained_by_waiting(view, 100 * (steps.mean_us - steps.p50_us) / steps.mean_us):
        return None
    if WARM_UP.find(view) is not None or RECOMPILATION.find(view) is not None:
        return None  # another verdict explains the long steps better
    long = [bar for bar in steps.durations if bar.from_us > steps.mean_us]
    many = sum(bar.count for bar in long)
    rare_percent = 100 * many / steps.count
    if not many or rare_percent > RARE_PERCENT:
        return None
    over_us = sum(bar.count * ((bar.from_us + bar.to_us) / 2 - steps.p50_us) for bar in long)
    # A histogram's bars are not exact, so save at most the difference of mean and median.
    saved = 100 * min(over_us / steps.count, steps.mean_us - steps.p50_us) / steps.mean_us
    return Finding(
        f"A few {steps.phase} steps raise the mean: {percent(rare_percent)} take over {duration(long[0].from_us)}, "
        f"up to {duration(steps.max_us)}; the mean is {duration(steps.mean_us)}, the median "
        f"{duration(steps.p50_us)}",
        (
            Evidence("mean", steps.mean_us, "µs"),
            Evidence("median", steps.p50_us, "µs"),
            Evidence("long steps", rare_percent, "%"),
            *((Evidence("longest", steps.max_us, "µs"),) if steps.max_us is not None else ()),
        ),
        Subject(About.STEPS, steps.phase),
        gain(view, saved),
        "these took the median time",
    )


OUTLIER_MEAN = Rule(
    id="outlier-mean",
    severity=Severity.WARNING,
    means="A few very long steps raise the mean and lower tokens/s. Most steps are faster than the mean.",
    fires=f"All steps have the same number of tokens, the mean is {100 * MEAN_OVER_MEDIAN - 100:.0f} % or more above "
    f"the median, and at most {RARE_PERCENT:g} % of the steps are longer than the mean. Not if warm-up, a "
    "recompilation, waits for a processor or a host that runs ahead of the GPU explain it.",
    advice="Compare p50 and p99. Look for what stops the process: garbage collection, paging, another busy program.",
    find=_find,
)
