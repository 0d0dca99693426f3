"""Adds up the records of this process on request, for statistics without a daemon."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.brick_stats import BrickStats, CategoryStats, brick_stats, category_stats
from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.from_nodes import graph_of_nodes
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.markup import plain, share_bar, table_html
from cbtop.profiler.analysis.node_columns import ANY_STEP
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import NodeStats, sane
from cbtop.profiler.analysis.time_breakdown import Beside, TimeBreakdown, books_of, outside_steps
from cbtop.protocol.codec import sanitise
from cbtop.protocol.messages import Dependency, Node
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_PLAIN, LANE_SHIFT
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import BrickCategory, NodeKind

# Kinds of nodes that may have no time. They are in the graph if the node around them ran.
UNTIMED = (NodeKind.KERNEL, NodeKind.TRANSFER)


class Readable(Protocol):
    """A recorder that can read its records back in the same process."""

    def nodes(self) -> list[Node]:
        """Return every announced node, in order."""

    def read(self) -> Batch | None:
        """Return the records since the last read. Returns None before the first record."""

    def read_again(self) -> Batch | None:
        """Return all records that still exist. None before the first record."""


@dataclass(frozen=True, slots=True)
class Report:
    """The statistics of all records, or of those in the last `window_s` seconds.

    Numbers of steps and tokens and times of whole steps are of all steps. Bricks, categories and books are of
    recorded steps, without plain steps. `overwritten` counts records that were lost before they were read. `rejected`
    counts records with impossible values or without a node.
    """

    bricks: tuple[BrickStats, ...]
    categories: tuple[CategoryStats, ...]
    steps: int
    recorded_steps: int  # number of steps with recorded bricks
    tokens: int
    wall_ns: int  # sum of all steps' wall times in ns; 0 without steps
    recorded_ns: int  # sum of the recorded steps' wall times in ns
    union_ns: int  # time in ns when at least one step ran
    # The ns from the first step's start to the last step's end, or the length of the window.
    elapsed_ns: int
    overwritten: int
    rejected: int
    uncounted_steps: int = 0  # number of steps with unknown tokens; if there are any, no rate is known
    books: tuple[tuple[str, TimeBreakdown], ...] = ()  # (phase, time breakdown) of each phase with ended steps
    outside: Beside | None = None  # work outside of all steps; None without any
    sample_every: int = 1  # one step in this many is recorded
    # Length of the window in seconds. None: everything since the beginning or the last `reset`.
    window_s: float | None = None
    phases: int = 1  # number of phases with an ended step; rates are of all phases together
    ended_why: str = ""  # reason why recording ended; "" while recording goes on

    @property
    def total_ns(self) -> int:
        """The time in ns spent in bricks. No nanosecond counts twice."""
        return sum(stats.exclusive_ns for stats in self.bricks)

    @property
    def coverage(self) -> float | None:
        """The fraction of the recorded steps' wall time that was spent in bricks. None without recorded steps."""
        closed_ns = sum(stats.closed.exclusive_ns for stats in self.bricks)
        return closed_ns / self.recorded_ns if self.recorded_ns else None

    @property
    def tokens_per_sec(self) -> float | None:
        """Tokens of all phases per second of wall-clock time, including pauses between steps. None without tokens.

        Viewers and `cbtop check` show the rate of one phase.
        """
        return self._tokens_a_second(self.elapsed_ns)

    @property
    def tokens_per_sec_in_steps(self) -> float | None:
        """Tokens of all phases per second of the time when at least one step ran. None without tokens."""
        return self._tokens_a_second(self.union_ns)

    @property
    def steps_per_sec(self) -> float | None:
        """Steps of all phases per second of wall-clock time, including pauses between steps. None without steps."""
        return 1e9 * self.steps / self.elapsed_ns if self.union_ns and self.elapsed_ns else None

    def _tokens_a_second(self, time_ns: int) -> float | None:
        is_known = self.union_ns and self.tokens and not self.uncounted_steps
        return 1e9 * self.tokens / time_ns if is_known and time_ns else None

    def __str__(self) -> str:
        """Return the report as text, as `print(profiler.report())` shows it."""
        lines = [self._first_line()]
        for stats in self.bricks:
            share = "  n/a" if (percent := self._percent(stats)) is None else f"{percent:5.1f}%"
            calls = stats.calls
            mean_us, name = calls.mean_ns / 1e3, sanitise(stats.name)
            lines.append(f"  {name:20} {mean_us:10.2f}µs incl avg ({share} excl) [{calls.count} samples]")
        for category in self.categories:
            lines.append(f"  {category.category.display_name:20} {category.exclusive_ns / 1e3:10.2f}µs excl total")
        return "\n".join([*lines, *(f"  {note}" for note in self._notes())])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the report as text. IPython calls this method in a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Return the report as HTML: the shares of the bricks, and a table. Notebooks call this method to show it."""
        shares = [(sanitise(stats.name), self._percent(stats) or 0.0) for stats in self.bricks]
        rows = [("brick", "category", "calls", "µs a call, inclusive", "share of steps, exclusive")]
        rows += [
            (
                sanitise(stats.name),
                stats.category.display_name,
                f"{stats.calls.count:,}",
                f"{stats.calls.mean_ns / 1e3:,.1f}",
                "n/a" if (percent := self._percent(stats)) is None else f"{percent:.1f} %",
            )
            for stats in self.bricks
        ]
        outside = ("not in bricks", 100 * (1 - self.coverage) if self.coverage is not None else 0.0)
        notes = "".join(f"<p>{plain(note)}</p>" for note in self._notes())
        return f"<p>{plain(self._first_line())}</p>{share_bar([*shares, outside])}{table_html(rows)}{notes}"

    def _percent(self, stats: BrickStats) -> float | None:
        """Return the exclusive time of a brick in percent of the recorded steps. Returns None without such steps."""
        return 100 * stats.closed.exclusive_ns / self.recorded_ns if self.recorded_ns else None

    def _first_line(self) -> str:
        rate = self._rate()
        of_it = "it" if self.recorded_steps == self.steps else "what was recorded"
        coverage = "n/a" if self.coverage is None else f"{100 * self.coverage:.1f} % of {of_it} in bricks"
        span = "" if self.window_s is None else f"the last {self.window_s:.1f} s: "
        sample = f"a sample, one step in {self.sample_every:,}: " if self.sample_every > 1 else ""
        recorded = "" if self.recorded_steps == self.steps else f" ({self.recorded_steps} recorded)"
        steps = f"{self.steps:,} {'step' if self.steps == 1 else 'steps'}{recorded}"
        steps += f", {self.tokens:,} tokens" if self.tokens or not self.steps else ""
        return f"{sample}{span}{steps}, {self.wall_ns / 1e3:,.1f} µs, {rate}, {coverage}"

    def _rate(self) -> str:
        """Return the rate as text: of tokens, or of steps if no step has counted its tokens."""
        steps_per_sec, in_steps = self.steps_per_sec, self.tokens_per_sec_in_steps
        if steps_per_sec is not None and not self.tokens:
            rate = f"{steps_per_sec:,.1f} steps/s ({1e9 * self.steps / self.union_ns:,.1f} in steps)"
        elif self.tokens_per_sec is None or in_steps is None:
            return "n/a"
        else:
            rate = f"{self.tokens_per_sec:,.1f} tokens/s ({in_steps:,.1f} in steps)"
        return rate + (f" of {self.phases} phases together" if self.phases > 1 else "")

    def _notes(self) -> Iterator[str]:
        """Yield notes for the reader about the time breakdowns and about lost records."""
        for phase, books in self.books:
            yield from (f"{sanitise(phase)}: {said}" for said in _said_of(books))
        if self.outside and self.books:
            yield f"{_added_up(self.outside)} outside of steps"
        if self.overwritten:
            yield f"{self.overwritten} records were overwritten before they were read"
        if self.rejected:
            yield f"{self.rejected} records named no node, or ran backwards"
        if self.ended_why:
            yield f"recording has ended: {self.ended_why}"


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over all steps of a phase since the beginning. Bricks are known only in recorded steps.

    `bricks_ns` has the exclusive time of each brick in steps that have ended. `uncounted` is the number of steps with
    an unknown number of tokens, `told_sequences` that with a known number of sequences (samples). `phase` is without
    the model, which the name of the phase may begin with.
    """

    phase: str = ""
    steps: int = 0
    tokens: int = 0
    uncounted: int = 0
    sequences: int = 0
    told_sequences: int = 0
    wall_ns: int = 0
    recorded_ns: int = 0  # wall time of the recorded steps
    bricks_ns: Mapping[str, int] = field(default_factory=dict)


