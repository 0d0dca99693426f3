"""Export to comma-separated values (CSV), one row per record."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any, TextIO

from cbtop.exporters.base import RecordedProcess, kind_name
from cbtop.exporters.records import listed
from cbtop.profiler.analysis.graph.nodes import display_name, printable

# If a text begins with one of these characters, a spreadsheet takes it for a formula. See
# owasp.org/www-community/attacks/CSV_Injection.
FORMULA = tuple("=+-@＝＋－＠")
PLACES = ("step", "phase", "model", "layer", "stack", "brick", "label")
COLUMNS = ("node", "parent", "kind", "name", "start_ns", "end_ns", "elements", "failed", "plain", *PLACES)


def write_csv(recorded: RecordedProcess, out: TextIO) -> None:
    """Write CSV as in RFC 4180 with a header row. `failed` and `plain` are 0 or 1.

    A field is empty if it is unknown or does not exist, such as the parent of a root or the step of a call outside of
    steps. A single quote comes before a name that a spreadsheet would take for a formula.
    """
    from cbtop.exporters.step_numbers import numbered  # imported here, because this module imports NumPy

    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    named = [(n.id, n.parent, kind_name(n), _cell(printable(display_name(n)))) for n in recorded.nodes.nodes]
    places = list(_places(recorded))
    for found in numbered(recorded):
        for r, step in zip(listed(found.calls), found.step.tolist(), strict=True):
            elements = "" if r.elements is None else r.elements
            fields = (r.start_ns, r.end_ns, elements, int(r.failed), int(r.plain), step or "")
            writer.writerow((*named[r.node - 1], *fields, *places[r.node]))


def _places(recorded: RecordedProcess) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of one node after the other, from node id 0 on. The fields are the columns in PLACES after the
    step.
    """
    from cbtop.exporters.call_columns import NodePlaces  # imported here, because this module imports NumPy

    places = NodePlaces(recorded.nodes)
    texts = {name: places.texts(name) for name in PLACES if name not in ("step", "layer")}
    cells = ([_cell(printable(text or "")) for text in column] for column in texts.values())
    phase, model, *others = cells
    layer = ["" if number is None else number for number in places.layer]
    return zip(phase, model, layer, *others, strict=True)


def _cell(name: str) -> str:
    return f"'{name}" if name.startswith(FORMULA) else name
