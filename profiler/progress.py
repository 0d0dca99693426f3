"""Shows readers of the ring that an unrecorded step is making progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbtop.profiler.path import Path


def show_progress(step: Any | None, path: Path) -> None:
    """Report progress of the outermost step around `step` to readers of the ring. Call it when an inner step begins.

    The inner steps of an unrecorded step are not recorded, so readers would otherwise see no progress.
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
        path.publish(position, there, path.now_ns(), step.tokens, step.sequences)
