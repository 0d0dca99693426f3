"""Makes an unedited torch process a profiled one: what its modules are, and when they began and ended.

Nothing of torch loads before `attach` or `install` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.attachment import Attachment
    from cbtop.profiler.profiler import BrickProfiler


def attach(model: nn.Module, profiler: BrickProfiler | None = None) -> Attachment:
    """Time the layers and bricks of `model` from its next call on; `detach()` of what is given leaves no trace of it.

    Without a `profiler` it gets one of its own. Raises ValueError for a model without a list of layers, and where
    this torch does not offer what is needed.
    """
    from cbtop.profiler.instrument import attachment

    return attachment.attach(model, profiler)


def install(profiler: BrickProfiler) -> None:
    """torch is imported: from now on every model that is called is attached at its first call."""
    from cbtop.profiler.instrument import attachment

    attachment.install(profiler)


def uninstall() -> None:
    """Attach no more models, and detach those that are."""
    from cbtop.profiler.instrument import attachment

    attachment.uninstall()
