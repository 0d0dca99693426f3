"""Walks a tree of modules by identity: no module of the host's is compared, hashed, or asked for its truth or length.

torch's own `modules()` keeps those it has met in a set, which a module without a hash cannot be in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of `module` by name, those that are None left out."""
    children = object.__getattribute__(module, "__dict__").get("_modules") or {}
    return {name: child for name, child in children.items() if child is not None}


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return `root` and all modules in it, each once, in the order of `nn.Module.modules`."""
    found: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += reversed(children_of(module).values())
    return list(found.values())
