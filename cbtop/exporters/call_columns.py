"""Make tables of calls with typed columns. A table has one row per call, with the step, layer and brick around the
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cbtop.exporters.base import RecordedProcess, kind_name
from cbtop.exporters.step_numbers import NO_STEP, UNKNOWN, NumberedCalls, numbered
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import printable
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_FAILED, FLAG_PLAIN, FLAG_UNCOUNTED
from cbtop.protocol.vocabulary import NodeKind
from cbtop.tables.column_table import ColumnTable, joined_columns
from cbtop.tables.typed_column import TypedColumn

Columns = dict[str, TypedColumn]
# The columns of each table, in order. The columns of the place (step, phase, layer …) come before the columns of the
# call itself.
PLACE = ("step", "phase", "model", "layer", "stack")
TIMES = ("begin_s", "duration_us")
PROCESS = ("failed", "program", "pid", "rank", "source", "node")
OF_STEPS = ("step", "phase", "model", *TIMES, "tokens", "sequences", "cached_positions", "plain", *PROCESS)
OF_LAYERS = (*PLACE, *TIMES, "adopted", *PROCESS)
OF_BRICKS = (*PLACE, "brick", "label", "outer_brick", "category", "backend", *TIMES, "elements", "adopted", *PROCESS)
OF_KERNELS = (*PLACE, "brick", "label", "kernel", "kind", "backend", *TIMES, "elements", "adopted", *PROCESS)
OF_CALLS = (
    *PLACE, "brick", "label", "kernel", "kind", "category", "backend", *TIMES,
    "elements", "plain", "adopted", *PROCESS,
)  # fmt: skip
# Columns that may differ between calls of one node. All others depend only on the node.
OF_RECORDS = frozenset(
    {"step", *TIMES, "elements", "tokens", "sequences", "cached_positions", "failed", "plain", "node"}
)
# Maximum number of digits in the number of a layer. A number with more digits might not fit into 32 bits.
MAX_DIGITS = 9


class NodePlaces:
    """The names of the phase, layer and brick that contain each node of a process. Each list has a text or None for
    each node id.
    """

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        size = len(table) + 1
        self._of: dict[str, list[str | None]] = {name: [None] * size for name in _TEXTS}
        self.layer: list[int | None] = [None] * size
        # whether other threads or tasks do the node's work, so that its time is not part of the step
        self.adopted = np.zeros(size, np.bool_)
        for node in table.nodes:
            self._place(node)

    def texts(self, name: str) -> Sequence[str | None]:
        """Return the texts of the column `name`, one for each node id."""
        return self._of[name]

    def _place(self, node: Node) -> None:
        """Set the texts of a node in all columns. The texts of the node's parent must already be set."""
        found, around = self._of, node.parent or 0
        for name in ("phase", "model", "stack", "brick", "label"):
            found[name][node.id] = found[name][around]
        self.layer[node.id] = self.layer[around]
        self.adopted[node.id] = self.adopted[around] or node.kind is NodeKind.ADOPTED
        if self._table.step_of[node.id] == node.id:
            found["phase"][node.id], found["model"][node.id] = node.name, node.label or None
        elif node.kind is NodeKind.LAYER and self.layer[around] is None:
            self.layer[node.id], found["stack"][node.id] = _layer_number(node.name), node.label or None
        elif node.kind is NodeKind.BRICK:
            found["outer_brick"][node.id] = found["brick"][around]
            found["brick"][node.id], found["label"][node.id] = node.name, node.label or None
        elif node.kind in (NodeKind.KERNEL, NodeKind.TRANSFER):
            found["kernel"][node.id] = node.name
        found["kind"][node.id] = kind_name(node)
        found["backend"][node.id] = node.backend or None
        found["category"][node.id] = None if node.category is None else node.category.display_name


_TEXTS = ("phase", "model", "stack", "brick", "label", "outer_brick", "kernel", "kind", "category", "backend")
_OF_PROCESS = ("program", "source")


def _layer_number(name: str) -> int | None:
    """Return the number of a layer. Returns None if the layer's name is not a number of at most 32 bits."""
    if not (name.isascii() and name.isdecimal() and len(name) <= MAX_DIGITS):
        return None
    return int(name)


# a function that chooses nodes: it returns a mask with an entry for each node id
Choice = Callable[[NodeTable], NDArray[np.bool_]]


