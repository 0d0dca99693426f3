"""Remembers which calls are not shown, to explain at the end why nothing was shown."""

from __future__ import annotations

import sys
from sys import _getframe
from types import FrameType

from torch import nn

from cbtop.profiler.instrument.call_attribute import plain_call
from cbtop.profiler.instrument.module_tree import children_of
from cbtop.profiler.instrument.trouble import first_said

MAX_KINDS = 256

_called: dict[str, int] = {}  # name of a class -> number of its modules that were called
_once: set[str] = set()  # names of classes without a list of layers, with a model that was called once


def note_call(module: nn.Module) -> None:
    """Count the first call of a `module` that is not shown as a model.

    Modules without children, or called by another module, explain nothing and are not counted.
    """
    kind = type(module).__name__
    if (kind in _called or len(_called) < MAX_KINDS) and children_of(module) and not is_called_by_another():
        _called[kind] = _called.get(kind, 0) + 1


def note_once(module: nn.Module) -> None:
    """Store that `module` was called once. It has no list of layers, so it is shown only from the second call on."""
    if len(_once) < MAX_KINDS:
        _once.add(type(module).__name__)


def is_called_by_another() -> bool:
    calls = plain_call(nn.Module).__code__
    frame: FrameType | None = _getframe(1)
    while frame is not None and frame.f_code is not calls:
        frame = frame.f_back
    return frame is not None


def why() -> str:
    """Return the reason why nothing is shown, or "" if it is unknown."""
    failed = first_said()
    if failed:
        return failed
    layers = next((kind for kind, count in _called.items() if count > 1), None)
    if layers:
        return f"{layers} was called layer by layer, and nothing that holds these layers"
    if _once:
        return f"{next(iter(_once))} was called once; without a list of layers it is shown from its second call on"
    if _called:
        return f"{next(iter(_called))} holds no list of layers, nor two modules with weights"
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters and counters["frames"]["total"]:
        return "no call of a model was seen outside of functions that torch.compile has compiled"
    return ""
