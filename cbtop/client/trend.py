"""What each brick took for a token in each of the last sixty seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.brick_stats import outermost
from cbtop.profiler.graph.node_table import NodeTable
from cbtop.profiler.histograms import Column, distinct
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.vocabulary import NodeKind

SECONDS = 60
_SECOND_NS = (
    1_000_000_000  # one begins with the first thing said in such a part of the daemon's time: for all viewers
)
MAX_BRICKS = 256  # of a source: those whose first nodes were defined first
_SECOND_BYTES = 400  # about, beside its numbers


@dataclass(frozen=True, slots=True)
class _Totals:
    """Of a brick in steps its time in ended ones, and their tokens; of any other its time and its calls."""

    brick: Column  # the first node of each (NodeTable.first_of), ascending
    time_ns: Column
    units: Column
    step: Column  # the step that it lies in, -1 for none
    tokens: dict[int, int]  # of each step


@dataclass(frozen=True, slots=True)
class _Second:
    """What each brick took between two moments; no number where nothing of it ended."""

    end_ns: int
    brick: Column
    us: NDArray[np.float64]


class BrickTrend:
    """One value a second of each brick of one source."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=SECONDS)
        self._begin_ns: int | None = None  # of the second that runs
        self._totals = _Totals(_NONE, _NONE, _NONE, _NONE, {})  # then

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        return (3 + len(self._seconds)) * (_SECOND_BYTES + self._totals.brick.nbytes)

    def tick(self, monotonic_ns: int, nodes: NodeTable, stats: NodeStats) -> None:
        """It is `monotonic_ns` on the daemon's clock: end a second if it is over."""
        if self._begin_ns is not None and monotonic_ns // _SECOND_NS <= self._begin_ns // _SECOND_NS:
            return
        before, now = self._totals, _totals(nodes, stats)
        if np.array_equal(before.brick, now.brick):
            now = replace(now, brick=before.brick)  # the seconds share it
        if self._begin_ns is not None:
            known = np.isin(before.brick, now.brick)  # one of too many may have been cut off
            at = np.searchsorted(now.brick, before.brick[known])
            # Of a brick that is new the tokens before it ran are none of its.
            units = now.units - np.array([before.tokens.get(step, 0) for step in now.step.tolist()], np.int64)
            units[at] = now.units[at] - before.units[known]
            took_ns = now.time_ns.copy()
            took_ns[at] -= before.time_ns[known]
            ended = (units > 0) & (took_ns >= 0)
            us = np.full(len(now.brick), np.nan)
            us[ended] = took_ns[ended] / units[ended] / 1e3
            self._seconds.append(_Second(monotonic_ns, now.brick, us))
        self._begin_ns, self._totals = monotonic_ns, now

    def us(self, brick: int) -> tuple[float | None, ...]:
        """Of a brick, by its first node: the time (µs) for a token, or for a call where it runs in no step, in each
        second of the last sixty, the oldest first; None where none ended in it."""
        return tuple(us for _, us in self._of(brick))

    def by_second(self, brick: int) -> dict[int, float]:
        """The same by the second of the daemon's clock in which each ended."""
        return {second: us for second, us in self._of(brick) if us is not None}

    def _of(self, brick: int) -> list[tuple[int, float | None]]:
        begin_ns = (self._begin_ns or 0) - SECONDS * _SECOND_NS
        found: list[tuple[int, float | None]] = []
        bricks, at = _NONE, 0
        for second in self._seconds:
            if second.end_ns <= begin_ns:
                continue
            if second.brick is not bricks:
                bricks, at = second.brick, int(np.searchsorted(second.brick, brick))
            us = float(second.us[at]) if at < len(bricks) and bricks[at] == brick else np.nan
            found.append((second.end_ns // _SECOND_NS, None if us != us else us))
        return found


_NONE = np.zeros(0, np.int64)


def _totals(nodes: NodeTable, stats: NodeStats) -> _Totals:
    size = min(len(nodes) + 1, len(stats))
    columns = (nodes.column(name)[:size] for name in ("kind_of", "first_of", "step_of", "parent_of"))
    kind_of, first_of, step_of, parent_of = columns
    count = stats.column("count")[:size]
    ran = np.flatnonzero((kind_of == NodeKind.BRICK) & (count > 0))
    bricks = distinct(first_of[ran])[:MAX_BRICKS]
    # As in BrickStats.closed.once_ns: a brick inside another of its name counts once.
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
    return _Totals(bricks, time_ns, units, step, tokens)