def of_kinds(*kinds: NodeKind) -> Choice:
    """Return a function that chooses the nodes of these kinds."""
    return lambda table: np.isin(table.column("kind_of"), kinds)


def are_steps(table: NodeTable) -> NDArray[np.bool_]:
    """Return a mask of the nodes of whole steps. A step inside another step does not count as a whole one."""
    found: NDArray[np.bool_] = table.column("step_of") == np.arange(len(table) + 1)
    return found


class CallColumns:
    """Makes the columns `names` of a table with the calls of `processes`. Each call of a node that `choice` selects
    is a row.

    Times count from the earliest record of all processes.
    """

    def __init__(self, processes: Sequence[RecordedProcess], names: Sequence[str], choice: Choice) -> None:
        self._processes = processes
        self._names = names
        self._choice = choice
        self._begin_ns = min((one.records.begin_ns for one in processes if len(one.records)), default=0)
        # for each text column: the texts with their indices
        self._texts: dict[str, dict[str, int]] = {name: {} for name in names if name in (*_TEXTS, *_OF_PROCESS)}
        self._by_node = [self._columns_by_node(process) for process in processes]

    def parts(self) -> Iterator[Columns]:
        """Yield the rows in parts with all columns, at least one for each process.

        A part fits in memory. All parts share the columns' texts.
        """
        for at in range(len(self._processes)):
            yield from self._parts(at, self._names)

    def table(self) -> ColumnTable:
        """Return the columns of all rows as one table."""
        wholes = []
        for at, by_node in enumerate(self._by_node):
            # Columns that depend only on the node are looked up last. Joining them from parts would need twice their
            # memory.
            own = joined_columns(list(self._parts(at, [name for name in self._names if name in OF_RECORDS])))
            node = own["node"].values
            wholes.append({name: own.get(name) or by_node[name].rows(node) for name in self._names})
        return ColumnTable(joined_columns(wholes))

    def _parts(self, at: int, names: Sequence[str]) -> Iterator[Columns]:
        process, by_node = self._processes[at], self._by_node[at]
        is_chosen = self._choice(process.nodes)
        for found in numbered(process):
            rows = found.only(is_chosen[found.calls.node])
            yield {name: self._column(name, rows, by_node) for name in names}

    def _columns_by_node(self, process: RecordedProcess) -> Columns:
        """Return the columns that depend only on the node and the process. Each column has one value for each node
        id.
        """
        places, size = NodePlaces(process.nodes), len(process.nodes) + 1
        found = {"node": TypedColumn(np.arange(size, dtype=np.int32))}
        found["pid"] = TypedColumn(np.full(size, process.pid, np.int64))
        found["rank"] = TypedColumn.of_numbers([process.rank] * size, np.int32)
        found["layer"] = TypedColumn.of_numbers(places.layer, np.int32)
        found["adopted"] = TypedColumn(places.adopted)
        own = {"program": process.process, "source": process.key}
        for name, codes in self._texts.items():
            texts = [own[name]] * size if name in own else places.texts(name)
            found[name] = TypedColumn.of_texts((text and printable(text) for text in texts), codes)
        return found

    def _column(self, name: str, rows: NumberedCalls, by_node: Columns) -> TypedColumn:
        calls = rows.calls
        match name:
            case "step":
                return TypedColumn(rows.step, is_known=rows.step != NO_STEP)
            case "begin_s":
                return TypedColumn((calls.start_ns - self._begin_ns) / 1e9)
            case "duration_us":
                return TypedColumn((calls.end_ns - calls.start_ns) / 1e3)
            case "elements":
                return TypedColumn(calls.elements, is_known=(calls.flags & FLAG_UNCOUNTED) == 0)
            case "tokens":  # A step that reports 0 tokens has not counted its tokens, so their number is unknown.
                return TypedColumn(calls.elements, is_known=calls.elements > 0)
            case "sequences":
                return TypedColumn(rows.sequences, is_known=rows.sequences != UNKNOWN)
            case "cached_positions":
                return TypedColumn(rows.cached, is_known=rows.cached != UNKNOWN)
            case "failed":
                return TypedColumn((calls.flags & FLAG_FAILED) != 0)
            case "plain":
                return TypedColumn(calls.are(FLAG_PLAIN))
            case _:
                return by_node[name].rows(calls.node)
