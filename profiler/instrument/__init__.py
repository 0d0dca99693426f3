"""Profiles an unedited torch process: finds its modules, and when their calls begin and end.

Nothing of torch loads before `attach` or `install` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.attachment import Attachment
    from cbtop.profiler.profiler import BrickProfiler


def attach(model: nn.Module, profiler: BrickProfiler | None = None) -> Attachment:
    """Time the layers and bricks of `model` from its next call on. `detach()` of the result removes all traces of it.

    Without a `profiler` it gets one of its own. Raises ValueError for a module with neither a list of layers nor two
    modules with weights, and if this torch lacks a necessary feature.
    """
    from cbtop.profiler.instrument import attachment

    return attachment.attach(model, profiler)


def install(profiler: BrickProfiler) -> None:
    """Attach each model at its first call from now on, or at its second if it has no list of layers.

    torch must be imported.
    """
    from cbtop.profiler.instrument import attachment

    attachment.install(profiler)


def uninstall() -> None:
    """Stop attaching models, and detach those that are attached."""
    from cbtop.profiler.instrument import attachment

    attachment.uninstall()
