"""Verdict "odd layer": a layer is slower than others that do the same work."""

from __future__ import annotations

from cbtop.units import counted, duration
from cbtop.viewmodels.layers import MIN_LAYERS, MIN_STEPS, ODD, ODD_PART, OUTLIER_Z
from cbtop.viewmodels.odd_modules import OddModule, odd_module
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain_inside


def _find(view: SourceView) -> Finding | None:
    layers, steps, books = view.layer_times, view.steps, view.books
    if layers is None or steps is None or steps.recorded < MIN_STEPS or books is None or not books.close:
        return None
    row = layers.slowest
    many = layers.stands_out(row) if row else 0
    if row is None or row.p50_us is None or not row.median_us or not row.to_median or not row.excess or not many:
        return None
    name, more_us = row.excess
    others = f"; {counted(many - 1, 'more layer')} like it" if many > 1 else ""
    part = "most" if more_us >= (row.p50_us - row.median_us) * row.calls / 2 else "the largest part"
    step_us = books.wall_us / steps.recorded
    return Finding(
        f"{row.name} is {row.to_median:.1f}× the median layer ({duration(row.p50_us)} against "
        f"{duration(row.median_us)}), {part} of it in {name} (+{duration(more_us)} a step){others}"
        f"{_because_of(odd_module(view.graph, name, row.id))}",
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


def _because_of(odd: OddModule | None) -> str:
    """Return how a module of the layer differs, as text such as `; its down_proj is Quantized, slow.py:10 …`.

    Only facts that differ are named.
    """
    if odd is None:
        return ""
    here, usual = odd.module, odd.usual
    if here.module_class != usual.module_class:
        source = f", {here.module_source}" if here.module_source else ""
        return f"; its {odd.label} is `{here.module_class}`{source}; the others are `{usual.module_class}`"
    if here.weight_dtype != usual.weight_dtype:
        return f"; the weight of its {odd.label} is {here.weight_dtype}; those of the others are {usual.weight_dtype}"
    if here.weight_shape != usual.weight_shape:
        return f"; the weight of its {odd.label} is {here.weight_shape}; those of the others are {usual.weight_shape}"
    return f"; its {odd.label} runs {here.module_source}; the others run {usual.module_source}"


ODD_LAYER = Rule(
    id="odd-layer",
    severity=Severity.WARNING,
    means="One layer takes longer than the others that do the same work. Its weights are on another device or in "
    "another format, or its kernel took another path.",
    fires=f"There are {MIN_LAYERS} or more layers with the same bricks, in {MIN_STEPS} recorded steps or more. The "
    f"layer's median (lower end of its interval) is {100 * ODD - 100:.0f} % above the median layer and is an outlier "
    f"(modified z-score above {OUTLIER_Z:g}). At most {100 * ODD_PART:.0f} % of the layers (not counting the first) "
    "are half as far above it.",
    advice="Compare its bricks with those of its neighbours in the graph: device, format and shape of the weights.",
    find=_find,
)
