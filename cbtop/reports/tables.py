"""Tables of plain text."""

from __future__ import annotations

# A column that only names things is left-aligned, one of numbers right-aligned.
Table = list[tuple[str, ...]]


def table(rows: Table, *, left: int) -> str:
    """Aligned columns, the first `left` of them to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
