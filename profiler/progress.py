"""Shows readers of the ring that a step goes on which is not recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbtop.profiler.path import Path


def show_progress(step: Any, path: Path) -> None:
    """Show readers of the ring that the outermost step around `step` goes on: one inside it begins. None: it is none.

    It is not recorded, so nothing else shows it.
    """
    if step is None:
        return
    while step.outer is not None:
        step = step.outer
    position = step.position
    if position is None or position.recording:
        return
    root = position.scope
    while root.parent is not None:
        root = root.parent
    there = root.children.get(step.key)
    if there is not None:
        size = step.tokens or step.sequences
        path.publish(position, there, path.now_ns(), size if type(size) is int and 0 < size < 1 << 31 else 0)
