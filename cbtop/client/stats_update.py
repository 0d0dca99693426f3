"""Check every number of an update of statistics, and apply it to the record of its process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbtop.client.source_record import SourceRecord, remember
from cbtop.profiler.analysis.graph.node_table import MAX_NODES
from cbtop.profiler.analysis.histograms import BUCKETS, MAX_CELLS, Column
from cbtop.profiler.analysis.node_columns import ANY_STEP, COLUMNS, SPARSE_COLUMNS
from cbtop.profiler.analysis.step_intervals import MAX_SAID_INTERVALS
from cbtop.protocol.columns import unpack_columns
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import StatsUpdate

MAX_RARE = 1e30  # largest accepted value of a column that few nodes have (FLOP, bytes, …)
CELLS_END = (MAX_NODES + 1) * BUCKETS
SANE = 1 << 62  # largest accepted total; the sum of two still fits into int64
# The row of shortest times has no upper limit: a node without records has the largest int64.
_MIN_ROW = COLUMNS.index("min_ns")
_UNION, _FIRST = SPARSE_COLUMNS.index("union_ns"), SPARSE_COLUMNS.index("first_ns")


def update_stats(record: SourceRecord, update: StatsUpdate) -> None:
    node = _column(update.node)
    said_columns = [getattr(update, name) for name in COLUMNS]
    step, count = unpack_columns(update.cells, 2, MAX_CELLS)
    if any(len(column) != len(update.node) for column in said_columns) or not _within(node, 1, MAX_NODES + 1):
        raise DecodeError(f"an update of {record.key} with uneven columns or node ids out of range")
    if not _within(step, 1, CELLS_END) or not _within(cell := np.cumsum(step), BUCKETS, CELLS_END):
        raise DecodeError(f"an update of {record.key} with histogram cells out of range")
    table = _column(b"".join(said_columns)).reshape(len(COLUMNS), len(node))
    if any(not _within(rows.reshape(-1), 0, SANE) for rows in (table[:_MIN_ROW], table[_MIN_ROW + 1 :])):
        raise DecodeError(f"an update of {record.key} with totals out of range")
    if not (_not_below(table[_MIN_ROW], 0) and _within(count, 0, SANE)):
        raise DecodeError(f"an update of {record.key} with counts out of range")
    rare = _column(update.rare_node), _column(update.rare_column), np.frombuffer(update.rare_value, dtype="<f8")
    if len({len(column) for column in rare}) != 1 or not _within(rare[0], 1, MAX_NODES + 1):
        raise DecodeError(f"an update of {record.key} with uneven rare columns or node ids out of range")
    if not (_within(rare[1], 0, len(SPARSE_COLUMNS)) and _are_amounts(rare[2])):
        raise DecodeError(f"an update of {record.key} with rare values out of range")
    said = dict(zip(zip(rare[1].tolist(), rare[0].tolist(), strict=True), map(int, rare[2].tolist()), strict=True))
    for column, value in ((_UNION, update.steps_ns), (_FIRST, update.first_ns)):
        if value is not None:
            if not 0 <= value < SANE:
                raise DecodeError(f"an update of {record.key} with times out of range")
            said[column, ANY_STEP] = value
    ran = unpack_columns(update.ran, 3, MAX_SAID_INTERVALS)
    if not (_within(ran[0], ANY_STEP, MAX_NODES + 1) and _within(ran[1], 0, SANE) and _within(ran[2], 0, SANE)):
        raise DecodeError(f"an update of {record.key} with steps out of range")
    growth = record.stats.take_over(node, table, cell, count, said)
    remember(record, update.monotonic_ns, growth)
    record.window.clip(*ran)


def _column(data: bytes) -> Column:
    return np.frombuffer(data, dtype="<i8")


def _are_amounts(values: NDArray[np.float64]) -> bool:
    # A NaN compares as false, so NaN values are also rejected.
    return not len(values) or bool(values.min() >= 0 and values.max() < MAX_RARE)


def _not_below(column: Column, low: int) -> bool:
    return not len(column) or bool(column.min() >= low)


def _within(column: Column, low: int, high: int) -> bool:
    return not len(column) or bool(np.minimum.reduce(column) >= low and np.maximum.reduce(column) < high)
