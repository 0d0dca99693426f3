"""Comma-separated values, one row a record."""

from __future__ import annotations

import csv
from typing import TextIO

from cbtop.exporters.base import RecordedProcess, kind_name
from cbtop.profiler.graph.nodes import display_name, printable

COLUMNS = ("node", "parent", "kind", "name", "start_ns", "end_ns", "elements", "failed")


def write_csv(recorded: RecordedProcess, out: TextIO) -> None:
    """RFC 4180, with a header; names in one line, no parent is an empty field, failed is 0 or 1."""
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    named = [(n.id, n.parent, kind_name(n), printable(display_name(n))) for n in recorded.nodes.nodes]
    for r in recorded.records:
        writer.writerow(
            (*named[r.node - 1], r.start_ns, r.end_ns, "" if r.elements is None else r.elements, int(r.failed))
        )
