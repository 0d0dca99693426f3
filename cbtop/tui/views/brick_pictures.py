"""Draw pictures of one brick: durations of its calls, times per layer, times per second, and kernels."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop import units
from cbtop.protocol.vocabulary import Provenance
from cbtop.text import kernel_text
from cbtop.tui.views.layer_map import numbers
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.views.once_a_second import Pictures
from cbtop.tui.widgets.curve import curve
from cbtop.tui.widgets.lines import BLANK, Line, clean, clip, fit, fit_line, join_fitting, width_of
from cbtop.tui.widgets.parts import ScreenPart
from cbtop.tui.widgets.upright import Bar, Spacing, upright, usual_top
from cbtop.viewmodels.bricks import TREND_S, BrickRow
from cbtop.viewmodels.durations import DurationBar, coarser
from cbtop.viewmodels.kernels import BrickKernels
from cbtop.viewmodels.layers import BrickInLayers, LayerBrick, LayersView
from cbtop.viewmodels.source import SourceView

MAX_BAR_HEIGHT = 3  # In the picture of layers, bars have at most this height in lines.
_MARGIN = 2
_LABEL_GAP = 2


def heading_line(heading: str, provenance: str, width: int, about: Sequence[Line] = ()) -> Line:
    """Return the heading of a group of figures. The texts in `about` follow if they fit. The provenance is at the
    right end.
    """
    said = join_fitting(about, width - len(heading) - len(provenance) - 5, ", ")
    line: Line = ((" " + heading, "accent"), *((("  ", ""), *said) if said else ()))
    return (*line, (provenance.rjust(max(0, width - width_of(line) - 1)), "faint"))


def durations(brick: BrickRow, pictures: Pictures, width: int, height: int) -> list[Line]:
    """Draw a histogram of the brick's calls above a time axis.

    The number of calls in the heading is not cached with the picture, because it changes all the time.
    """
    about: list[Line] = [((f"{units.count(brick.count)} calls", "dim"),)]
    found = pictures.drawn(("durations", width, height), lambda: _bars(brick, width, height))
    if found is None:
        why = "  n/a: its calls are not counted apart from those of others"
        return [heading_line("durations", Provenance.MEASURED.value, width, about), ((clip(why, width), "dim"),)]
    highest, drawn = found
    about.append(((f"highest bar {units.count(highest)}", "dim"),))
    return [heading_line("durations", Provenance.MEASURED.value, width, about), *drawn][:height]


def _bars(brick: BrickRow, width: int, height: int) -> tuple[int, list[Line]] | None:
    """Return the number of calls in the highest bar, and the lines of the histogram.

    Returns None if the calls of the brick are not counted separately.
    """
    if not brick.durations:
        return None
    bars = coarser(brick.durations, max(1, width - 2 * _MARGIN))
    highest = max(bar.count for bar in bars)
    spacing = Spacing.of(len(bars), max(1, width - 2 * _MARGIN))
    role = CATEGORY_LOOKS[brick.category].role
    tall = height - 2 if height < 6 else height - 3
    drawn = upright([Bar(bar.count or None, role) for bar in bars], spacing, max(1, tall), highest)
    return highest, [*(((" " * _MARGIN, ""), *line) for line in drawn), _axis(bars, spacing, width), BLANK]


def _axis(bars: Sequence[DurationBar], spacing: Spacing, width: int) -> Line:
    """Return the time axis of the histogram. Bars show the time when they begin if it fits. The last bar also shows
    when it ends.
    """
    last = units.duration(bars[-1].to_us)
    end = _MARGIN + spacing.width - len(last)
    text = ""
    for at, bar in enumerate(bars):
        column, label = _MARGIN + spacing.column(at), f"╷{units.duration(bar.from_us)}"
        if (not text or column >= len(text) + _LABEL_GAP * 4) and column + len(label) + _LABEL_GAP <= max(end, 1):
            text = text.ljust(column) + label
    return ((clip(text.ljust(end) + f"{last}╷", width), "dim"),)


def layers_part(brick: BrickRow, source: SourceView, pictures: Pictures) -> ScreenPart:
    """Return the part of the panel that shows the brick's median call in each layer."""

    def is_there() -> bool:
        return source.layer_times is not None and LayerBrick(*brick.key) in source.layer_times.bricks

    def drawn(width: int, height: int) -> list[Line]:
        return pictures.drawn(("layers", width, height), lambda: _in_layers(brick, source, width, height))

    return ScreenPart(drawn, 3, 6 if pictures.drawn("in layers", is_there) else 0)


