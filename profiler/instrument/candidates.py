"""Decides whether a model can be instrumented, and whether a called module is a model or a layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from cbtop.profiler.instrument import unseen
from cbtop.profiler.instrument.call_attribute import ATTRIBUTE, is_supported, leave
from cbtop.profiler.instrument.module_tree import kinds_of
from cbtop.profiler.instrument.planning import has_products, holds_a_stack
from cbtop.profiler.instrument.trained_apart import TrainedApart

COPIES = "nn.DataParallel copies its model at each call: it cannot be instrumented (DistributedDataParallel can)"


def why_not(model: nn.Module) -> str:
    """Return the reason why `model` cannot be instrumented, or ""."""
    if not is_supported():
        return f"torch {torch.__version__} does not call {ATTRIBUTE}: its models cannot be instrumented"
    if any([issubclass(type(module), nn.DataParallel) for module in kinds_of(model)]):
        return COPIES
    return ""


class Candidates:
    """Decides whether a called module is a model. Remembers modules that were called once and have no list of
    layers.
    """

    def __init__(self, is_attached: Callable[[nn.Module], bool]) -> None:
        self._is_attached = is_attached
        self._trained_apart = TrainedApart()
        # id of a class -> its first module that was called
        self._called_once: dict[int, weakref.ref[nn.Module]] = {}
        # Ids of classes with several modules that are called in turns. None of them is a model, unless optimizers
        # train them apart.
        self._layers: set[int] = set()

    def clear(self) -> None:
        """Forget all modules and classes that were called."""
        self._called_once.clear()
        self._layers.clear()
        self._trained_apart.clear()

    def is_model(self, module: nn.Module) -> bool | None:
        """Return whether `module` is a model, or None if its next call must decide.

        A module without a list of layers is a model if it is called twice in a row. If another module of the same
        class is called in between, both are layers that the program calls by itself, unless optimizers train them
        apart.
        """
        kind = id(type(module))
        if holds_a_stack(module):
            return True
        reference = self._called_once.get(kind)
        first = None if reference is None else reference()
        if unseen.is_called_by_another():
            return None if first is module else False  # the module that is called first may call itself
        if not has_products(module):
            return False
        if self._trained_apart.are_models(type(module)):
            return True
        if kind in self._layers:
            self._trained_apart.add(module)
            return False
        if first is module:
            return True
        if first is None or self._is_attached(first):
            self._called_once[kind] = weakref.ref(module)
            unseen.note_once(module)
            return None
        self._layers.add(kind)
        self._trained_apart.add(first)
        self._trained_apart.add(module)
        unseen.note_call(first)
        leave(first)
        return False
