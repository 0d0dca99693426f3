"""For each brick and each of the last sixty seconds, keep the time per token and the amount of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.brick_stats import outermost
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.histograms import Column, distinct
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.attributes import BYTES, FLOPS
from cbtop.protocol.vocabulary import NodeKind

SECONDS = 60
# Each second begins at a whole second of the daemon's clock, so all viewers show the same values.
_SECOND_NS = 1_000_000_000
MAX_BRICKS = 256  # At most this many bricks of a source have trends.
_SECOND_BYTES = 400  # approximate memory of a `_Second` in bytes, without its arrays


@dataclass(frozen=True, slots=True)
class _Totals:
    """The time of each brick, and its units of work, since the source began.

    In steps, units are the step's tokens. Outside of steps, they are calls of the brick.
    """

    brick: Column  # id of the first node of each brick (see NodeTable.first_of), in ascending order
    time_ns: Column
    units: Column
    step: Column  # id of the step around each brick, or -1
    tokens: dict[int, int]  # number of tokens of each step, by the id of the step
    # The work of each brick, (5, bricks), with the rows of `_work`
    work: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Second:
    """The mean time (µs) per token or call of each brick between two moments. NaN without an ended call."""

    end_ns: int
    brick: Column
    us: NDArray[np.float64]
    # FLOP, bytes and ns of each brick's calls, (3, bricks), or (3, 0) if no brick declares its work
    work: NDArray[np.float32]


class BrickTrend:
    """Keeps the time per token (or call) and the work of each brick of a source, by second."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=SECONDS)
        self._begin_ns: int | None = None  # begin of the current second on the daemon's clock, in ns
        # the totals of all bricks at `_begin_ns`
        self._totals = _Totals(_NONE, _NONE, _NONE, _NONE, {}, np.zeros((5, 0)))
        self._work_bytes = 0  # size in bytes of the work arrays of all stored seconds
        # results that `us` has computed; dropped when a second ends
        self._us_made: dict[int, tuple[float | None, ...]] = {}
        # the result of `_tables`; None if it must be computed
        self._us_tables: list[tuple[Column, NDArray[np.float64]]] | None = None

    @property
    def size_bytes(self) -> int:
        """Approximate memory used."""
        work_bytes = self._totals.work.nbytes + self._work_bytes
        return (3 + len(self._seconds)) * (_SECOND_BYTES + self._totals.brick.nbytes) + work_bytes

    def tick(self, monotonic_ns: int, nodes: NodeTable, stats: NodeStats) -> None:
        """Set the daemon's clock to `monotonic_ns`. End the current second if it is over."""
        if self._begin_ns is not None and monotonic_ns // _SECOND_NS <= self._begin_ns // _SECOND_NS:
            return
        before, now = self._totals, _totals(nodes, stats)
        if np.array_equal(before.brick, now.brick):
            # The same bricks as before, so share the array of ids to save memory.
            now = replace(now, brick=before.brick)
        if self._begin_ns is not None:
            # False for a brick of the last second that new bricks have pushed beyond MAX_BRICKS.
            known = np.isin(before.brick, now.brick)
            at = np.searchsorted(now.brick, before.brick[known])
            # A new brick was not called in earlier runs of its step. So count only tokens since the last second.
            units = now.units - np.array([before.tokens.get(step, 0) for step in now.step.tolist()], np.int64)
            units[at] = now.units[at] - before.units[known]
            took_ns = now.time_ns.copy()
            took_ns[at] -= before.time_ns[known]
            ended = (units > 0) & (took_ns >= 0)
            us = np.full(len(now.brick), np.nan)
            us[ended] = took_ns[ended] / units[ended] / 1e3
            work = now.work.copy()
            work[:, at] -= before.work[:, known]
            if len(self._seconds) == SECONDS:
                self._work_bytes -= self._seconds[0].work.nbytes
            self._seconds.append(_Second(monotonic_ns, now.brick, us, _known(work)))
            self._work_bytes += self._seconds[-1].work.nbytes
        self._begin_ns, self._totals = monotonic_ns, now
        self._us_made.clear()
        self._us_tables = None

    def us(self, brick: int) -> tuple[float | None, ...]:
        """Return the time of a brick in each of the last 60 s, oldest first. It is in µs: per token if the brick ran
        in steps, else per call.

        None for a second without an ended call. `brick` is the id of its first node.
        """
        found = self._us_made.get(brick)
        if found is None:
            us = [one for bricks, rows in self._tables() for one in _column_of(bricks, rows, brick)]
            found = self._us_made[brick] = tuple([None if one != one else one for one in us])
        return found

    def _tables(self) -> list[tuple[Column, NDArray[np.float64]]]:
        """Return the stored seconds, oldest first, as tables with a row per second. Consecutive seconds with the same
        bricks are in one table.
        """
        if self._us_tables is None:
            begin_ns = (self._begin_ns or 0) - SECONDS * _SECOND_NS
            shown = [second for second in self._seconds if second.end_ns > begin_ns]
            runs = [list(run) for _, run in groupby(shown, key=lambda second: id(second.brick))]
            self._us_tables = [(run[0].brick, np.array([second.us for second in run])) for run in runs]
        return self._us_tables

    def by_second(self, brick: int) -> dict[int, float]:
        """Return the time of a brick by second of the daemon's clock, in µs per token in steps, and else per call."""
        return {second.end_ns // _SECOND_NS: us for second, us in self._us(brick) if us == us}

    def trail(self, brick: int) -> tuple[tuple[float, float] | None, ...]:
        """Return (FLOP/byte, GFLOP/s) of a brick's calls in each of the last 60 s. `brick` is the id of its first
        node.

        None for a second without an ended call, or with a call that declares no FLOP or bytes. () if all are None.
        """
        points = tuple(_point(second, at) for second, at in self._of(brick))
        return points if any(points) else ()

    def _us(self, brick: int) -> Iterator[tuple[_Second, float]]:
        return ((second, np.nan if at is None else float(second.us[at])) for second, at in self._of(brick))

    def _of(self, brick: int) -> Iterator[tuple[_Second, int | None]]:
        """Yield each stored second, oldest first, and the index of `brick` in its arrays (None: the second lacks
        it).
        """
        begin_ns = (self._begin_ns or 0) - SECONDS * _SECOND_NS
        bricks, at = _NONE, 0
        for second in self._seconds:
            if second.end_ns <= begin_ns:
                continue
            if second.brick is not bricks:
                bricks, at = second.brick, int(np.searchsorted(second.brick, brick))
            yield second, at if at < len(bricks) and bricks[at] == brick else None


_NONE = np.zeros(0, np.int64)


def _column_of(bricks: Column, rows: NDArray[np.float64], brick: int) -> list[float]:
    """Return the column of `brick` in `rows`, which has a column for each of `bricks`. NaN if it is not among
    them.
    """
    at = int(np.searchsorted(bricks, brick))
    found: list[float] = rows[:, at].tolist() if at < len(bricks) and bricks[at] == brick else [np.nan] * len(rows)
    return found


def _totals(nodes: NodeTable, stats: NodeStats) -> _Totals:
    size = min(len(nodes) + 1, len(stats))
    columns = (nodes.column(name)[:size] for name in ("kind_of", "first_of", "step_of", "parent_of"))
    kind_of, first_of, step_of, parent_of = columns
    count = stats.column("count")[:size]
    ran = np.flatnonzero((kind_of == NodeKind.BRICK) & (count > 0))
    bricks = distinct(first_of[ran])[:MAX_BRICKS]
    work = _work(ran, np.searchsorted(bricks, first_of[ran]), len(bricks), nodes, stats)
    # Of bricks of the same name inside each other, only the outer one's time counts (see BrickStats.closed.once_ns).
    ran = ran[outermost(ran, nodes)[ran]]
    at = np.searchsorted(bricks, first_of[ran])
    ran, at = ran[at < len(bricks)], at[at < len(bricks)]
    in_phase = (step_of >= 0) & (parent_of[step_of] == 0)
    is_call = ~in_phase[ran]
    time_ns, units = np.zeros(len(bricks), np.int64), np.zeros(len(bricks), np.int64)
    np.add.at(time_ns, at, np.where(is_call, stats.column("total_ns")[ran], stats.column("closed_ns")[ran]))
    np.add.at(units, at[is_call], count[ran[is_call]])
    step = np.where(in_phase[bricks], step_of[bricks], -1)
    of_recorded = stats.of_recorded("elements")
    tokens = {one: int(of_recorded[one]) for one in distinct(step[step >= 0]).tolist()}
    units[step >= 0] = of_recorded[step[step >= 0]]
    return _Totals(bricks, time_ns, units, step, tokens, work)


def _work(ran: Column, at: Column, bricks: int, nodes: NodeTable, stats: NodeStats) -> NDArray[np.float64]:
    """Return the work of each brick, (5, bricks). The rows are FLOP, bytes, time (ns), calls without declared FLOP,
    calls without declared bytes.

    All are zero if no brick declares work. Calls are added up as in `brick_stats`. `at` has the brick index of each
    node in `ran`, or the number of bricks for a node that does not count.
    """
    found = np.zeros((5, bricks))
    per_call, per_element = nodes.made_of("lines", None, ran, lambda: _lines(ran, nodes))
    given, uncounted = (np.isin(ran, list(stats.sparse[name].keys())) for name in ("amounts", "uncounted"))
    if np.isnan(per_call).all() and not given.any():
        return found
    count, elements, time_ns = (stats.column(name)[ran] for name in ("count", "elements", "total_ns"))
    work = per_call * count + per_element * elements  # FLOP and bytes of each node, shape (2, nodes)
    unknown = np.where(np.isnan(work), count, 0)
    work[np.isnan(work)] = 0
    for place in np.flatnonzero(given | uncounted).tolist():
        node = int(ran[place])
        for row, unit in enumerate(("flops", "bytes")):
            if given[place]:
                work[row, place] = stats.sparse[unit].get(node) or 0
                unknown[row, place] = count[place] - (stats.sparse[f"{unit}_given"].get(node) or 0)
            elif per_element[row, place] > 0:
                unknown[row, place] = stats.sparse["uncounted"].get(node) or 0
    kept = at < bricks
    for row, values in enumerate((*work, time_ns, *unknown)):
        found[row] = np.bincount(at[kept], values[kept], bricks)
    return found


def _lines(ran: Column, nodes: NodeTable) -> NDArray[np.float64]:
    """Return the FLOP and bytes that each node declares, per call and per element, as (2, 2, nodes). NaN if not
    declared.
    """
    likes, which = np.unique(nodes.column("like_of")[ran], return_inverse=True)
    works = [nodes[like].work for like in likes.tolist()]
    units = zip(FLOPS, BYTES, strict=True)
    lines = np.array([[[getattr(work, name) for work in works] for name in pair] for pair in units], np.float64)
    return lines[:, :, which]


def _known(work: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return FLOP, bytes and time of each brick in one second. FLOP and bytes are NaN if a call did not declare
    them.
    """
    if not work.any():
        return np.zeros((3, 0), np.float32)
    # Values too large for float32 become infinite, and are not plotted.
    with np.errstate(over="ignore"):
        known = work[:3].astype(np.float32)
    known[:2][work[3:] != 0] = np.nan
    return known


def _point(second: _Second, at: int | None) -> tuple[float, float] | None:
    if at is None or not second.work.size:
        return None
    flops, moved_bytes, time_ns = second.work[:, at].tolist()
    if not (0 < flops < np.inf and 0 < moved_bytes < np.inf and time_ns > 0):
        return None
    return flops / moved_bytes, flops / time_ns