def _said_of(books: TimeBreakdown) -> list[str]:
    """Return notes about the time breakdowns `books`, for example about overlaps, cancelled steps or parts larger
    than their whole.
    """
    found = []
    if not books.close:
        over_ns = max(-books.unattributed_ns, books.over_ns, sum(ns for _, ns in books.exceeded))
        found.append(
            f"the books do not close: what ran inside measured {over_ns / 1e3:.1f}µs more than what it ran in"
        )
    if books.overlap_ns:
        found.append(f"{books.overlap_ns / 1e3:.1f}µs in which two of these ran at the same time, in both")
    if books.adopted:
        found.append(f"{_added_up(books.adopted)} in other threads, outside of the steps")
    if books.unmatched_calls:
        what = "stopped twice, out of order or late, in no books"
        found.append(f"{books.unmatched_ns / 1e3:.1f}µs in {books.unmatched_calls} calls {what}")
    if books.cancelled:
        found.append(
            f"{books.cancelled} steps cancelled or renamed inside: their bricks are in the rows, in no books"
        )
    if books.in_shared_lane:
        found.append(f"{books.in_shared_lane} steps ran beside fifteen others, whose bricks are whose is not known")
    return found


def _added_up(beside: Beside) -> str:
    return f"{beside.time_ns / 1e3:.1f}µs in {beside.calls} calls, added up,"


