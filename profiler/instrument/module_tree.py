"""Lists the modules and tensors of a model without running code of the model's classes.

Rules
- Modules are compared by `id`, because a class may be unhashable, or define `__eq__`, `__bool__` or `__len__`.
- torch's own modules are not asked for attributes that no class of torch has, because a miss in `Module.__getattr__`
  takes 1 us.
- All functions take time linear in the number of modules. `first_tensor` and `first_trained` stop at the first match.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.nn import Module

from cbtop.profiler.instrument.torch_internals import own_buffers, own_parameters, submodules

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")


def children_of(module: Module) -> list[tuple[str, Module]]:
    """Return the children of `module` with their names. A child with several names is listed once."""
    children = submodules(module)
    if not children:
        return []
    unique: dict[int, tuple[str, Module]] = {}
    for name, child in children.items():
        if child is not None:
            unique.setdefault(id(child), (name, child))
    return list(unique.values())


def modules_of(root: Module) -> list[Module]:
    """Return `root` and all modules inside it, each once, in the order of `Module.modules`."""
    walked = _walked_here.tree
    if walked is not None and walked.root is root:
        return walked.modules[:]
    return _modules_of(root)


def modules_by_path(root: Module) -> dict[str, Module]:
    """Return all modules of `root` by path, such as `layers.0.mlp`. A module with several paths has several entries.
    `root` is "".

    `Module.named_modules` would hash the modules, which the host's classes may forbid.
    """
    found: dict[str, Module] = {}
    waiting: list[tuple[str, Module, frozenset[int]]] = [("", root, frozenset())]
    while waiting:
        path, module, around = waiting.pop()
        found[path] = module
        around |= {id(module)}
        prefix = f"{path}." if path else ""
        for name, child in reversed(submodules(module).items()):
            if child is not None and id(child) not in around:
                waiting.append((prefix + name, child, around))
    return found


def _modules_of(root: Module) -> list[Module]:
    found = {id(root): root}
    _add_modules(submodules(root), found)
    return list(found.values())


class _Tree:
    """The modules and tensors of `root` at the time when this object was made."""

    def __init__(self, root: Module) -> None:
        self.root = root
        self.modules = _modules_of(root)
        self.kinds = one_of_each_class(self.modules)

    @functools.cached_property
    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        return _tensors_of(self.modules)


class _WalkedHere(threading.local):
    tree: _Tree | None = None


_walked_here = _WalkedHere()


class walked_once:  # noqa: N801 - used as a function
    """A context (`with walked_once(root):`). Inside it, this thread lists the modules and tensors of `root` only
    once.

    Attaching needs these lists 14 times. Making them each time took 0.13 s of 0.7 s for 24,000 modules.
    """

    def __init__(self, root: Module) -> None:
        self._root = root

    def __enter__(self) -> None:
        self._before = _walked_here.tree
        if self._before is None or self._before.root is not self._root:
            _walked_here.tree = _Tree(self._root)

    def __exit__(self, *raised: object) -> None:
        _walked_here.tree = self._before


def kinds_of(root: Module) -> list[Module]:
    """Return the first module of each class in `root`."""
    walked = _walked_here.tree
    if walked is not None and walked.root is root:
        return walked.kinds[:]
    return one_of_each_class(_modules_of(root))


def _add_modules(children: dict[str, Module | None], found: dict[int, Module]) -> None:
    for child in children.values():
        if child is not None and id(child) not in found:
            found[id(child)] = child
            inside = child._modules
            if inside:
                _add_modules(inside, found)


def one_of_each_class(modules: Iterable[Module]) -> list[Module]:
    """Return the first module of each class."""
    first: dict[int, Module] = {}
    for module in modules:
        first.setdefault(id(type(module)), module)
    return list(first.values())


def tensors_of(module: Module) -> list[Tensor]:
    """Return all parameters in `module`, then all buffers. Each tensor is listed once."""
    parameters, buffers = parameters_and_buffers(module)
    return parameters + buffers


def parameters_and_buffers(module: Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return all parameters in `module`, and all buffers that are not parameters. Each tensor is listed once."""
    walked = _walked_here.tree
    if walked is not None and walked.root is module:
        parameters, buffers = walked.tensors
        return parameters[:], buffers[:]
    return _tensors_of(_modules_of(module))


