"""What was called and is not shown: why, where in the end a process has shown nothing."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

MAX_KINDS = 256

_called: dict[str, int] = {}  # modules by class
_failed: list[str] = []


def note_call(module: nn.Module) -> None:
    """`module` is called for the first time, and is no model of which anything could be shown.

    One that another calls, and one that holds no other, tells nothing.
    """
    kind = type(module).__name__
    if (
        (kind in _called or len(_called) < MAX_KINDS)
        and next(module.children(), None) is not None
        and not _is_called_by_another()
    ):
        _called[kind] = _called.get(kind, 0) + 1


def _is_called_by_another() -> bool:
    calls = nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not calls:
        frame = frame.f_back
    return frame is not None


def note_failure(why: str) -> None:
    """A model cannot be shown, or none can."""
    if len(_failed) < MAX_KINDS:
        _failed.append(why)


def why() -> str:
    """Why nothing is shown, as far as is known; "" where nothing was seen."""
    if _failed:
        return _failed[0]
    layers = next((kind for kind, count in _called.items() if count > 1), None)
    if layers:
        return f"{layers} was called layer by layer, and nothing that holds these layers"
    if _called:
        return f"{next(iter(_called))} holds no list of two or more layers of one class"
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters and counters["frames"]["total"]:
        return "no call of a model was seen outside of functions that torch.compile has compiled"
    return ""
