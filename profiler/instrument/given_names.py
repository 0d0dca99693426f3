"""Stores the names that a profiler has given to models and bricks.

If a model is attached again, it keeps its names.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cbtop.profiler.definitions import BrickDefinition, OwnOperations
from cbtop.profiler.instrument.module_tree import WeakModuleDict
from cbtop.profiler.instrument.planning import Plan, Product
from cbtop.profiler.instrument.torch_internals import submodules
from cbtop.profiler.instrument.work import work_of

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.multiplied import Mode
    from cbtop.profiler.profiler import BrickProfiler
    from cbtop.protocol.messages import Ceiling, Manifest

MAX_IN_MODE = 4096  # at most this many bricks are remembered


@dataclass(slots=True)
class Said:
    """The names that a profiler has given to one model and its bricks."""

    model: str  # the model's name
    number: int = 1  # 2 for the second model of its class, and so on
    own: OwnOperations | None = None  # the model's own operations
    definitions: dict[Hashable, Hashable] = field(default_factory=dict)  # key from `said_at` -> brick, for all bricks
    # (brick in the plan, mode, image size) -> brick.
    in_mode: dict[Hashable, BrickDefinition] = field(default_factory=dict)

    def as_before(self, own: OwnOperations | None) -> OwnOperations | None:
        """Return the brick for the model's own operations.

        `own` is this brick in a new plan. If the backend has not changed, the former brick is returned instead. The
        brick of a second model of one class has a number, so that the two can be distinguished.
        """
        if own is not None and self.number > 1:
            own = replace(own, name=f"{own.name} {self.number}")
        before = self.own
        if own is not None and before is not None and before.backend == own.backend:
            return before
        self.own = own or before
        return own


class Models:
    """The models that one profiler has shown.

    The process announces only one of them, with its manifest and roofs.
    """

    def __init__(self) -> None:
        self.said: WeakModuleDict[Said] = WeakModuleDict()
        self.names: dict[str, int] = {}  # name -> how often it was used
        self.kinds: dict[str, int] = {}  # name of a class -> number of its models
        # The announced model: whether it has a cache, and the bytes of its weights. Other models are compared with
        # this.
        self.rank = (False, -1)
        self.manifest: Manifest | None = None
        self.ceilings: dict[str, Ceiling] = {}
        self.measured: dict[str, str] = {}  # name of a model -> how the times of its steps are measured on the device

    def how_measured(self, model: str) -> str:
        """Return how the device's times of `model` are measured, or "".

        If two encoders train together, only one of them has steps. So the other one has its words.
        """
        others = set(self.measured.values())
        return self.measured.get(model) or (others.pop() if len(others) == 1 else "")


_models: weakref.WeakKeyDictionary[BrickProfiler, Models] = weakref.WeakKeyDictionary()


def models_of(profiler: BrickProfiler) -> Models:
    """Return the models that `profiler` has shown."""
    return _models.setdefault(profiler, Models())


def said_by(models: Models, root: nn.Module, plan: Plan) -> Said:
    """Return the names given to the model `root`. A new model gets a name.

    The first model is called "", even if one of its parts was called first. Other models are called like their class,
    with a number if the name was used before.
    """
    if root not in models.said:
        others = [said for module, said in models.said.items() if not any([module is one for one in plan.trunk])]
        parts = [models.said[module] for module in plan.trunk if module in models.said]
        first = next((part for part in parts if not part.model and not any([part is one for one in others])), None)
        if first is None:
            kind = type(root).__name__
            name = kind if models.names else ""
            models.names[name] = models.names.get(name, 0) + 1
            models.kinds[kind] = number = models.kinds.get(kind, 0) + 1
            first = Said(name if models.names[name] == 1 else f"{name} {models.names[name]}", number)
        models.said[root] = first
    return models.said[root]


def said_at(place: Hashable, brick: BrickDefinition) -> Hashable:
    """Return a key for `brick` at the path `place` in a model. Two bricks with equal keys are the same brick."""
    return place, brick.name, brick.label, brick.backend, brick.work


def key_in(
    said: Said,
    product: Product,
    place: Hashable,
    key: Hashable,
    is_timed_there: bool,
    reference: weakref.ref[nn.Module],
    mode: Mode,
    size: Any,
) -> Hashable:
    """Return the brick for a module in `mode` and for an image of `size`. `key` is the module's brick in the plan."""
    module = reference()
    if module is None or not isinstance(key, BrickDefinition):
        return key
    brick = said.in_mode.get((key, mode, size))
    if brick is None:
        top_k = product.top_k
        work = work_of(module, product.brick, is_timed_there=is_timed_there, mode=mode, top_k=top_k, size=size)
        brick = key if work == key.work else replace(key, work=work)
        if not submodules(module):  # the children may be adapters, and these differ between modules
            if len(said.in_mode) >= MAX_IN_MODE:
                said.in_mode.clear()
            said.in_mode[key, mode, size] = brick
    return said.definitions.setdefault(said_at(place, brick), brick)
