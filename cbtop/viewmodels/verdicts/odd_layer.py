"""One odd layer: slower than the layers that do the same."""

from __future__ import annotations

from statistics import median

from cbtop.units import counted, duration
from cbtop.viewmodels.layers import MIN_STEPS, ODD, LayerRow, LayersView
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain_inside

MIN_LAYERS = 6  # that do the same: of fewer nobody can say how they scatter
# The modified z-score 0.6745 (x - median) / MAD, and what is an outlier by it: Iglewicz and Hoaglin, "How to detect
# and handle outliers" (1993).
Z_OF_MAD, OUTLIER_Z = 0.6745, 3.5
ODD_PART = 0.1  # of the layers: where more are slow, that is how the model is made


def _find(view: SourceView) -> Finding | None:
    layers, steps, books = view.layer_times, view.steps, view.books
    if layers is None or steps is None or steps.recorded < MIN_STEPS or books is None or not books.close:
        return None
    row = layers.slowest
    many = _odd_like(layers, row) if row else 0
    if row is None or row.p50_us is None or not row.median_us or not row.to_median or not row.excess or not many:
        return None
    name, more_us = row.excess
    others = f"; {counted(many - 1, 'more layer')} like it" if many > 1 else ""
    part = "most" if more_us >= (row.p50_us - row.median_us) * row.calls / 2 else "the largest part"
    step_us = books.wall_us / steps.recorded
    return Finding(
        f"{row.name} is {row.to_median:.1f}× the median layer ({duration(row.p50_us)} against "
        f"{duration(row.median_us)}), {part} of it in {name} (+{duration(more_us)} a step){others}",
        (
            Evidence("over the median layer", row.to_median, "×"),
            Evidence("this layer", row.p50_us, "µs"),
            Evidence("median layer", row.median_us, "µs"),
            Evidence(f"more in {name}", more_us, "µs"),
        ),
        Subject(About.LAYER, row.name, row.id),
        gain_inside(view, 100 * (row.p50_us - row.median_us) * row.calls / step_us),
        "it were as fast as the median layer",
        is_inside=True,
    )


def _odd_like(layers: LayersView, row: LayerRow) -> int:
    """How many of the layers that `row` compares with stand out at least half as far; 0 where it does not."""
    times_us = [other.p50_us for other in layers.like(row) if other.p50_us is not None]
    if len(times_us) < MIN_LAYERS or not row.median_us:
        return 0
    usual_us = row.median_us
    deviation_us = median(abs(us - usual_us) for us in times_us)
    far_us = max((row.p50_us or 0.0) - usual_us, 0.0) / 2
    least_us = usual_us + max((ODD - 1) * usual_us, far_us, OUTLIER_Z * deviation_us / Z_OF_MAD)
    odd = [us for us in times_us if us >= least_us]
    return len(odd) if len(odd) <= max(1, ODD_PART * len(times_us)) else 0


ODD_LAYER = Rule(
    id="odd-layer",
    severity=Severity.WARNING,
    means="One layer takes longer than the others that do the same: its weights lie elsewhere or in another format, "
    "or its kernel took another path.",
    fires=f"Of {MIN_LAYERS} or more layers with the same bricks, in {MIN_STEPS} recorded steps or more, its median "
    f"is {100 * ODD - 100:.0f} % above the median layer and an outlier (modified z-score above {OUTLIER_Z:g}); at "
    f"most {100 * ODD_PART:.0f} % of the layers stand out half as far or more.",
    advice="Compare its bricks with those of its neighbours in the graph: device, format and shape of its weights.",
    find=_find,
)