def _tensors_of(modules: list[Module]) -> tuple[list[Tensor], list[Tensor]]:
    parameters = _by_id(filter(None, map(own_parameters, modules)))
    buffers = _by_id(filter(None, map(own_buffers, modules)))
    return list(parameters.values()), [tensor for key, tensor in buffers.items() if key not in parameters]


def _by_id(held: Iterable[dict[str, Tensor | None]]) -> dict[int, Tensor]:
    """Return the tensors in these dictionaries of parameters or buffers, by id."""
    return {id(tensor): tensor for tensors in held for tensor in tensors.values() if tensor is not None}


def devices_of(module: Module) -> set[torch.device]:
    """Return the devices of all parameters and buffers in `module`."""
    return {tensor.device for tensors in parameters_and_buffers(module) for tensor in tensors}


def parameters_of(module: Module) -> list[Tensor]:
    """Return all parameters in `module`. Each parameter is listed once."""
    walked = _walked_here.tree
    if walked is not None and walked.root is module:
        return walked.tensors[0][:]
    return list(_by_id(filter(None, map(own_parameters, _modules_of(module)))).values())


def first_tensor(module: Module) -> Tensor | None:
    """Return the first parameter in `module`. Without parameters, return the first buffer or None."""
    parameter = _first(module, own_parameters, _is_any)
    return _first(module, own_buffers, _is_any) if parameter is None else parameter


def first_trained(module: Module) -> Tensor | None:
    """Return the first parameter in `module` that requires a gradient, or None."""
    return _first(module, own_parameters, _requires_grad)


def _is_any(tensor: Tensor | None) -> bool:
    return tensor is not None


def _requires_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _first(
    module: Module, own: Callable[[Module], dict[str, Tensor | None]], is_wanted: Callable[[Tensor | None], bool]
) -> Tensor | None:
    """Call `own` with `module` and each module inside it. Returns the first tensor in the results that `is_wanted`
    accepts, or None.

    This function avoids generators: if a signal handler raises while a generator ends, the exception is lost.
    """
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        held = own(one)
        if held:
            for tensor in held.values():
                if is_wanted(tensor):
                    return tensor
        children = submodules(one)
        if children:
            waiting += [child for child in reversed(list(children.values())) if child is not None]
    return None


def attribute_of(thing: Any, name: str) -> Any:
    """Return the attribute `name` of `thing` itself or of its class, or None.

    Runs no code of the host: no property, no `__getattr__`, no `__class__`. Such code may change the program, for
    example draw random numbers or print.
    """
    own = dictionary_of(thing)
    if name in own:
        return own[name]
    value = of_class(type(thing), name)
    if type(value) is MemberDescriptorType:  # the class has the attribute in its __slots__
        try:
            return value.__get__(thing)
        except AttributeError:  # this slot of the object has no value
            return None
    return value if _is_plain(value) else None


def dictionary_of(thing: Any) -> dict[str, Any]:
    """Return the `__dict__` of `thing`, or an empty dictionary if `thing` has none."""
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return own if type(own) is dict else {}


def _can_be_asked(kind: type, *names: str) -> bool:
    """Return whether the attributes `names` of an object of class `kind` can be read without running code of the
    host.
    """
    if of_class(kind, "__getattr__") is not None or of_class(kind, "__getattribute__") != object.__getattribute__:
        return False
    return all([_is_plain(of_class(kind, name)) for name in names])


