"""The plan of a model: its stacks of layers, which brick each module is, and which modules lead to a stack.

Stacks are the outermost lists of two or more modules that have children, two of them of one class. A model that holds
none has no plan: what its layers are is not known.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.classification import BLOCKS, MOE_EXPERTS, Described, Kind, classify
from cbtop.profiler.instrument.work import backend_of, device_of, product_sizes, work_of
from cbtop.protocol.attributes import UNKNOWN_WORK
from cbtop.protocol.vocabulary import BrickId, NodeKind

if TYPE_CHECKING:
    from torch import nn

_LISTS = ("ModuleList", "Sequential")
LEAST_BLOCK_WEIGHTS = 1 << 17  # some 20 us: to time a block takes 1 us


@dataclass(frozen=True, slots=True)
class Part:
    """A module that is timed: `key` is its definition, or (NodeKind.LAYER, index[, stack])."""

    path: str
    module: nn.Module
    key: Hashable


@dataclass(slots=True)
class Plan:
    """What of a model is timed, and how."""

    stacks: dict[str, int] = field(default_factory=dict)  # layers by the stack's name; of a single one it is ""
    trunk: list[nn.Module] = field(default_factory=list)  # hold a stack, outermost first: who calls them wants a step
    parts: list[Part] = field(default_factory=list)  # layers and bricks
    others: list[nn.Module] = field(default_factory=list)  # hold bricks, or lie inside one: they pay nothing

    @property
    def layers(self) -> list[Part]:
        return [part for part in self.parts if isinstance(part.key, tuple)]

    @property
    def bricks(self) -> list[Part]:
        return [part for part in self.parts if isinstance(part.key, BrickDefinition)]


def holds_a_stack(root: nn.Module) -> bool:
    """Whether `root` is a model in whose calls there are layers to be seen."""
    return bool(list(_stacks(root, "")))


def plan_of(root: nn.Module, *, is_timed_there: bool = False) -> Plan | None:
    """The plan of `root`, timed by the host or on its device; None where it holds no stack of layers."""
    found = list(_stacks(root, ""))
    if not found:
        return None
    names = _names([path for path, _ in found])
    planner = _Planner({id(stack): name for (_, stack), name in zip(found, names, strict=True)}, root, is_timed_there)
    planner.plan.stacks = {name: len(stack) for (_, stack), name in zip(found, names, strict=True)}
    paths = [path for path, _ in found]
    for path, module in root.named_modules():
        if any([stack.startswith(f"{path}." if path else "") and stack != path for stack in paths]):
            planner.plan.trunk.append(module)
    planner.walk(root, "", (type(root).__name__,), in_layer=False)
    planner.finish()
    return planner.plan


def state_of(root: nn.Module) -> list[object]:
    """What a plan of `root` was made from: which modules there are, and the first weight of each."""
    state: list[object] = []
    modules = {id(root): root}
    waiting = [root]
    for module in waiting:
        for weight in module._parameters.values():
            if weight is not None:
                state.append(weight.dtype)
                state.append(weight.device)
                state.append(weight.shape)
                break
        if children := module._modules:
            for child in children.values():
                if child is not None and id(child) not in modules:
                    modules[id(child)] = child
                    waiting.append(child)
    state += modules  # by what they are, not held
    return state


def _stacks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if type(child).__name__ in _LISTS and _is_stack(child):
            yield inside, child
        else:
            yield from _stacks(child, inside)


def _is_stack(module: nn.Module) -> bool:
    kinds = [type(child) for child in module.children() if list(child.children())]
    return len(set(kinds)) < len(kinds)


def _names(paths: list[str]) -> list[str]:
    """What tells several stacks apart: the path of each without what all have in common; "" of a single one."""
    if len(paths) == 1:
        return [""]
    parts = [path.split(".") for path in paths]
    while all([len(part) > 1 for part in parts]) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    shorter = [".".join(part[:-1]) for part in parts]
    return shorter if all(shorter) and len(set(shorter)) == len(shorter) else [".".join(part) for part in parts]


def _vocabulary(root: nn.Module) -> int:
    """The rows of the largest embedding of a model: its words."""
    rows = [getattr(module, "num_embeddings", 0) for module in root.modules()]
    return max((size for size in rows if isinstance(size, int)), default=0)


def _is_large(block: nn.Module) -> bool:
    """Whether a block computes for so long that to time it, too, is little."""
    return bool(sum(weights.numel() for weights in block.parameters()) >= LEAST_BLOCK_WEIGHTS)


class _Planner:
    def __init__(self, stacks: dict[int, str], root: nn.Module, is_timed_there: bool) -> None:
        self.plan = Plan()
        self._is_timed_there = is_timed_there
        self._shows_blocks = not is_timed_there and device_of(root) == "cpu"
        self._stacks = stacks
        self._root = root
        self._vocabulary = _vocabulary(root)
        self._seen: set[int] = set()
        self._found: list[tuple[str, nn.Module, Kind]] = []  # bricks of the layer, or of what lies outside of layers
        self._experts: dict[str, BrickDefinition] = {}  # by the path of their list: all of one layer are one brick

    def walk(self, module: nn.Module, path: str, classes: tuple[str, ...], *, in_layer: bool) -> None:
        children = list(module.named_children())
        siblings = frozenset(name for name, _ in children)
        for name, child in children:
            if id(child) in self._seen:  # one that several layers share is planned where it is met first
                continue
            self._seen.add(id(child))
            inside = f"{path}.{name}" if path else name
            around = (type(child).__name__, *classes)
            stack = self._stacks.get(id(child))
            if stack is not None:
                self._walk_stack(child, inside, around, stack)
                continue
            holds = frozenset([part for part, _ in child.named_children()])
            described = Described(inside, around, siblings, holds, in_layer, self._is_of_vocabulary(child))
            kind = classify(described)
            if kind is not None and kind.brick in BLOCKS and not (self._shows_blocks and _is_large(child)):
                kind = None
            if kind is None:
                self.plan.others.append(child)
            else:
                self._found.append((inside, child, kind))
            if kind is None or kind.shows_inside:
                self.walk(child, inside, around, in_layer=in_layer)
            else:
                self.plan.others += [one for one in child.modules() if one is not child]

    def _walk_stack(self, stack: nn.Module, path: str, classes: tuple[str, ...], name: str) -> None:
        self.plan.others.append(stack)
        outside, self._found = self._found, []
        for at, (index, layer) in enumerate(stack.named_children()):
            if id(layer) in self._seen:
                continue
            self._seen.add(id(layer))
            key = (NodeKind.LAYER, at, name) if name else (NodeKind.LAYER, at)
            self.plan.parts.append(Part(f"{path}.{index}", layer, key))
            self.walk(layer, f"{path}.{index}", (type(layer).__name__, *classes), in_layer=True)
            self.finish()
        self._found = outside

    def finish(self) -> None:
        """Define the bricks found since the last time; a label that two of a name share grows by one part."""
        count: dict[tuple[str, str], int] = {}
        for path, _, kind in self._found:
            place = (kind.name, _label(path, 1))
            count[place] = count.get(place, 0) + 1
        for path, module, kind in self._found:
            label = _label(path, 1 if count[(kind.name, _label(path, 1))] == 1 else 2)
            self.plan.parts.append(Part(path, module, self._definition(path, module, kind, label)))
        self._found = []

    def _definition(self, path: str, module: nn.Module, kind: Kind, label: str) -> BrickDefinition:
        brick = kind.brick if isinstance(kind.brick, BrickId) else None
        if kind.brick == MOE_EXPERTS and path.rpartition(".")[2].isdigit():
            path, label = path.rpartition(".")[0], "experts"
            if path in self._experts:
                return self._experts[path]
        definition = BrickDefinition(
            kind.name,
            kind.category,
            brick,
            backend=backend_of(module, self._root, is_timed_there=self._is_timed_there),
            work=UNKNOWN_WORK
            if kind.shows_inside
            else work_of(module, kind.brick, is_timed_there=self._is_timed_there),
            label=label,
        )
        self._experts[path] = definition
        return definition

    def _is_of_vocabulary(self, module: nn.Module) -> bool:
        sizes = product_sizes(module)
        return sizes is not None and sizes[1] == self._vocabulary


def _label(path: str, parts: int) -> str:
    return ".".join(path.split(".")[-parts:])
