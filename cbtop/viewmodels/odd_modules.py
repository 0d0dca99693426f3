"""Find the module of a brick in one layer that differs from the modules of the same brick in the other layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cbtop.protocol.attributes import NO_MODULE, ModuleAttributes
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.graph import GraphRow, places_of


@dataclass(frozen=True, slots=True)
class OddModule:
    """A module of a layer that differs from `usual`, the most common module at the same place of the other layers."""

    label: str  # name of the module in its layer, such as `down_proj`
    module: ModuleAttributes
    usual: ModuleAttributes


def odd_module(graph: Sequence[GraphRow], brick: str, layer: int) -> OddModule | None:
    """Return the module of `brick` in the layer `layer` if it differs from the modules of the other layers, else
    None.

    The modules of other layers at the same place (label) are compared. None is returned if they are not known, or if
    only some of them are equal.
    """
    outer: dict[int, int] = {}  # id of a node -> the id of the outermost layer around it
    here: dict[str, ModuleAttributes] = {}
    others: dict[str, Counter[ModuleAttributes]] = {}
    for node in places_of(graph):
        around = outer.get(node.parent) if node.parent is not None else None
        if around is None and node.kind is NodeKind.LAYER:
            around = node.id
        if around is None:
            continue
        outer[node.id] = around
        if node.kind is not NodeKind.BRICK or node.name != brick or node.module == NO_MODULE:
            continue
        label = node.node_label if isinstance(node, GraphRow) else node.label
        if around == layer:
            here[label] = node.module
        else:
            others.setdefault(label, Counter())[node.module] += 1
    for label, module in here.items():
        usual, count = others.get(label, Counter({module: 1})).most_common(1)[0]
        if usual != module and 2 * count > sum(others[label].values()):
            return OddModule(label, module, usual)
    return None
