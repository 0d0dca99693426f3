"""Export to JSON lines, one object per record."""

from __future__ import annotations

import json
from typing import TextIO

from cbtop.exporters.base import RecordedProcess, kind_name
from cbtop.profiler.analysis.graph.nodes import display_name


def write_json_lines(recorded: RecordedProcess, out: TextIO) -> None:
    """Write the fields of each record as one line, with the parent, kind and name of its node."""
    for record in recorded.records:
        node = recorded.nodes[record.node]
        named = {"parent": node.parent, "kind": kind_name(node), "name": display_name(node)}
        out.write(json.dumps(record._asdict() | named) + "\n")
