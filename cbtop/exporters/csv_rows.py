"""Comma-separated values, one row per record."""

from __future__ import annotations

import csv
from typing import TextIO

from cbtop.exporters.base import RecordedProcess, kind_name
from cbtop.profiler.analysis.graph.nodes import display_name, printable

FORMULA = tuple("=+-@＝＋－＠")  # First characters of a formula. See owasp.org/www-community/attacks/CSV_Injection.
COLUMNS = ("node", "parent", "kind", "name", "start_ns", "end_ns", "elements", "failed", "plain")


def write_csv(recorded: RecordedProcess, out: TextIO) -> None:
    """Write RFC 4180 with a header. A name never contains a line break. Failed and plain are 0 or 1.

    If a node has no parent, the parent field is empty. A name that a spreadsheet would take for a formula has a
    single quote in front.
    """
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    named = [(n.id, n.parent, kind_name(n), _cell(printable(display_name(n)))) for n in recorded.nodes.nodes]
    for r in recorded.records:
        elements = "" if r.elements is None else r.elements
        writer.writerow((*named[r.node - 1], r.start_ns, r.end_ns, elements, int(r.failed), int(r.plain)))


def _cell(name: str) -> str:
    return f"'{name}" if name.startswith(FORMULA) else name
