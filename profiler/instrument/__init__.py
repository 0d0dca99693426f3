"""Profiles a torch program without changes to its code: finds its modules and times their calls.

This package imports nothing of torch before `attach` or `install` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.attachment import Attachment
    from cbtop.profiler.profiler import BrickProfiler


def attach(model: nn.Module, profiler: BrickProfiler | None = None, *, guard: str = "") -> Attachment:
    """Time the layers and bricks of `model`, beginning with its next call. To stop, call `detach()` of the result.

    Makes a new profiler if `profiler` is None. `guard` takes the values of `cbtop run --guard`, such as "log" or
    "stop,abs<=1e4". "" means no guard. A guard that stops the host raises `cbtop.NotFiniteError`.

    Raises ValueError if `guard` is not valid, if torch lacks a necessary feature, or if `model` has neither a list of
    layers nor two modules with weights.
    """
    from cbtop.profiler.guard_setting import guard_setting
    from cbtop.profiler.instrument import attachment

    setting = guard_setting(guard) if guard else None
    attached = attachment.attach(model, profiler)
    attached.steps.guard_by(setting)
    return attached


def install(profiler: BrickProfiler) -> None:
    """Attach each model at its first call from now on. A model without a list of layers is attached at its second
    call.

    torch must be imported.
    """
    from cbtop.profiler.instrument import attachment

    attachment.install(profiler)


def uninstall() -> None:
    """Stop attaching models, and detach all attached models."""
    from cbtop.profiler.instrument import attachment

    attachment.uninstall()
