"""Makes the plan of a model: its stacks of layers, the modules that contain a stack, and the brick (timed part) of
each module.

A stack is an outermost list of two or more possible layers of one class. A possible layer has children or its own
weights. A model without stacks has a plan without layers, if two of its modules have weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.jit import ScriptModule
from torch.nn import Parameter

from cbtop.profiler.analysis.graph.node_table import MAX_DEPTH
from cbtop.profiler.definitions import BrickDefinition, OwningKey, OwnOperations
from cbtop.profiler.instrument.adapters import has_adapters, state_of_adapters
from cbtop.profiler.instrument.builds import Builds
from cbtop.profiler.instrument.classification import BLOCKS, MOE_EXPERTS, Described, ModuleKind, classify, own_kind
from cbtop.profiler.instrument.convolutions import depends_on_size, dimensions, is_convolution
from cbtop.profiler.instrument.experts import chosen_experts
from cbtop.profiler.instrument.module_facts import ModuleFacts
from cbtop.profiler.instrument.module_tree import (
    attribute_of,
    attributes_of,
    children_of,
    dictionary_of,
    first_tensor,
    holders_of,
    home_of,
    home_of_class,
    modules_of,
    parameters_of,
)
from cbtop.profiler.instrument.multiplied import PLAIN, Mode
from cbtop.profiler.instrument.torch_internals import own_buffers, own_parameters, submodules
from cbtop.profiler.instrument.work import backend_of, device_of, product_sizes, work_of
from cbtop.profiler.instrument.wrapping import is_compiled
from cbtop.protocol.attributes import UNKNOWN_WORK
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind

if TYPE_CHECKING:
    from torch import nn

_LISTS = ("ModuleList", "Sequential")
# Files of torch with classes that have no `forward`, or a `forward` that only calls children.
_CONTAINERS = ("torch.nn.modules.container", "torch.nn.modules.module", "torch._dynamo", "torch.nn.parallel")
# A module inside more modules has no row of its own operations, because nodes are at most MAX_DEPTH deep.
MAX_OWN_DEPTH = MAX_DEPTH - 8
OWN_LABEL = "outside its children"
_NO_PRODUCTS = frozenset({BrickId.EMBEDDING, BrickId.ACTIVATION, BrickId.RMS_NORM, BrickId.LAYER_NORM})
# A block with fewer weights is not timed. It runs for 20 us or less, and timing would add 1 us.
LEAST_BLOCK_WEIGHTS = 1 << 17


@dataclass(frozen=True, slots=True)
class Product:
    """The facts that, with the module and the mode, decide the work of a brick (see `work_of`)."""

    brick: BrickId | str
    top_k: int | None = None
    may_be_first: bool = False  # whether this is a matrix product before the first layer
    axes: int = 0  # number of axes of the image, if its size decides the work; otherwise 0


class TimedModule(NamedTuple):
    """A module that is timed. `key` is the brick's definition, or an `OwningKey` for a layer."""

    path: str
    module: nn.Module
    key: Hashable
    product: Product | None = None
    # (path in the layer, path of the stack). Equal bricks in similar layers have the same place, and so have all
    # experts of a list.
    place: Hashable = None


@dataclass(slots=True)
class Section:
    """A part of a plan that is replaced as a whole: one layer, or everything outside of layers.

    `state` is what `state_of` returned when the layer was planned. If it is None, the layer must be planned each
    time. `visited` are the ids of the modules in this section.
    """

    # identifies the section by its path, its key, the classes around it, and the settings that decide its bricks
    place: Hashable
    state: list[object] | None = None
    visited: set[int] = field(default_factory=set)
    parts: list[TimedModule] = field(default_factory=list)
    others: list[nn.Module] = field(default_factory=list)
    # True if the previous plan has the same section; `parts` and `others` are then empty
    is_unchanged: bool = False


