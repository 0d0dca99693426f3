"""Format rows as a plain text table."""

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
