"""Draw horizontal bars, single or stacked, with a resolution of an eighth of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from cbtop.tui.widgets.lines import Line, Span

_EIGHTHS = " ▏▎▍▌▋▊▉"
SEAM = "▏"  # The segments of a stacked bar are separated by this line.


@dataclass(frozen=True, slots=True)
class BarSegment:
    """One segment of a stacked bar. `label` is drawn inside of the segment if it fits.

    `fill` is the colour role of the cells without text.
    """

    value: float
    role: str
    label: str
    fill: str = " "


def bar(fraction: float | None, width: int, role: str) -> Line:
    """Return a bar of `width` cells that is filled by `fraction` (0 to 1).

    If `fraction` is None, the bar is dotted.
    """
    if fraction is None:
        return (("·" * width, "faint"),)
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    if fraction > 0 and eighths == 0:
        eighths = 1  # A value above zero must be visible. So fill at least one eighth of a cell.
    full, rest = divmod(eighths, 8)
    body = "█" * full + (_EIGHTHS[rest] if rest else "")
    return ((body.ljust(width), f"track {role}"),)


def stacked(parts: Sequence[BarSegment], width: int) -> Line:
    """Return a stacked bar of exactly `width` cells. The size of each part is proportional to its value.

    Each part above 0 gets at least one cell, if possible. Thin lines separate the parts, also on screens without
    colour.
    """
    cells = _share_cells([max(0.0, part.value) for part in parts], width)
    spans: list[Span] = []
    for part, size in zip(parts, cells, strict=True):
        if not size:
            continue
        seam = SEAM if spans else " "
        label = f"{seam}{part.label} "
        inside = label if cell_len(label) <= size else seam if part.fill == " " else ""
        spans.append((inside + part.fill * (size - cell_len(inside)), part.role))
    return tuple(spans)


def _share_cells(values: Sequence[float], width: int) -> list[int]:
    """Distribute `width` cells in proportion to `values` (largest remainder method).

    Each value above 0 gets at least one cell.
    """
    total = sum(values)
    if total <= 0 or width < 1:
        return [0] * len(values)
    exact = [value / total * width for value in values]
    cells = [max(int(share), 1 if share > 0 else 0) for share in exact]
    while sum(cells) < width:
        neediest = max(range(len(cells)), key=lambda index: exact[index] - cells[index])
        cells[neediest] += 1
    while sum(cells) > width:
        widest = max(range(len(cells)), key=cells.__getitem__)
        cells[widest] -= 1
    return cells
