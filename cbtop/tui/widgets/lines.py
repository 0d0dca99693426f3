"""Lines of styled text as plain data. Drawing functions return lines, and widgets paint them."""

# A role is a name in `ROLES` for how text looks, which only cbtop.tcss defines. Text from other programs must pass
# `clean` before it becomes a span, so that no control character reaches the terminal.

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]  # a piece of a line: (text, roles separated by blanks); a later role takes precedence
Line = tuple[Span, ...]

BLANK: Line = ()

ROLES = frozenset(
    {
        "brand",
        "strong",
        "dim",
        "faint",
        "accent",
        "good",
        "warn",
        "bad",
        "badge-live",
        "badge-calm",
        "badge-warn",
        "badge-bad",
        "norm",
        "attention",
        "ffn",
        "other",
        "communication",
        "gap",
        "unknown",
        "fill-norm",
        "fill-attention",
        "fill-ffn",
        "fill-other",
        "fill-communication",
        "fill-gap",
        "fill-unknown",
        "track",
        "cursor",
        "lit",
        "tab-on",
        "tab-off",
        "key",
    }
)


def clean(text: str) -> str:
    """Return `text` with each unprintable character replaced by `�`."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "�" for character in text)


def width_of(line: Line) -> int:
    """Return the number of terminal cells of `line`."""
    return sum([len(text) if text.isascii() else cell_len(text) for text, _ in line])


def clip(text: str, width: int) -> str:
    """Return `text` in at most `width` cells. A text that is cut ends with `…`."""
    if (len(text) if text.isascii() else cell_len(text)) <= width:
        return text
    return "" if width < 1 else set_cell_size(text, width - 1).rstrip() + "…"


def fit(text: str, width: int, align: str = "left") -> str:
    """Return `text` in exactly `width` cells, clipped or padded."""
    text = clip(text, width)
    if text.isascii():
        return text.rjust(width) if align == "right" else text.ljust(width)
    padding = " " * (width - cell_len(text))
    return padding + text if align == "right" else text + padding


def fit_line(line: Line, width: int, align: str = "left") -> Line:
    """Return `line` in exactly `width` cells, clipped or padded."""
    missing = width - width_of(line)
    if missing > 0:
        padding: Line = ((" " * missing, ""),)
        return padding + line if align == "right" else line + padding
    if missing == 0:
        return line
    kept: list[Span] = []
    left = width
    for text, role in line:
        size = cell_len(text)
        if size >= left:
            # More text follows or is cut, so the last cell of the line has the mark `…`.
            kept.append((set_cell_size(text, left - 1) + "…" if left > 0 else "", role))
            break
        kept.append((text, role))
        left -= size
    return tuple(kept)


def wrap_line(head: Line, body: Line, width: int) -> list[Line]:
    """Return `head` followed by `body`, wrapped between words. All lines of `body` begin in the same column."""
    room = width - width_of(head)
    rows: list[list[Span]] = [[]]
    left = room
    for text, role in body:
        for word in re.split(r"(?<= )", text):
            if cell_len(word.rstrip()) > left and rows[-1]:
                rows.append([])
                left = room
            before = rows[-1].pop()[0] if rows[-1] and rows[-1][-1][1] == role else ""
            rows[-1].append((before + word, role))
            left -= cell_len(word)
    indent: Line = ((" " * width_of(head), ""),)
    ends = [(*row[:-1], *((text.rstrip(), role) for text, role in row[-1:])) for row in rows]
    return [(*(indent if at else head), *row) for at, row in enumerate(ends)]


def restyle(line: Line, role: str) -> Line:
    """Return `line` with `role` added to every span. Roles that a span already has take precedence."""
    return tuple((text, f"{role} {roles}") for text, roles in line)


def join(parts: Iterable[Line], gap: str = "  ", role: str = "faint") -> Line:
    """Return the non-empty texts in `parts` on one line, with `gap` between them."""
    line: list[Span] = []
    for part in parts:
        if not part:
            continue
        if line:
            line.append((gap, role))
        line.extend(part)
    return tuple(line)


def join_fitting(parts: Iterable[Line], width: int, gap: str = "  ") -> Line:
    """Return a line with as many of `parts` as fit completely into `width`, from the first part on."""
    line: Line = BLANK
    for part in parts:
        longer = join((line, part), gap)
        if width_of(longer) > width:
            break
        line = longer
    return line


def both_ends(left: Line, right: Line, width: int) -> Line:
    """Return a line of `width` cells with `left` at its left end and `right` at its right end.

    If there is too little room, `right` is clipped, and then dropped.
    """
    free = width - width_of(left) - 2
    if free < 8:
        return fit_line(left, width)
    if width_of(right) > free:
        right = fit_line(right, free)
    return (*left, (" " * (width - width_of(left) - width_of(right)), ""), *right)


def plain(line: Line) -> str:
    """Return the text of `line` without its colour roles."""
    return "".join(text for text, _ in line)


def rule(title: Line, width: int, right: Line = BLANK) -> Line:
    """Return a thin horizontal rule with a title. The note `right` is at the right end if it fits."""
    left: Line = (("─ ", "faint"), *title, (" ", ""))
    end: Line = ((" ", ""), *right, (" ─", "faint")) if right else BLANK
    free = width - width_of(left) - width_of(end)
    if free < 1:
        return fit_line((*left, ("─" * max(0, width - width_of(left)), "faint")), width)
    return (*left, ("─" * free, "faint"), *end)
