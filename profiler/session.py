"""What this process has recorded so far, added up when it is asked for: statistics without a daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cbtop.profiler.brick_stats import BrickStats, CategoryStats, brick_stats, category_stats
from cbtop.profiler.graph.node_table import NodeTable
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import Batch
from cbtop.protocol.vocabulary import BrickCategory, NodeKind


class Readable(Protocol):
    """A recorder that can be read back."""

    def nodes(self) -> list[Node]:
        """Every node announced so far, in order."""

    def read(self) -> Batch | None:
        """The records since the last read; None before the first record."""


@dataclass(frozen=True, slots=True)
class Report:
    """The statistics of everything recorded. `overwritten` records were lost before they were read."""

    bricks: tuple[BrickStats, ...]
    categories: tuple[CategoryStats, ...]
    steps: int
    tokens: int
    wall_ns: int  # of the steps; 0 without steps
    overwritten: int

    @property
    def total_ns(self) -> int:
        """The time spent in bricks, none of it counted twice."""
        return sum(stats.exclusive_ns for stats in self.bricks)

    @property
    def coverage(self) -> float | None:
        """The share of the steps' wall time that was spent in bricks; None without steps."""
        return self.total_ns / self.wall_ns if self.wall_ns else None

    @property
    def tokens_per_sec(self) -> float | None:
        """Tokens a second of step wall time; None without steps."""
        return 1e9 * self.tokens / self.wall_ns if self.wall_ns else None

    def __str__(self) -> str:
        """The report as text, as `print(profiler.report())` shows it."""
        rate = "n/a" if self.tokens_per_sec is None else f"{self.tokens_per_sec:.1f} tokens/s"
        coverage = "n/a" if self.coverage is None else f"{100 * self.coverage:.1f} % of it in bricks"
        lines = [f"{self.steps} steps, {self.tokens} tokens, {self.wall_ns / 1e3:.1f}µs, {rate}, {coverage}"]
        for stats in self.bricks:
            share = f"{100 * stats.exclusive_ns / self.wall_ns:5.1f}%" if self.wall_ns else "  n/a"
            calls = stats.calls
            lines.append(f"  {stats.name:20} {calls.mean_ns / 1e3:10.2f}µs avg ({share}) [{calls.count} samples]")
        for category in self.categories:
            lines.append(f"  {category.category.display_name:20} {category.exclusive_ns / 1e3:10.2f}µs total")
        if self.overwritten:
            lines.append(f"  {self.overwritten} records were overwritten before they were read")
        return "\n".join(lines)


class Session:
    """Reads back what `recorder` was given. Ask often enough that the ring does not overwrite what was not read."""

    def __init__(self, recorder: Readable) -> None:
        self._recorder = recorder
        self._table = NodeTable()
        self._stats = NodeStats()
        self._overwritten = 0

    def report(self) -> Report:
        """Everything so far."""
        totals = self._totals()
        bricks = tuple(brick_stats(totals))
        steps = [node for node in self._table.children[None] if node.kind is NodeKind.STEP]
        counted = self._stats.calls([step.id for step in steps])
        return Report(
            bricks=bricks,
            categories=tuple(category_stats(bricks)),
            steps=counted.count if counted else 0,
            tokens=counted.elements if counted else 0,
            wall_ns=counted.total_ns if counted else 0,
            overwritten=self._overwritten,
        )

    def stats_for(self, name: str) -> BrickStats | None:
        """The statistics of the bricks called `name`; None where none ran."""
        return next((stats for stats in brick_stats(self._totals()) if stats.name == name), None)

    def category_stats(self) -> dict[BrickCategory, CategoryStats]:
        """The categories that ran."""
        return {stats.category: stats for stats in category_stats(brick_stats(self._totals()))}

    def _totals(self) -> PhaseTotals:
        batch = self._recorder.read()  # before the nodes: what a record names was announced before it
        for node in self._recorder.nodes()[len(self._table) :]:
            self._table.add(node)
        self._stats.grow(len(self._table) + 1)
        if batch is not None:
            self._overwritten += batch.overwritten
            known = batch.only((batch.node >= 1) & (batch.node <= len(self._table)))
            self._stats.add(known, np.array(self._table.step_of, np.int64))
        return PhaseTotals.of(self._table, self._stats, None)