def _in_layers(brick: BrickRow, source: SourceView, width: int, height: int) -> list[Line]:
    """Draw the brick's median call in each layer as a bar.

    A mark above a bar shows that the layer is odd (conspicuously slow).
    """
    layers = source.layer_times
    found = layers.of_brick(LayerBrick(*brick.key)) if layers else None
    if layers is None or found is None:
        why = "  n/a: its calls are not counted apart from those of others"
        return [heading_line("layers", Provenance.MEASURED.value, width), ((clip(why, width), "dim"),), BLANK]
    spacing = Spacing.of(len(layers.rows), max(1, width - 2 * _MARGIN))
    look = CATEGORY_LOOKS[brick.category]
    bars = [
        Bar(us, "faint" if us is None else "strong warn" if is_odd else look.role)
        for us, is_odd in zip(found.p50_us, found.odd, strict=True)
    ]
    top = usual_top([us for us in found.p50_us if us is not None], found.median_us or 0.0)
    tall = max(1, min(MAX_BAR_HEIGHT, height - 2))
    lines = [heading_line("layers, p50", Provenance.MEASURED.value, width, _slowest(layers, found))]
    lines.append(((" " * _MARGIN, ""), *numbers(layers.rows, found.odd, spacing)))
    lines += [((" " * _MARGIN, ""), *line) for line in upright(bars, spacing, tall, top)]
    return [*lines, BLANK][:height]


def _slowest(layers: LayersView, found: BrickInLayers) -> list[Line]:
    """Return texts about the slowest and the median layer, such as `▼ Layer 8 1.48 ms` and `median 79.4 µs`."""
    us, is_odd = found.p50_us[found.slowest], found.odd[found.slowest]
    name = f"{'▼ ' if is_odd else 'slowest '}{clean(layers.rows[found.slowest].name)}"
    median = f"median {units.duration(found.median_us)}"
    return [((f"{name} {units.duration(us)}", "strong warn" if is_odd else ""),), ((median, "dim"),)]


def trend(brick: BrickRow, source: SourceView, width: int, height: int) -> list[Line]:
    """Draw the brick's time per token (or call) in each of the last 60 seconds."""
    unit = "µs a call" if source.phase is None else "µs a token"
    figures = (("last", brick.trend_last_us), ("least", brick.trend_least_us), ("most", brick.trend_most_us))
    about: list[Line] = [((f"{word} {units.duration(us)}", ""),) for word, us in figures]
    role = CATEGORY_LOOKS[brick.category].role
    tall = height - 1 if height < 6 else height - 2
    drawn = curve(brick.trend_us, max(1, width - 2 * _MARGIN), tall, role, units.duration)
    lines = [heading_line(f"{unit}, {TREND_S} s", Provenance.DERIVED.value, width, about)]
    return [*lines, *(((" " * _MARGIN, ""), *line) for line in drawn), BLANK][:height]


def kernels(found: Sequence[BrickKernels], width: int, height: int) -> list[Line]:
    """Return the brick's kernels in the last burst, with their launches per step and the mean time of a launch."""
    lines: list[Line] = []
    for brick in found:
        about: list[Line] = [((f"{units.duration(brick.us_per_step)} a step {clean(brick.label)}", "dim"),)]
        lines.append(heading_line("kernels", "measured in a burst", width, about))
        for row in brick.kernels:
            times = f"{kernel_text.per_step(row.launches_per_step)} × {units.duration(row.mean_us)}"
            figure = times if row.deviation_us is None else f"{times} ± {units.duration(row.deviation_us)}"
            name = fit(clip(clean(row.name), width - len(figure) - 5), max(1, width - len(figure) - 5))
            lines.append(fit_line((("  " + name, ""), ("  " + figure, "strong")), width))
    return lines[:height]