class _Pattern(NamedTuple):
    """The plan of one layer. It is used for all similar layers(same stack, same build).

    A module is given by its index in `modules_of(layer)`.
    """

    # For each brick: the index of its module, its path in the layer, its definition, its product and its `place`.
    bricks: list[tuple[int, str, BrickDefinition, Product | None, Hashable]]
    others: list[int]
    visited: list[int]
    weights: list[object]  # what `state_of` returns about weights, without ids


class Known(Protocol):
    """A section of the previous plan: a layer, or everything outside of layers. All its modules are alive."""

    state: list[object] | None
    visited: set[int]


@dataclass(slots=True)
class Plan:
    """The timed modules of a model, and how they are timed."""

    stacks: dict[str, int] = field(default_factory=dict)  # number of layers in each stack ("" if there is only one)
    own: OwnOperations | None = None  # operations that the model itself runs, or a module around layers
    # Modules that contain a stack. Their calls begin a step.
    trunk: list[nn.Module] = field(default_factory=list)
    parts: list[TimedModule] = field(default_factory=list)  # the modules that are timed: layers and bricks
    # Modules that are not timed. Their first calls are not reported.
    others: list[nn.Module] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)  # all `parts` and `others`, by section
    is_timed: bool = True  # if False, modules are not timed, and only name the kernels of captured graphs

    @property
    def layers(self) -> list[TimedModule]:
        return [part for part in self.parts if isinstance(part.key, tuple)]

    @property
    def bricks(self) -> list[TimedModule]:
        return [part for part in self.parts if isinstance(part.key, BrickDefinition)]


def holds_a_stack(root: nn.Module) -> bool:
    """Whether `root` contains a stack of layers."""
    return bool(_Stacks(root).found)


def has_products(root: nn.Module) -> bool:
    """Whether two or more modules in `root` have weights. If so, it may be a model without a list of layers."""
    leaves = [module for module in modules_of(root) if own_parameters(module) and not children_of(module)]
    return len(leaves) > 1


def plan_of(
    root: nn.Module,
    *,
    is_timed_there: bool = False,
    by_kernels: bool = False,
    known: Mapping[Hashable, Known] | None = None,
    mode: Mode = PLAIN,
) -> Plan | None:
    """Return the plan of `root`, or None if `root` is not a model.

    `is_timed_there` says that the device times the model, not the host. `by_kernels` says that the model's kernels
    are recorded. If it is False, the device is timed by stamps between kernels. `known` has the sections of the
    previous plan, by place. A layer is not planned again if its state is the same as in its known section.
    """
    stacks = _Stacks(root)
    found = stacks.found
    if not found and not has_products(root):
        return None
    names = _names([path for path, _ in found])
    numbered = {id(stack): name for (_, stack), name in zip(found, names, strict=True)}
    planner = _Planner(numbered, root, is_timed_there=is_timed_there, by_kernels=by_kernels)
    planner.mode = mode
    planner.known = known or {}
    planner.plan.stacks = {name: len(submodules(stack)) for (_, stack), name in zip(found, names, strict=True)}
    planner.plan.trunk = stacks.trunk or [root]
    planner.plan.own = planner.own_of(root)
    if found and found[0][1] is root:
        planner.walk_stack(root, "", (type(root).__name__,), names[0])
    else:
        planner.walk(root, "", (type(root).__name__,), in_layer=False)
    planner.finish()
    sections = planner.plan.sections
    sections.append(planner.section)
    planner.plan.parts = [part for section in sections for part in section.parts]
    planner.plan.others = [module for section in sections for module in section.others]
    return planner.plan


def state_of(root: nn.Module) -> list[object]:
    """Return the facts about `root` that decide its plan (its state).

    These are the ids of all modules, and the dtype, device and shape of each module's first weight.
    """
    modules = modules_of(root)
    return [*map(id, modules), *_weights_in(modules)]


def _weights_in(modules: list[nn.Module]) -> list[object]:
    state: list[object] = []
    for module in modules:
        if weights := module._parameters:
            for weight in weights.values():
                if weight is not None:
                    state += (weight.dtype, weight.device, weight.shape)
                    break
        elif has_adapters(module):
            state.append(state_of_adapters(module))
    return state


