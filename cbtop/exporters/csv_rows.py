"""Comma-separated values, one row per record."""

from __future__ import annotations

import csv
from typing import TextIO

from cbtop.exporters.base import RecordedProcess, kind_name
from cbtop.profiler.analysis.graph.nodes import display_name, printable

# A spreadsheet takes a text with this first character for a formula. See
# owasp.org/www-community/attacks/CSV_Injection.
FORMULA = tuple("=+-@＝＋－＠")
COLUMNS = ("node", "parent", "kind", "name", "start_ns", "end_ns", "elements", "failed", "plain")


def write_csv(recorded: RecordedProcess, out: TextIO) -> None:
    """Write CSV as in RFC 4180 with a header row. `failed` and `plain` are 0 or 1.

    The parent field is empty if a node has no parent. A single quote precedes a name that a spreadsheet would take
    for a formula.
    """
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    named = [(n.id, n.parent, kind_name(n), _cell(printable(display_name(n)))) for n in recorded.nodes.nodes]
    for r in recorded.records:
        elements = "" if r.elements is None else r.elements
        writer.writerow((*named[r.node - 1], r.start_ns, r.end_ns, elements, int(r.failed), int(r.plain)))


def _cell(name: str) -> str:
    return f"'{name}" if name.startswith(FORMULA) else name