class Session:
    """Reads the records of `recorder` back, and adds them up.

    Call it often enough that the ring does not overwrite unread records.
    """

    def __init__(self, recorder: Readable, sample_every: int = 1) -> None:
        self._recorder = recorder
        self._sample_every = sample_every
        self._table = NodeTable()
        self._is_adding = False
        self._stats = NodeStats()
        self._overwritten = self._rejected = 0
        self._reading = threading.RLock()  # this lock keeps two threads from counting the same record

    def report(self) -> Report:
        """Return the statistics of all records."""
        with self._reading:
            return self._report(self._totals(), self._overwritten, self._rejected, None)

    def window(self, window_s: float, now_ns: int) -> Report:
        """Return the statistics of the last `window_s` seconds before `now_ns`.

        They begin with the first step that began in this time.
        """
        with self._reading:
            return self._window(window_s, now_ns)

    def _window(self, window_s: float, now_ns: int) -> Report:
        since_ns = now_ns - round(window_s * 1e9)
        batch = self._recorder.read_again()
        self._add_nodes()
        stats = NodeStats()
        stats.grow(len(self._table) + 1)
        rejected = 0
        if batch is not None and len(batch.node):
            if batch.overwritten:  # a window cannot begin before the oldest record
                since_ns = max(since_ns, int(batch.end_ns[0]))
            steps = [node.id for node in self._table.children[None] if node.kind is NodeKind.STEP]
            begun = np.isin(batch.node, steps) & (batch.start_ns >= since_ns) & ~batch.are(FLAG_AMOUNTS)
            if begun.any():
                since_ns = int(batch.start_ns[begun].min())
            kept, amounts = self._began_in(batch, since_ns), batch.are(FLAG_AMOUNTS)
            # The record of a call's amounts of work directly follows the record of the call.
            recent = batch.only(np.where(amounts, np.append(False, kept[:-1]), kept))
            rejected = self._count(recent, stats)
        totals = PhaseTotals.of(self._table, stats, None)
        return self._report(totals, 0, rejected, (now_ns - since_ns) / 1e9)

    def _began_in(self, batch: Batch, since_ns: int) -> NDArray[np.bool_]:
        """Return a mask of the records that began at `since_ns` or later.

        Records in a step that began earlier are left out.
        """
        kept: NDArray[np.bool_] = batch.start_ns >= since_ns
        step_of = self._table.column("step_of")[np.minimum(batch.node, len(self._table))]
        lane = batch.flags >> LANE_SHIFT
        earlier = (step_of == batch.node) & ~kept & (batch.end_ns > since_ns)
        # Plain steps and loose calls have no records of parts.
        earlier &= ~batch.are(FLAG_AMOUNTS) & ~batch.are(FLAG_PLAIN)
        for at in np.flatnonzero(earlier).tolist():
            kept &= (step_of != batch.node[at]) | (lane != lane[at]) | (batch.end_ns > batch.end_ns[at])
        return kept

    def stats_for(self, name: str) -> BrickStats | None:
        """Return the statistics of the bricks called `name`, or None if none ran."""
        return next((stats for stats in self._bricks() if stats.name == name), None)

    def category_stats(self) -> dict[BrickCategory, CategoryStats]:
        """Return the statistics of each category. If a category did not run, its statistics are zeros."""
        found = {stats.category: stats for stats in category_stats(self._bricks())}
        return {category: found.get(category) or CategoryStats.zero(category) for category in BrickCategory}

    def phases(self) -> dict[str, StepSums]:
        """Return the sums of each phase with an ended step, by the names of the model (if it has one) and phase."""
        with self._reading:
            totals = self._totals()
            found = {}
            for node in self._table.children[None]:
                calls = totals.stats.calls([node.id]) if node.kind is NodeKind.STEP else None
                if calls is None:
                    continue
                found[display_name(node)] = StepSums(
                    phase=node.name,
                    steps=calls.count,
                    tokens=calls.elements,
                    uncounted=int(totals.stats.rare("uncounted", (node.id,))),
                    sequences=int(totals.stats.rare("sequences", (node.id,))),
                    told_sequences=int(totals.stats.rare("sequences_given", (node.id,))),
                    wall_ns=calls.total_ns,
                    recorded_ns=int(totals.stats.of_recorded("total_ns")[node.id]),
                    bricks_ns={
                        stats.name: stats.closed.exclusive_ns
                        for stats in brick_stats(PhaseTotals.below(node, self._table, totals.stats))
                    },
                )
            return found

    def graph(self, dependencies: Iterable[Dependency]) -> ExecutionGraph:
        """Return the graph of all nodes that ran, with the nodes around them and their kernels."""
        totals = self._totals()
        kept: set[int] = set()
        for node in totals.nodes:
            if totals.count[node.id]:
                above: int | None = node.id
                while above is not None and above not in kept:
                    kept.add(above)
                    above = self._table[above].parent
        nodes = [
            node for node in totals.nodes if node.id in kept or (node.kind in UNTIMED and (node.parent or 0) in kept)
        ]
        return graph_of_nodes(nodes, totals.count, totals.total_ns, totals.known_elements, dependencies)[0]

    def reset(self) -> None:
        """Forget all counts. The nodes stay, because they are announced only once."""
        self._totals()
        self._stats = NodeStats()
        self._overwritten = self._rejected = 0

    def _report(self, totals: PhaseTotals, overwritten: int, rejected: int, window_s: float | None) -> Report:
        bricks = tuple(brick_stats(totals))
        phases = [node for node in self._table.children[None] if node.kind is NodeKind.STEP]
        steps = [node.id for node in phases]
        by_phase = [PhaseTotals.below(node, self._table, totals.stats) for node in phases]
        books = [(display_name(node), books_of(of, of)) for node, of in zip(phases, by_phase, strict=True)]
        counted = totals.stats.calls(steps)
        ran = [step for step in steps if step in totals.stats.sparse["first_ns"]]
        first_ns = min((totals.stats.rare("first_ns", (step,)) for step in ran), default=0)
        last_ns = max((totals.stats.rare("last_ns", (step,)) for step in ran), default=0)
        return Report(
            bricks=bricks,
            categories=tuple(category_stats(bricks)),
            steps=counted.count if counted else 0,
            recorded_steps=int(totals.stats.of_recorded("count")[steps].sum()),
            tokens=counted.elements if counted else 0,
            wall_ns=counted.total_ns if counted else 0,
            recorded_ns=int(totals.stats.of_recorded("total_ns")[steps].sum()),
            union_ns=totals.stats.rare("union_ns", (ANY_STEP,)),
            elapsed_ns=last_ns - first_ns if window_s is None else round(window_s * 1e9),
            overwritten=overwritten,
            rejected=rejected,
            uncounted_steps=int(totals.stats.rare("uncounted", steps)),
            window_s=window_s,
            phases=max(1, len(ran)),
            books=tuple((phase, of) for phase, of in books if of is not None),
            outside=outside_steps(self._table, totals.stats),
            sample_every=self._sample_every,
        )

    def _totals(self) -> PhaseTotals:
        with self._reading:
            # A node is announced before its first record. So read the records first.
            batch = self._recorder.read()
            self._add_nodes()
            self._stats.grow(len(self._table) + 1)
            if batch is not None:
                self._overwritten += batch.overwritten
                self._rejected += self._count(batch, self._stats)
            return PhaseTotals.of(self._table, self._stats, None)

    def _bricks(self) -> list[BrickStats]:
        with self._reading:
            return brick_stats(self._totals())

    def _add_nodes(self) -> None:
        with self._reading:
            # A signal handler of the host has interrupted this, so the table is incomplete.
            if self._is_adding:
                self._table = NodeTable()
            self._is_adding = True
            for node in self._recorder.nodes()[len(self._table) :]:
                self._table.add(node)
            self._is_adding = False

    def _count(self, batch: Batch, stats: NodeStats) -> int:
        """Add the valid records of `batch` to `stats`. Returns the number of invalid ones."""
        known = batch.only(sane(batch, len(self._table)))
        stats.add(known, *self._table.columns())
        return len(batch.node) - len(known.node)
