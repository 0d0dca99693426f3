"""Finds the class of a module, the source line of its `forward`, and its weight, for the details of a brick.

Rules
- Everything is read once, when a model is planned, and never while it runs.
- No code of the host runs, and no file is read.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from cbtop.profiler.instrument.module_tree import attribute_of, home_of_class, of_class
from cbtop.profiler.instrument.torch_internals import own_buffers, own_parameters
from cbtop.protocol.attributes import ModuleAttributes

MAX_WRAPPERS = 16  # at most this many decorators of a `forward` are followed
MAX_DIMENSIONS = 8  # dimensions of a weight that are named
MAIN = "__main__."


class ModuleFacts:
    """Reads the facts of the modules of one model. Most modules share a few classes, so each class is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[type, str, str]] = {}  # by the id of a class

    def of(self, module: torch.nn.Module) -> ModuleAttributes:
        """Return the class, source and weight of `module`. A fact that is not known is empty."""
        kind = type(module)
        known = self._known.get(id(kind))
        if known is None:
            known = self._known[id(kind)] = (kind, class_name(kind), source_of(kind))
        weight = _weight_of(module)
        return ModuleAttributes(
            module_class=known[1],
            module_source=known[2],
            weight_shape="" if weight is None else "x".join(map(str, weight.shape[:MAX_DIMENSIONS])),
            weight_dtype="" if weight is None else str(weight.dtype).removeprefix("torch."),
        )


def class_name(kind: type) -> str:
    """Return the name of a class as a user imports it, such as `torch.nn.Linear`."""
    name = type.__dict__["__qualname__"].__get__(kind)
    if getattr(torch.nn, name, None) is kind:
        return f"torch.nn.{name}"
    return f"{home_of_class(kind)}.{name}".removeprefix(MAIN).removeprefix(".")


def source_of(kind: type) -> str:
    """Return where the `forward` of a class is defined, such as `torch/nn/modules/linear.py:134`, or "" if unknown.

    The path begins at the folder that Python imports from, so it names no home folder.
    """
    code = _code_of(of_class(kind, "forward"))
    return "" if code is None else f"{_from_import_folder(code.co_filename)}:{code.co_firstlineno}"


def _code_of(function: Any) -> CodeType | None:
    for _ in range(MAX_WRAPPERS):
        wrapped = attribute_of(function, "__wrapped__")
        if wrapped is None:
            break
        function = wrapped
    return function.__code__ if type(function) is FunctionType else None


def _from_import_folder(path: str) -> str:
    folders = [f"{folder.rstrip(os.sep)}{os.sep}" for folder in sys.path if type(folder) is str and folder]
    inside = [folder for folder in folders if path.startswith(folder)]
    return path[len(max(inside, key=len)) :] if inside else os.path.basename(path)


def _weight_of(module: torch.nn.Module) -> Tensor | None:
    """Return the parameter `weight` of a module, or its first parameter, or its first buffer."""
    for held in (own_parameters(module), own_buffers(module)):
        # A module from `torch.jit` has no dictionary here, only an object with `items`.
        tensors = {name: one for name, one in held.items() if one is not None and not is_lazy(one)}
        if tensors:
            return tensors.get("weight", next(iter(tensors.values())))
    return None
