"""Export to Parquet, one row per call, with the columns of `call_columns.OF_CALLS`. This needs the extra `arrow`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

from cbtop.exporters.base import RecordedProcess
from cbtop.protocol.vocabulary import NodeKind

if TYPE_CHECKING:
    from cbtop.exporters.call_columns import Columns

# Number of rows in a group. The file stores 2 KiB about each group. The writer keeps these 2 KiB in memory until the
# end.
GROUP_ROWS = 1 << 17


def write_parquet(processes: Sequence[RecordedProcess], out: BinaryIO) -> None:
    """Write the calls of all processes, group by group. Raises UsageError without the extra `arrow`."""
    # imported here, because this module imports NumPy
    from cbtop.exporters.call_columns import OF_CALLS, CallColumns, of_kinds
    from cbtop.tables.arrow import arrow_table

    writer = None
    for group in _groups(CallColumns(processes, OF_CALLS, of_kinds(*NodeKind)).parts()):
        rows = arrow_table(group, "--format parquet")
        if writer is None:
            from pyarrow.parquet import ParquetWriter  # imported here, because pyarrow is in the extra `arrow`

            writer = ParquetWriter(out, rows.schema)
        writer.write_table(rows)
    if writer is not None:
        writer.close()


def _groups(parts: Iterable[Columns]) -> Iterator[Columns]:
    """Join small parts of rows to groups. Each group has at least GROUP_ROWS rows, except the last one."""
    from cbtop.tables.column_table import joined_columns

    waiting: list[Columns] = []
    rows = 0
    for part in parts:
        waiting.append(part)
        rows += len(part["node"].values)
        if rows >= GROUP_ROWS:
            yield joined_columns(waiting)
            waiting, rows = [], 0
    if waiting:
        yield joined_columns(waiting)
