"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

# Text columns are left-aligned, number columns right-aligned.
Table = list[tuple[str, ...]]


def table(rows: Table, *, left: int) -> str:
    """Return aligned columns, the first `left` of them to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return at most `most` lines: if there are more, the last one says how many are left out."""
    more = len(lines) - most
    return [*lines] if more <= 0 else [*lines[: most - 1], f"{more + 1} more lines"]
