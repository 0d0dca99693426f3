"""Text, tables and bars as HTML: for the reports, and for `_repr_html_` in notebooks. No script, no style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

GRAY = "#9aa0a6"
# The colors of the categories, by the name that a category has on the screen.
COLORS = {"Norm": "#4c9f70", "Attention": "#4f7cff", "FFN": "#c98a2b", "Other": "#a06cd5"}
BAR_WIDTH, BAR_HEIGHT = 1000, 26  # in pixels; the drawing is scaled to the page


def plain(words: str) -> str:
    """Return `words` as text for HTML: markup is escaped, and control characters are replaced."""
    return escape("".join(one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in words))


def table_html(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts. The first row is the head. All columns but the first are aligned right."""
    head, *body = rows
    lines = [_row(head, "th"), *(_row(row, "td") for row in body)]
    return f"<table>{''.join(lines)}</table>"


def _row(cells: Iterable[str], tag: str) -> str:
    found = [
        f"<{tag} style='text-align:{'right' if number else 'left'}'>{plain(cell)}</{tag}>"
        for number, cell in enumerate(cells)
    ]
    return f"<tr>{''.join(found)}</tr>"


def share_bar(shares: Sequence[tuple[str, float]]) -> str:
    """Return shares of a whole as one bar, with a key below it. A share is a name and its percentage."""
    x, blocks, key = 0.0, [], []
    for number, (name, percent) in enumerate(shares):
        if percent <= 0:
            continue
        label, color, width = f"{plain(name)} {percent:.1f} %", _color(name, number), percent * BAR_WIDTH / 100
        blocks.append(
            f'<g><title>{label}</title><rect x="{x:.1f}" y="0" width="{width:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{color}"/></g>'
        )
        key.append(f'<span style="margin-right:1.2em"><span style="color:{color}">■</span> {label}</span>')
        x += width
    if not blocks:
        return ""
    svg = f'<svg viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" width="100%" role="img">{"".join(blocks)}</svg>'
    return f"{svg}<p>{' '.join(key)}</p>"


def _color(name: str, number: int) -> str:
    """Return the color of a category. Other parts get colors by their `number`."""
    return COLORS.get(name) or f"hsl({(47 * number) % 360} 30% 55%)"
