"""The rows of a foldable tree: the visible nodes in drawing order, with connectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.text.row_filter import matcher
from cbtop.viewmodels.graph import GraphRow

Place = GraphRow | Node  # a node of the graph, with or without measurements


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A visible node of the tree. `at` is its index in the graph, and `line` is its index in the rows."""

    at: int
    line: int
    id: int
    parent: int | None
    connectors: str
    has_children: bool
    unfolded: bool


class FoldedTree:
    """The nodes of a graph, the set of unfolded nodes, and the order of siblings."""

    def __init__(self) -> None:
        self.places: Sequence[Place] = ()
        self.unfolded: frozenset[int] = frozenset()
        # maps the id of a node to its sort key among siblings; None for execution order
        self._ranks: dict[int, float] | None = None

    def rows(self) -> list[TreeRow]:
        """Return the visible nodes of the tree in drawing order."""
        return visible_rows(self.places, self.unfolded, self._ranks)

    def all_rows(self) -> list[TreeRow]:
        """Return all nodes of the tree in execution order, including nodes inside of folded ones."""
        return visible_rows(self.places, self._everything())

    def sort(self, rows: Sequence[TreeRow], sort_key: Callable[[TreeRow], float]) -> None:
        """Sort siblings of the tree in ascending order of their sort keys.

        `sort_key` returns the key of a row in `rows`.
        """
        self._ranks = {row.id: sort_key(row) for row in rows}

    def sort_by_execution(self) -> None:
        """Put the children of each node in execution order."""
        self._ranks = None

    def unfold_first_layers(self, max_rows: int) -> None:
        """Unfold the first layer, and more layers while at most `max_rows` rows are visible. Fold all other nodes."""
        layers = [place.id for place in self.places if place.kind is NodeKind.LAYER] or [self.places[0].id]
        self.unfolded = frozenset(layers[:1])
        for count in range(2, len(layers) + 1):
            more = frozenset(layers[:count])
            if len(visible_rows(self.places, more)) > max_rows:
                break
            self.unfolded = more

    def toggle_all(self) -> None:
        """Fold all nodes if any node is unfolded. Otherwise unfold all nodes."""
        self.unfolded = frozenset() if self.unfolded else self._everything()

    def ancestors(self, node: int) -> frozenset[int]:
        """Return the ids of all ancestors of `node` in the tree."""
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
    """Return a row for each visible node, in drawing order. A node is visible if all of its ancestors are unfolded.

    Siblings are in ascending order of `ranks`. Without `ranks`, they are in execution order.
    """
    outside = places[0].parent if places else None
    order = range(len(places)) if ranks is None else _ranked(places, ranks)
    last_child: dict[int | None, int] = {places[at].parent: places[at].id for at in order}
    rows: list[TreeRow] = []
    # maps a visible unfolded node to the text with the connectors before its children
    indents: dict[int | None, str] = {}
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
    """Return the indices of `places` in drawing order. Parents precede their children. Siblings are in ascending
    order of `ranks`.
    """
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
    """Return the texts of a node that the search compares with its pattern."""
    name = f"Layer {place.name}" if place.kind is NodeKind.LAYER else place.name
    return (name,) if place.category is None else (name, place.category.display_name)