def _has_method(kind: type, name: str) -> bool:
    """Return whether the attribute `name` of the class `kind` is a function."""
    return type(of_class(kind, name)) is FunctionType


def _home_of(kind: type, name: str) -> str:
    """Return the Python module that defines the method `name` of `kind`. "" if the method is not a Python
    function.
    """
    method = of_class(kind, name)
    home = method.__module__ if type(method) is FunctionType else ""
    return home if type(home) is str else ""


home_of: Callable[[type, str], str] = functools.lru_cache(maxsize=256)(_home_of)
can_be_asked: Callable[..., bool] = functools.lru_cache(maxsize=64)(_can_be_asked)
has_method: Callable[[type, str], bool] = functools.lru_cache(maxsize=64)(_has_method)


def of_class(kind: type, name: str) -> Any:
    """Return the attribute `name` of the class `kind` without running code of the host, or None."""
    for one in type.__dict__["__mro__"].__get__(kind):
        held = type.__dict__["__dict__"].__get__(one)
        if name in held:
            return held[name]
    return None


def home_of_class(kind: type) -> str:
    """Return the Python module that defines the class `kind`, or "" if it has no name."""
    home = of_class(kind, "__module__")
    return home if type(home) is str else ""


def _is_plain(value: Any) -> bool:
    return not hasattr(type(value), "__get__")


def holders_of(root: Module, name: str) -> list[Module]:
    """Return the modules in `root` that have the attribute `name`, themselves or through their class."""
    kinds = {id(type(one)) for one in kinds_of(root) if of_class(type(one), name) is not None}
    if kinds:
        return [one for one in modules_of(root) if id(type(one)) in kinds or name in one.__dict__]
    return [one for one in modules_of(root) if name in one.__dict__]


def attributes_of(modules: Iterable[Module], name: str) -> list[Any]:
    """Return the attribute `name` of each module (see `attribute_of`). Each class is examined once."""
    values = []
    # Id of a class -> the attribute of the class, or None. Not the class itself, because it may define its own hash.
    known: dict[int, Any] = {}
    for module in modules:
        own = module.__dict__
        if name in own:
            values.append(own[name])
            continue
        kind = id(type(module))
        if kind not in known:
            value = of_class(type(module), name)
            known[kind] = value if _is_plain(value) else None
        values.append(known[kind])
    return values


class WeakModuleDict(Generic[Value]):
    """A dictionary with modules as keys, compared by identity. The entry of a freed module disappears.

    torch's WeakIdKeyDictionary may run a `__getattr__` of the host, so it is not used.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Module], Value]] = {}

    def get(self, module: Module, default: Value | None = None) -> Value | None:
        entry = self._entries.get(id(module))
        return default if entry is None or entry[0]() is not module else entry[1]

    def setdefault(self, module: Module, value: Value) -> Value:
        if module not in self:
            self[module] = value
        return self[module]

    def items(self) -> list[tuple[Module, Value]]:
        entries = [(reference(), value) for reference, value in list(self._entries.values())]
        return [(module, value) for module, value in entries if module is not None]

    def values(self) -> list[Value]:
        return [value for _, value in self.items()]

    def __contains__(self, module: Module) -> bool:
        entry = self._entries.get(id(module))
        return entry is not None and entry[0]() is module

    def __getitem__(self, module: Module) -> Value:
        reference, value = self._entries[id(module)]
        if reference() is not module:
            raise KeyError(id(module))
        return value

    def __setitem__(self, module: Module, value: Value) -> None:
        # A callback in C, because a signal handler of the host may raise inside a Python callback. Python would
        # ignore the exception, and the entry would stay.
        key = id(module)
        self._entries[key] = weakref.ref(module, functools.partial(self._entries.pop, key)), value

    def __delitem__(self, module: Module) -> None:
        if module not in self:
            raise KeyError(id(module))
        del self._entries[id(module)]

    def __len__(self) -> int:
        return len(self._entries)
