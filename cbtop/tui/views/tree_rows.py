"""The rows of the foldable tree: which nodes are visible, their order, and their connectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.text.row_filter import matcher
from cbtop.viewmodels.graph import GraphRow

Place = GraphRow | Node  # a node at its place, with or without measurements


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A visible node with its connectors. `at` is its index in the graph, `line` its index among the rows."""

    at: int
    line: int
    id: int
    parent: int | None
    connectors: str
    has_children: bool
    unfolded: bool


class FoldedTree:
    """The nodes of a graph, which of them are unfolded, and how siblings are sorted."""

    def __init__(self) -> None:
        self.places: Sequence[Place] = ()
        self.unfolded: frozenset[int] = frozenset()
        self._ranks: dict[int, float] | None = None  # of nodes, in sort order; None: in execution order

    def rows(self) -> list[TreeRow]:
        """Return the visible nodes in drawing order."""
        return visible_rows(self.places, self.unfolded, self._ranks)

    def all_rows(self) -> list[TreeRow]:
        """Return all nodes in execution order, as if everything was unfolded."""
        return visible_rows(self.places, self._everything())

    def sort(self, rows: Sequence[TreeRow], sort_key: Callable[[TreeRow], float]) -> None:
        """Sort siblings by ascending `sort_key` of their `rows`."""
        self._ranks = {row.id: sort_key(row) for row in rows}

    def sort_by_execution(self) -> None:
        """Sort siblings in execution order."""
        self._ranks = None

    def unfold_first_layers(self, max_rows: int) -> None:
        """Unfold only the first layer, and further layers as long as at most `max_rows` rows are visible."""
        layers = [place.id for place in self.places if place.kind is NodeKind.LAYER] or [self.places[0].id]
        self.unfolded = frozenset(layers[:1])
        for count in range(2, len(layers) + 1):
            more = frozenset(layers[:count])
            if len(visible_rows(self.places, more)) > max_rows:
                break
            self.unfolded = more

    def toggle_all(self) -> None:
        """Unfold everything, or fold everything if something is unfolded."""
        self.unfolded = frozenset() if self.unfolded else self._everything()

    def ancestors(self, node: int) -> frozenset[int]:
        """Return the nodes around `node`."""
        parents = {place.id: place.parent for place in self.places}
        outer, parent = set[int](), parents.get(node)
        while parent in parents:
            outer.add(parent)
            parent = parents[parent]
        return frozenset(outer)

    def matches(self, wanted: str) -> list[int]:
        """Return the indices of the nodes with a name or category that matches `wanted`."""
        looks_like = matcher(wanted)
        return [at for at, place in enumerate(self.places) if any(looks_like(word) for word in _words(place))]

    def _everything(self) -> frozenset[int]:
        return frozenset(place.id for place in self.places)


def visible_rows(
    places: Sequence[Place], unfolded: frozenset[int], ranks: Mapping[int, float] | None = None
) -> list[TreeRow]:
    """Return the nodes whose ancestors are all unfolded, with connectors, in drawing order.

    Siblings are in execution order, or by ascending `ranks`.
    """
    outside = places[0].parent if places else None
    order = range(len(places)) if ranks is None else _ranked(places, ranks)
    last_child: dict[int | None, int] = {places[at].parent: places[at].id for at in order}
    rows: list[TreeRow] = []
    indents: dict[int | None, str] = {}  # for the children of visible unfolded nodes
    for at in order:
        place = places[at]
        if place.parent in (None, outside):
            parent, connectors, indent = None, "", ""
        elif place.parent in indents:
            parent, is_last = place.parent, last_child[place.parent] == place.id
            connectors = indents[parent] + ("└── " if is_last else "├── ")
            indent = indents[parent] + ("    " if is_last else "│   ")
        else:
            continue
        is_unfolded = place.id in unfolded
        rows.append(TreeRow(at, len(rows), place.id, parent, connectors, place.id in last_child, is_unfolded))
        if is_unfolded:
            indents[place.id] = indent
    return rows


def _ranked(places: Sequence[Place], ranks: Mapping[int, float]) -> Sequence[int]:
    """Return the indices of nodes in `places`, each before its children, siblings by rank."""
    children: dict[int | None, list[int]] = {}
    for at, place in enumerate(places):
        children.setdefault(place.parent, []).append(at)

    def next_last(found: Sequence[int]) -> list[int]:
        return sorted(found, key=lambda at: ranks[places[at].id])[::-1]

    order: list[int] = []
    outside = places[0].parent if places else None
    waiting = next_last([*children.get(outside, []), *(children.get(None, []) if outside is not None else [])])
    while waiting:
        at = waiting.pop()
        order.append(at)
        waiting += next_last(children.get(places[at].id, []))
    return order


def _words(place: Place) -> tuple[str, ...]:
    """Return the texts searched by `find`."""
    name = f"Layer {place.name}" if place.kind is NodeKind.LAYER else place.name
    return (name,) if place.category is None else (name, place.category.display_name)