def devices_in(state: list[object]) -> set[object]:
    """Return the devices in a result of `state_of`."""
    return {entry for entry in state if type(entry) not in (int, torch.Size, torch.dtype, tuple)}


class _Stacks:
    """Finds the stacks of layers in a model with their paths, and the modules that contain them, outermost first.

    Each module is visited once, even if it is a child of several modules or of itself.
    """

    def __init__(self, root: nn.Module) -> None:
        self.found: list[tuple[str, nn.Module]] = []
        self.trunk: list[nn.Module] = []
        self._visited = {id(root)}
        if type(root).__name__ in _LISTS and _is_stack(root):
            self.found.append(("", root))
            self.trunk.append(root)
        else:
            self._visit(root, "")

    def _visit(self, module: nn.Module, path: str) -> None:
        stacks_before, place = len(self.found), len(self.trunk)
        self.trunk.append(module)
        for name, child in children_of(module):
            if id(child) in self._visited:
                continue
            self._visited.add(id(child))
            inside = f"{path}.{name}" if path else name
            if type(child).__name__ in _LISTS and _is_stack(child):
                self.found.append((inside, child))
            elif submodules(child):
                self._visit(child, inside)
        if len(self.found) == stacks_before:
            del self.trunk[place:]


def _is_stack(module: nn.Module) -> bool:
    kinds = [id(type(child)) for _, child in children_of(module) if _may_be_layer(child)]
    return len(set(kinds)) < len(kinds)


def _may_be_layer(module: nn.Module) -> bool:
    """Whether `module` has children, or is of a class outside torch and has its own parameters."""
    if children_of(module):
        return True
    return bool(own_parameters(module)) and not home_of_class(type(module)).startswith("torch.")


def _names(paths: list[str]) -> list[str]:
    """Return the names of stacks: their `paths` without the common beginning. A single stack is called ""."""
    if len(paths) == 1:
        return [""]
    parts = [path.split(".") for path in paths]
    while all([len(part) > 1 for part in parts]) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    shorter = [".".join(part[:-1]) for part in parts]
    return shorter if all(shorter) and len(set(shorter)) == len(shorter) else [".".join(part) for part in parts]


def _vocabulary(root: nn.Module) -> int:
    """Return the size of the vocabulary: the number of rows of the model's largest embedding, or 0."""
    rows = attributes_of(holders_of(root, "num_embeddings"), "num_embeddings")
    return max((size for size in rows if isinstance(size, int)), default=0)


def _is_large(block: nn.Module) -> bool:
    """Return whether a block is large enough to be timed as a whole (see LEAST_BLOCK_WEIGHTS)."""
    return bool(sum(weights.numel() for weights in parameters_of(block)) >= LEAST_BLOCK_WEIGHTS)


class _Found(NamedTuple):
    """A module that will be a brick (timed part). `finish` defines the brick."""

    path: str
    module: nn.Module
    kind: ModuleKind
    top_k: int | None  # how many experts each token runs through; only for grouped experts
    may_be_first: bool


def _product_of(found: _Found) -> Product:
    axes = dimensions(found.module) if depends_on_size(found.module) else 0
    return Product(found.kind.brick, found.top_k, found.may_be_first, axes)


