"""Computes the features of a layer that decide how its bricks are timed. Layers with equal features share one plan.

Rules
- Two layers with equal features have equal plans. Some modules have plans that depend on more: convolutions, grouped
  experts, adapters, packed weights. A layer with such a module has no build, and shares no plan.
- Computing the features runs no code of the host. Classes are compared by their ids, and only tensors of torch's own
  classes are read.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from cbtop.profiler.instrument.adapters import may_have_adapters
from cbtop.profiler.instrument.convolutions import is_convolution
from cbtop.profiler.instrument.experts import MARK_OF_EXPERTS
from cbtop.profiler.instrument.module_tree import home_of_class
from cbtop.profiler.instrument.multiplied import PACKED
from cbtop.profiler.instrument.work import SIZES

if TYPE_CHECKING:
    from torch import nn

_UP = None  # marks the end of a module's features
_BUFFERS = 0  # marks the beginning of the features of a module's buffers


class Build(NamedTuple):
    """The modules of a layer (in the order of `modules_of`), and the features that decide how they are timed."""

    modules: list[nn.Module]
    features: tuple[object, ...]


class _NotComparableError(Exception):
    """Raised if the features of a module do not decide its plan."""


class Builds:
    """Makes the builds of layers. `stacks` are the ids of the modules that are stacks."""

    def __init__(self, stacks: Container[int]) -> None:
        self._stacks = stacks
        # id of a class -> whether the features of its modules decide the plan
        self._comparable: dict[int, bool] = {}

    def of(self, layer: nn.Module) -> Build | None:
        """Return the build of `layer`, or None if the layer cannot be compared."""
        found, features = {id(layer): layer}, list[Any]()
        try:
            self._add(layer, found, features)
        except _NotComparableError:
            return None
        return Build(list(found.values()), tuple(features))

    def _add(self, module: nn.Module, found: dict[int, nn.Module], features: list[Any]) -> None:
        """Add the features of `module`, then of all modules inside it, in the order of `modules_of`."""
        kind = id(type(module))
        if not (self._comparable[kind] if kind in self._comparable else self._is_comparable(module)):
            raise _NotComparableError
        own = module.__dict__
        children, parameters, buffers = own["_modules"], own["_parameters"], own["_buffers"]
        features.append(kind)
        for tensor in parameters.values():
            if tensor is not None:
                if type(tensor) is not Parameter:
                    raise _NotComparableError
                features.extend((tensor.shape, tensor.dtype, tensor.device))
        if buffers:
            _add_buffers(buffers, features)
        # A module that has only weights needs no sizes, because the shapes of its weights contain them.
        if MARK_OF_EXPERTS in own or ((children or buffers or not parameters) and not own.keys().isdisjoint(SIZES)):
            raise _NotComparableError
        if children:
            if id(module) in self._stacks:
                raise _NotComparableError
            for name, child in children.items():
                if child is not None:
                    if id(child) in found:
                        raise _NotComparableError
                    found[id(child)] = child
                    features.append(name)
                    self._add(child, found, features)
        features.append(_UP)

    def _is_comparable(self, module: nn.Module) -> bool:
        kind, own = type(module), module.__dict__
        has_dictionaries = all([type(own.get(name)) is dict for name in ("_modules", "_parameters", "_buffers")])
        is_special = is_convolution(module) or may_have_adapters(kind) or home_of_class(kind) in PACKED
        self._comparable[id(kind)] = has_dictionaries and not is_special
        return has_dictionaries and not is_special


def _add_buffers(buffers: dict[str, Any], features: list[Any]) -> None:
    features.append(_BUFFERS)
    for tensor in buffers.values():
        if tensor is not None:
            if type(tensor) is not Tensor:
                raise _NotComparableError
            features.extend((tensor.shape, tensor.dtype, tensor.device))
