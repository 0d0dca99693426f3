"""Finds out whether modules of one class that are called in turns are layers of one model, or a model each.

The generator and the discriminator of a GAN may have one class. So may the network and the target network of a
Q-learning program, the two encoders of a retrieval model, or an actor and its critic. Their calls look like those of
layers that a program calls by itself. An optimizer shows which is the case, in one of two ways:

- It trains all weights of some of these modules, and no weight of the others.
- It trains all weights of all of them, and their inputs do not depend on each other's weights. Layers get the output
  of the layer before them. Autograd knows what an input depends on, so this needs a call with gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.instrument.call_attribute import arguments_of_call, forget, standing
from cbtop.profiler.instrument.module_tree import dictionary_of, modules_of
from cbtop.profiler.instrument.torch_internals import own_parameters
from cbtop.profiler.instrument.trouble import log_own_error

MAX_MODELS = 8  # With more modules of one class, they are layers.
# After this many steps of optimizers, no class is looked at any longer. A Wasserstein GAN trains its discriminator
# five times before its generator.
MAX_OPTIMIZER_STEPS = 32
# At most this many operations before an input are looked at, about 1 us each. With more, it counts as depending on
# all.
MAX_OPERATIONS = 1024


class _Called:
    """The modules of one class that were called in turns."""

    def __init__(self) -> None:
        self.modules: list[weakref.ref[nn.Module]] = []
        self.fed_apart: set[int] = set()  # ids of modules with inputs that depend on no weight of the rest
        self.is_chain = False  # whether an input of one module depends on a weight of another one

    def alive(self) -> list[nn.Module]:
        return [module for one in self.modules if (module := one()) is not None]

    def look_at_call(self, module: nn.Module) -> None:
        """Find out what the arguments of the running call of `module` depend on. Without gradients it is unknown."""
        arguments = arguments_of_call(module)
        tensors = list(_tensors((arguments.args, arguments.kwargs))) if arguments is not None else []
        if not tensors or not is_grad_enabled():
            return
        others = {id(weight) for one in self.alive() if one is not module for weight in trainable_weights(one)}
        if depends_on(tensors, others):
            self.is_chain = True
        else:
            self.fed_apart.add(id(module))

    def are_fed_apart(self, modules: Collection[nn.Module]) -> bool:
        """Return whether the modules do not depend on each other. False if it is unknown."""
        return not self.is_chain and all([id(module) in self.fed_apart for module in modules])


class TrainedApart:
    """The classes with several modules that were called in turns. It is not known yet whether they are layers or
    models.
    """

    def __init__(self) -> None:
        self._called: dict[int, _Called] = {}  # id of a class -> its modules that were called
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
        """Add a module of a class with several modules that were called in turns. It may be in a call."""
        if self._steps >= MAX_OPTIMIZER_STEPS:
            return
        called = self._called.setdefault(id(type(module)), _Called())
        if len(called.modules) <= MAX_MODELS and not any([one() is module for one in called.modules]):
            called.modules.append(weakref.ref(module))
        called.look_at_call(module)
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
                modules = called.alive()
                is_known = are_apart(modules, its) or (
                    are_all_trained(modules, its) and called.are_fed_apart(modules)
                )
                if is_known:
                    self._models.add(kind)
                    self._called.pop(kind, None)
                if is_known or (len(modules) <= MAX_MODELS and not called.is_chain):
                    for module in modules:
                        if standing(module) is None and (is_known or id(module) not in called.fed_apart):
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

    It trains some of them completely, and others not at all. If there are more than two, all have weights that
    require gradients, because the first of many layers may be frozen.
    """
    if not 2 <= len(modules) <= MAX_MODELS:
        return False
    are_trained = []
    for module in modules:
        weights = trainable_weights(module)
        count = sum(id(weight) in trained for weight in weights)
        if 0 < count < len(weights) or (not weights and len(modules) > 2):
            return False
        are_trained.append(count > 0)
    return any(are_trained) and not all(are_trained)


def are_all_trained(modules: list[nn.Module], trained: set[int]) -> bool:
    """Return whether an optimizer of the weights `trained` (ids) trains two or more `modules` completely."""
    if not 2 <= len(modules) <= MAX_MODELS:
        return False
    of_modules = [trainable_weights(module) for module in modules]
    return all([weights and all([id(weight) in trained for weight in weights]) for weights in of_modules])


def trainable_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights in `module` that require gradients."""
    return [
        weight
        for one in modules_of(module)
        for weight in own_parameters(one).values()
        if weight is not None and weight.requires_grad
    ]


def depends_on(tensors: Iterable[Tensor], weights: set[int]) -> bool:
    """Return whether autograd has computed one of `tensors` from one of `weights`, which are ids.

    Returns True if more than MAX_OPERATIONS operations were needed to compute them.
    """
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    met = set(waiting)
    while waiting:
        operation = waiting.pop()
        is_weight = type(operation).__name__ == "AccumulateGrad" and id(operation.variable) in weights
        if is_weight or len(met) > MAX_OPERATIONS:
            return True
        for before, _ in operation.next_functions:
            if before is not None and before not in met:
                met.add(before)
                waiting.append(before)
    return False


def _tensors(value: object) -> Iterator[Tensor]:
    """Return the tensors in `value`, which may contain tuples, lists and dictionaries. Runs no code of the host."""
    if issubclass(type(value), Tensor):
        yield value
    elif type(value) in (tuple, list):
        for one in value:  # type: ignore[attr-defined]
            yield from _tensors(one)
    elif type(value) is dict:
        yield from _tensors(list(value.values()))
