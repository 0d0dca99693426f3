"""Shows viewers that a step without records makes progress, by writing into the ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbtop.profiler.path import Path


def show_progress(step: Any | None, path: Path) -> None:
    """Write into the ring that the outermost step around `step` makes progress. Call this when an inner step begins.

    Inner steps of an unrecorded step leave no records, so viewers would see no progress.
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
