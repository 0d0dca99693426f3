"""The names of a model's parameters, without code of the model's own classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cbtop.profiler.instrument.torch_internals import own_parameters, submodules

if TYPE_CHECKING:
    from torch import nn

# The names under which wrappers of torch hold the wrapped module. They are left out of the names of parameters.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_REPLICAS = "DistributedDataParallel", "DataParallel"  # these classes hold the model as `module`


def name_of_last(root: nn.Module, parameters: Iterable[Any]) -> str:
    """Return the name of the last of `parameters` in the order of the model, such as `layers.3.mlp.up.weight`.

    The order is that of `named_parameters`. Returns "" if none of them is in the model.
    """
    wanted = set(map(id, parameters))
    seen = {id(root)}
    last = ""
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        prefix, module = waiting.pop()
        for name, own in own_parameters(module).items():
            if id(own) in wanted:
                last = prefix + name
        is_replica = type(module).__name__ in _REPLICAS
        inside = []
        for name, child in submodules(module).items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                is_wrapper = name in _WRAPPERS or (is_replica and name == "module")
                inside.append((prefix if is_wrapper else f"{prefix}{name}.", child))
        waiting += reversed(inside)
    return last