class _Planner:
    def __init__(self, stacks: dict[int, str], root: nn.Module, *, is_timed_there: bool, by_kernels: bool) -> None:
        self.plan = Plan()
        # The section that is being planned: a layer, or everything outside of layers.
        self.section = Section(None)
        self.known: Mapping[Hashable, Known] = {}
        self.mode = PLAIN
        self._has_met_layers = False
        # True if the current section contains modules of an earlier section
        self._shares_modules = False
        self._is_timed_there = is_timed_there
        self._by_kernels = by_kernels
        self._shows_blocks = by_kernels or (not is_timed_there and device_of(root) == "cpu")
        # Between stamps on a device, a module's own time is mostly a wait for Python. So it is not shown.
        self._shows_own = by_kernels or not is_timed_there
        # Class -> operations that its layers or models run outside of their children.
        self._own: dict[str, OwnOperations] = {}
        self._stacks = stacks
        # The backend in the names of modules that have no weights.
        self._backend = backend_of(root, is_timed_there=is_timed_there)
        self._vocabulary = _vocabulary(root)
        self._context = (is_timed_there, by_kernels, self._backend, self._vocabulary, self._shows_blocks)
        self._seen: set[int] = set()
        self._found: list[_Found] = []  # bricks of the current layer, or of all modules outside of layers
        # Path of a list of experts -> the brick of the whole list.
        self._experts: dict[str, BrickDefinition] = {}
        self._layer = ("", "")  # the path of the current layer, and the path of its stack
        # Corresponding modules of similar layers have the same kind and definition.
        self._kinds: dict[tuple[object, ...], ModuleKind | None] = {}
        self._alike: dict[tuple[object, ...], BrickDefinition] = {}
        self._builds = Builds(stacks)
        self._facts = ModuleFacts()
        self._patterns: dict[object, _Pattern] = {}

    def walk(self, module: nn.Module, path: str, classes: tuple[str, ...], *, in_layer: bool) -> None:
        siblings = frozenset(name for name, _ in children_of(module))
        for name, child in children_of(module):
            inside = f"{path}.{name}" if path else name
            self._walk_child(module, siblings, child, inside, (type(child).__name__, *classes), in_layer=in_layer)

    def _walk_child(
        self,
        module: nn.Module,
        siblings: frozenset[str],
        child: nn.Module,
        path: str,
        classes: tuple[str, ...],
        *,
        in_layer: bool,
    ) -> None:
        """Plan `child`, a child of `module`. `path` and `classes` belong to `child`."""
        # A module that several layers share is planned with the first of them.
        if id(child) in self._seen:
            self._shares_modules |= id(child) not in self.section.visited
            return
        self._seen.add(id(child))
        self.section.visited.add(id(child))
        stack = self._stacks.get(id(child))
        if stack is not None:
            self.walk_stack(child, path, classes, stack)
            return
        holds = frozenset([part for part, _ in children_of(child)])
        described = Described(
            path, classes, siblings, holds, in_layer, not in_layer and self._is_of_vocabulary(child)
        )
        kind = self._shown(self._kind_of(described), child, len(classes))
        if kind is None:
            self.section.others.append(child)
        else:
            top_k = None
            if kind.brick == MOE_EXPERTS:
                beside = [one for _, one in children_of(module) if one is not child]
                top_k = chosen_experts(child, module, beside)
            may_be_first = not in_layer and not self._has_met_layers and kind.brick not in _NO_PRODUCTS
            self._found.append(_Found(path, child, kind, top_k, may_be_first))
        if kind is None or kind.shows_inside:
            self.walk(child, path, classes, in_layer=in_layer)
        else:
            self.section.others += modules_of(child)[1:]

    def _shown(self, kind: ModuleKind | None, module: nn.Module, depth: int) -> ModuleKind | None:
        """Return the kind under which `module` is shown, or None if it is not shown.

        `kind` is the result of `classify`.
        """
        if kind is not None and kind.brick in BLOCKS:
            if self._by_kernels:
                return replace(kind, is_own=True)
            return kind if self._shows_blocks and _is_large(module) else None
        is_around_layers = any([module is one for one in self.plan.trunk])
        if kind is not None or is_around_layers or not self._shows_own:
            return kind
        if issubclass(type(module), ScriptModule):
            return ModuleKind(f"{module.original_name} (scripted)")  # cbtop sees nothing inside a script
        if depth <= MAX_OWN_DEPTH and _runs_operations(module):
            return own_kind(type(module).__name__, is_taken=_is_called_like_one_of_torch(module))
        return None

    def own_of(self, module: nn.Module) -> OwnOperations | None:
        """Return the brick for operations that a layer or the model runs outside of its children. None for a
        container.
        """
        if not _runs_operations(module):
            return None
        name = own_kind(type(module).__name__, is_taken=_is_called_like_one_of_torch(module)).name
        if name not in self._own:
            self._own[name] = OwnOperations(
                name, BrickCategory.OTHER, backend=self._backend, label=OWN_LABEL, on_device=self._is_timed_there
            )
        return self._own[name]

    def walk_stack(self, stack: nn.Module, path: str, classes: tuple[str, ...], name: str) -> None:
        """Plan the layers of `stack`.

        An entry that is a single product or activation is not a layer.
        """
        self.section.others.append(stack)
        siblings = frozenset(index for index, _ in children_of(stack))
        for at, (index, layer) in enumerate(children_of(stack)):
            inside, around = f"{path}.{index}" if path else index, (type(layer).__name__, *classes)
            if not _may_be_layer(layer):
                self._walk_child(stack, siblings, layer, inside, around, in_layer=False)
                continue
            self._has_met_layers = True
            if id(layer) in self._seen:
                continue
            self._seen.add(id(layer))
            outside, self._found = self._found, []
            key = OwningKey.of((NodeKind.LAYER, at, name) if name else (NodeKind.LAYER, at), self.own_of(layer))
            self._plan_layer(layer, inside, key, around)
            self._found = outside

    def _plan_layer(self, layer: nn.Module, path: str, key: Hashable, around: tuple[str, ...]) -> None:
        section = Section((path, key, around, self._context), None, {id(layer)})
        self.plan.sections.append(section)
        known = self.known.get(section.place)
        self._seen.discard(id(layer))
        if known is not None and known.state is not None:
            section.state = state_of(layer)
            if known.state == section.state and self._seen.isdisjoint(known.visited):
                self._seen |= known.visited
                section.is_unchanged = True
                return
        section.parts.append(TimedModule(path, layer, key))
        build = self._builds.of(layer)
        alike = None if build is None else (path.rpartition(".")[0], around, build.features)
        pattern = self._patterns.get(alike)
        if build is not None and pattern is not None and self._follow_pattern(section, pattern, build.modules, path):
            return
        section.state = state_of(layer)
        self._seen.add(id(layer))
        outer, self.section, self._shares_modules = self.section, section, False
        outer_layer, self._layer = self._layer, (f"{path}.", path.rpartition(".")[0])
        self.walk(layer, path, around, in_layer=True)
        self.finish()
        if self._shares_modules:
            section.state = None
        elif build is not None and pattern is None:
            made = self._pattern_of(section, build.modules)
            if made is not None:
                self._patterns[alike] = made
        self.section, self._layer = outer, outer_layer

    def _follow_pattern(self, section: Section, pattern: _Pattern, modules: list[nn.Module], path: str) -> bool:
        """Plan a layer by the `pattern` of a similar layer.

        If it shares modules with other layers, plan nothing and return False.
        """
        visited = {id(modules[at]) for at in pattern.visited}
        if not self._seen.isdisjoint(visited):
            return False
        self._seen |= visited
        section.visited = visited
        section.state = [*map(id, modules), *pattern.weights]
        section.others = [modules[at] for at in pattern.others]
        section.parts += [
            TimedModule(f"{path}.{inside}", modules[at], definition, product, place)
            for at, inside, definition, product, place in pattern.bricks
        ]
        return True

    def _pattern_of(self, section: Section, modules: list[nn.Module]) -> _Pattern | None:
        """Return the pattern of the layer that was planned as `section`, to plan similar layers with it.

        Returns None if a label contains the number of the layer.
        """
        at = {id(module): place for place, module in enumerate(modules)}
        bricks = []
        for path, module, key, product, place in section.parts[1:]:
            inside = path[len(self._layer[0]) :]
            if not isinstance(key, BrickDefinition) or ("." in key.label and "." not in inside):
                return None
            bricks.append((at[id(module)], inside, key, product, place))
        others = [at[id(module)] for module in section.others]
        visited = [at[one] for one in section.visited]
        return _Pattern(bricks, others, visited, _weights_in(modules))

    def _place(self, path: str) -> tuple[str, str]:
        """Return the path of a module in its layer, and the path of the stack.

        They are the same for corresponding modules of similar layers.
        """
        layer, stack = self._layer
        return (path[len(layer) :], stack) if layer and path.startswith(layer) else (path, "")

    def _kind_of(self, it: Described) -> ModuleKind | None:
        key = (self._place(it.path), it.classes, it.siblings, it.holds, it.in_layer, it.gives_vocabulary)
        if key not in self._kinds:
            self._kinds[key] = classify(it)
        return self._kinds[key]

    def finish(self) -> None:
        """Define the bricks in `_found`.

        If bricks would have the same name and label, their labels get one more part of the path.
        """
        count: dict[tuple[str, str], int] = {}
        for path, _, kind, *_ in self._found:
            place = (kind.name, _label(path, 1))
            count[place] = count.get(place, 0) + 1
        for found in self._found:
            path, kind = found.path, found.kind
            label = _label(path, 1 if count[(kind.name, _label(path, 1))] == 1 else 2)
            is_one_of_experts = kind.brick == MOE_EXPERTS and path.rpartition(".")[2].isdigit()
            if is_one_of_experts:
                path, label = path.rpartition(".")[0], "experts"
            definition = self._experts.get(path) if is_one_of_experts else None
            if definition is None:
                definition = self._definition(path, found, label)
            product = None if kind.shows_inside else _product_of(found)
            self.section.parts.append(TimedModule(found.path, found.module, definition, product, self._place(path)))
        self._found = []

    def _definition(self, path: str, found: _Found, label: str) -> BrickDefinition:
        _, module, kind, top_k, _ = found
        brick = kind.brick if isinstance(kind.brick, BrickId) else None
        weights = _weights_of(module)
        alike = (self._place(path), label, kind, type(module), weights, top_k)
        definition = None if weights is None else self._alike.get(alike)
        if definition is None:
            is_timed_there = self._is_timed_there
            make = partial(OwnOperations, on_device=self._is_timed_there) if kind.is_own else BrickDefinition
            definition = self._alike[alike] = make(
                kind.name,
                kind.category,
                brick,
                backend=self._backend_of(module),
                work=UNKNOWN_WORK
                if kind.shows_inside
                else work_of(module, kind.brick, is_timed_there=is_timed_there, mode=self.mode, top_k=top_k),
                label=label,
                module=self._facts.of(module),
            )
        self._experts[path] = definition
        return definition

    def _backend_of(self, module: nn.Module) -> str:
        has_weights = first_tensor(module) is not None
        return backend_of(module, is_timed_there=self._is_timed_there) if has_weights else self._backend

    def _is_of_vocabulary(self, module: nn.Module) -> bool:
        sizes = product_sizes(module)
        return sizes is not None and sizes[1] == self._vocabulary


