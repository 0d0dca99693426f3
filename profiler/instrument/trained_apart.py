"""Finds out whether modules of one class, called in turns, are layers of one model or models of their own.

The generator and the discriminator of a GAN may have one class. So may the network and the target network of a
Q-learning program. Their calls look like those of layers that a program calls by itself. An optimizer tells them
apart: it trains all weights of some of these modules, and no weight of the others.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.instrument.call_attribute import forget, standing
from cbtop.profiler.instrument.module_tree import dictionary_of, modules_of
from cbtop.profiler.instrument.torch_internals import own_parameters
from cbtop.profiler.instrument.trouble import log_own_error

MAX_MODELS = 8  # With more modules of one class, they are layers.
# After this many steps of optimizers, no class is looked at any longer. A Wasserstein GAN trains its discriminator
# five times before its generator.
MAX_OPTIMIZER_STEPS = 32


class TrainedApart:
    """The classes with several modules that were called in turns, while it is unknown what they are."""

    def __init__(self) -> None:
        # id of a class -> its modules that were called
        self._called: dict[int, list[weakref.ref[nn.Module]]] = {}
        self._models: set[int] = set()  # ids of classes whose modules are models
        self._handle: Any = None
        self._steps = 0

    def clear(self) -> None:
        """Forget all classes, and follow optimizers no longer."""
        self._called.clear()
        self._models.clear()
        self._leave()
        self._steps = 0

    def are_models(self, kind: type) -> bool:
        """Return whether the modules of a class are known to be models of their own."""
        return id(kind) in self._models

    def add(self, module: nn.Module) -> None:
        """Add a module of a class with several modules that were called in turns."""
        if self._steps >= MAX_OPTIMIZER_STEPS:
            return
        called = self._called.setdefault(id(type(module)), [])
        if len(called) <= MAX_MODELS and not any([one() is module for one in called]):
            called.append(weakref.ref(module))
        if self._handle is None:
            from torch.optim import optimizer  # loaded by torch itself in new versions, and 10 ms in older ones

            self._handle = optimizer.register_optimizer_step_post_hook(self._stepped)

    def _leave(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Look at the weights of an optimizer that has made a step."""
        if is_dynamo_compiling():
            return
        try:
            self._steps += 1
            groups = dictionary_of(optimizer).get("param_groups", ())
            its = {id(weight) for group in groups for weight in group["params"]}
            for kind, called in list(self._called.items()):
                modules = [module for one in called if (module := one()) is not None]
                if are_apart(modules, its):
                    self._models.add(kind)
                    self._called.pop(kind, None)
                    for module in modules:
                        if standing(module) is None:
                            forget(module)  # so that its next call is reported as its first
            if not self._called or self._steps >= MAX_OPTIMIZER_STEPS:
                self._called.clear()
                self._leave()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "models of one class are not shown")
            self._called.clear()
            self._leave()


def are_apart(modules: list[nn.Module], trained: set[int]) -> bool:
    """Return whether an optimizer of the weights `trained` (ids) tells that `modules` are models, not layers.

    It trains some of them completely, and the others not at all. If there are more than two, all have weights that
    require gradients, because the first of many layers may be frozen.
    """
    if not 2 <= len(modules) <= MAX_MODELS:
        return False
    are_trained = []
    for module in modules:
        weights = [
            weight
            for one in modules_of(module)
            for weight in own_parameters(one).values()
            if weight is not None and weight.requires_grad
        ]
        count = sum(id(weight) in trained for weight in weights)
        if 0 < count < len(weights) or (not weights and len(modules) > 2):
            return False
        are_trained.append(count > 0)
    return any(are_trained) and not all(are_trained)
