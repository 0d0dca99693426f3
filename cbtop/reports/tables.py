"""Format rows as a table in plain text or Markdown."""

from __future__ import annotations

from collections.abc import Sequence

Table = list[tuple[str, ...]]


def table(rows: Table, *, left: int) -> str:
    """Return the rows of a table as lines with aligned columns.

    The first `left` columns are left-aligned, the others right-aligned.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the first `most` lines of a text. If lines are left out, the last returned line has their number."""
    more = len(lines) - most
    return [*lines] if more <= 0 else [*lines[: most - 1], f"{more + 1} more lines"]


def markdown_table(rows: Table) -> list[str]:
    """Return the lines of a Markdown table. The first row is the head."""
    first, *others = rows
    lines = [first, ("---", *("---:" for _ in first[1:])), *others]
    return [f"| {' | '.join(escaped(cell) for cell in line)} |" for line in lines]


def escaped(text: str) -> str:
    """Escape Markdown and HTML in `text`."""
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]<>|#" else sign for sign in text)