def _is_called_like_one_of_torch(module: nn.Module) -> bool:
    """Return whether torch.nn has a different class with the class name of `module`.

    Its bricks (such as Linear) have this name.
    """
    kind = type(module)
    return getattr(torch.nn, kind.__name__, kind) is not kind


def _runs_operations(module: nn.Module) -> bool:
    """Return whether the `forward` of `module` may run operations outside of its children's calls.

    A container's `forward` only calls children. In compiled or scripted code, operations of children cannot be told
    apart.
    """
    home = home_of(type(module), "forward")
    if not home or home.startswith(_CONTAINERS) or is_compiled(module):
        return False
    return attribute_of(dictionary_of(module).get("forward"), "_torchdynamo_orig_callable") is None


def _weights_of(module: nn.Module) -> tuple[object, ...] | None:
    """Return the shape, dtype and device of each parameter of `module`. None if its work depends on anything else."""
    if submodules(module) or own_buffers(module) or not own_parameters(module) or is_convolution(module):
        return None  # a convolution's work depends on its settings, too
    held: list[object] = []
    for weight in own_parameters(module).values():
        if weight is not None:
            if type(weight) is not Parameter:
                return None
            held += (weight.shape, weight.dtype, weight.device)
    return tuple(held)


def _label(path: str, parts: int) -> str:
    return ".".join(path.split(".")[-parts:])
