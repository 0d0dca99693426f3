"""Summarise a run from the rings of its ended processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.source_record import SourceRecord
from cbtop.commands.shared.ring_view import record_of, view_of
from cbtop.daemon.source import Source
from cbtop.protocol.ended import rings_of_latest
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_PLAIN
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import NodeKind, is_warm_up
from cbtop.reports.summary import summary
from cbtop.viewmodels.source import SourceView

Found = TypeVar("Found")

MAX_RECORDS = 1 << 17  # maximum number of records to read from a ring; adding up this many takes 0.1 s
# Number of first steps that do not count, unless the process marks its own warm-up. They allocate memory, compile, or
# read from disk.
WARM_UP_STEPS = 3
MAX_READ = 16  # Read at most this many processes. Reading one takes 0.1 to 0.2 s.
MIN_STEPS = 10  # If a process has fewer steps than this, all of its steps count, and no warm-up is left out.


class SteadySource(Source):
    """The ring of an ended process, which is read once. Only steps of the last ten seconds count, without the
    warm-up.
    """

    def _count(self, batch: Batch) -> None:
        if not self._totals.received and len(batch.node):
            first = self._first_steady(batch)
            batch = replace(batch.only(np.arange(len(batch.node)) >= first), overwritten=batch.overwritten + first)
        super()._count(batch)

    def _first_steady(self, batch: Batch) -> int:
        """Return the index of the first record of the ring to count.

        This record directly follows the end of a step, so only whole steps count.
        """
        steps = [node.id for node in self.nodes.children[None] if node.kind is NodeKind.STEP]
        is_end = np.isin(batch.node, steps) & (batch.flags & FLAG_PLAIN != FLAG_AMOUNTS)
        ends = np.flatnonzero(is_end)
        if not len(ends):
            return 0
        ended_ns = batch.end_ns[ends]
        is_early = ended_ns < int(ended_ns.max()) - round(DEFAULT_WINDOW_S * 1e9)
        is_early |= ends < len(batch.node) - MAX_RECORDS
        is_named = any(is_warm_up(self.nodes[step].name) for step in steps)
        if len(ends) >= MIN_STEPS and not is_named:
            is_early[:WARM_UP_STEPS] = True
        early = ends[is_early]
        if not len(early):
            return 0
        first = int(early[-1]) + 1
        says_size = batch.are(FLAG_AMOUNTS) & (batch.node == batch.node[first - 1])
        # This record has only the sequences of the previous step, and so belongs to it.
        while first < len(says_size) and says_size[first]:
            first += 1
        return first


def run_summary(
    directory: str,
    command_pid: int,
    pids: Sequence[int],
    next_command: str,
    waits: Mapping[int, float],
    note: str = "",
) -> list[str]:
    """Return the lines of the summary, about the process with the most time in steps (if equal, the command's own).

    `pids` are the processes that recorded steps. `waits` says how many percent of its last seconds each waited for a
    processor. `note` is one more line. [] if no ring can be read.
    """
    found: list[tuple[float, SourceView]] = []
    for pid in sorted(pids, key=lambda pid: pid != command_pid)[:MAX_READ]:
        for ring in _rings(directory, pid):
            view = _view(ring, waits.get(pid))
            if view is not None and view.steps is not None and view.steps.count:
                found.append((sum(steps.union_us or 0.0 for steps in view.phases), view))
    if not found:
        return []
    _, view = max(found, key=lambda one: one[0])
    return summary(view, next_command, more_processes=len(pids) - 1, note=note)


def _rings(directory: str, pid: int) -> list[Path]:
    return [Path(directory, name) for name in rings_of_latest(os.listdir(directory), pid)]


def _view(ring: Path, waiting_percent: float | None) -> SourceView | None:
    """Return the view of the process of `ring`, or None if the ring cannot be read."""

    def process(pid: int) -> SourceRecord | None:
        rings = _rings(str(ring.parent), pid)
        return _of_ring(rings[0], Source, record_of) if rings else None

    return _of_ring(ring, SteadySource, lambda source: view_of(source, waiting_percent, process))


def _of_ring(ring: Path, kind: type[Source], read: Callable[[Source], Found | None]) -> Found | None:
    """Call `read` with the process of `ring`, and return its result. Returns None if the ring cannot be read."""
    try:
        source = kind(ring)
    except (ProtocolError, OSError):
        return None
    try:
        return read(source)
    finally:
        source.close()
