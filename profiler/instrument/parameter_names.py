"""Finds the names of a model's parameters, without running code of the model's own classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from cbtop.profiler.instrument.torch_internals import own_parameters, submodules

if TYPE_CHECKING:
    from torch import nn

# torch's wrappers keep the wrapped module under these attributes. Names of parameters leave them out.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_REPLICAS = "DistributedDataParallel", "DataParallel"  # classes that keep the wrapped model as `module`


def name_of_last(root: nn.Module, parameters: Iterable[Any]) -> str:
    """Return the name of the one of `parameters` that comes last in `named_parameters`, such as
    `layers.3.mlp.up.weight`.

    Returns "" if none of them is in the model.
    """
    wanted = set(map(id, parameters))
    last = ""
    for prefix, module in _named_modules(root):
        for name, own in own_parameters(module).items():
            if id(own) in wanted:
                last = prefix + name
    return last


def name_of_module(root: nn.Module, module: nn.Module) -> str:
    """Return the first name of `module` in `root`, such as `layers.3.mlp.up`. "" for `root` itself or if it is not in
    `root`.
    """
    return next((prefix.removesuffix(".") for prefix, one in _named_modules(root) if one is module), "")


def modules_by_name(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in `root` by name. If a module has several names, the first one counts."""
    return {prefix.removesuffix("."): module for prefix, module in _named_modules(root)}


def _named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of a model with the prefix of its parameters' names, in the order of `named_modules`."""
    seen = {id(root)}
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        prefix, module = waiting.pop()
        yield prefix, module
        is_replica = type(module).__name__ in _REPLICAS
        inside = []
        for name, child in submodules(module).items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                is_wrapper = name in _WRAPPERS or (is_replica and name == "module")
                inside.append((prefix if is_wrapper else f"{prefix}{name}.", child))
        waiting += reversed(inside)
