"""Assigns work in a different thread or task to the step and layer that asked for it (adoption).

A place is a step, layer and brick in the graph.

Rules
- A place ends with its step. Work that goes on after that belongs to no step.
- Adopted work runs in parallel with the step. Its times are added up in a separate node, outside of the step's wall
  time. In the thread that waits for it, the wait is a brick or a gap.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cbtop.protocol.ring import FLAG_FAILED
from cbtop.protocol.vocabulary import NodeKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbtop.profiler.hot_path import Position
    from cbtop.profiler.path import Path
    from cbtop.profiler.scopes import Scopes

ADOPTED = (NodeKind.ADOPTED, "adopted")
# Longest wait in seconds for another thread that is undoing an adoption. This takes microseconds.
UNDONE_WITHIN_S = 0.1


class GraphPlace:
    """The step, layer and brick that a thread, task or greenlet was in when it called `place`."""

    __slots__ = ("held", "lane", "recording", "scope", "step")

    def __init__(self, position: Position) -> None:
        self.scope = position.scope
        self.step: Any = position.step
        self.lane = position.lane
        self.held = position.held
        self.recording = position.recording


class Adopted:
    """Assigns the work of this thread or task to the step and layer of `place`: `with profiler.adopt(place):`."""

    __slots__ = (
        "__weakref__",
        "_before",
        "_give_up",
        "_lock",
        "_path",
        "_place",
        "_position",
        "_scope",
        "_scopes",
        "_start",
    )

    def __init__(self, path: Path, scopes: Scopes, give_up: Callable[[Exception], None], place: GraphPlace) -> None:
        self._path = path
        self._scopes = scopes
        self._give_up = give_up
        self._place = place
        self._lock = threading.RLock()
        # Position of the thread or task, while it has adopted the place.
        self._position: Position | None = None
        self._scope: Any = None  # scope of the adopted work; None if it is not recorded

    def __enter__(self) -> Adopted:
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - an error of cbtop or a clock must not reach the host
            self._give_up(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            self._end(failed=kind is not None)
        except Exception as trouble:  # noqa: BLE001 - as above
            self._give_up(trouble)

    def _begin(self) -> None:
        place, path = self._place, self._path
        position, step = path.position, place.step
        is_there = position.step is step and position.scope is place.scope
        is_nowhere = step is None and place.scope.parent is None
        # A step without a position has ended, so its place cannot be adopted.
        if is_there or is_nowhere or (step is not None and step.position is None):
            return
        self._before = position.scope, position.lane, position.held, position.step, position.recording
        self._scope = None
        position.step, position.recording = step, place.recording
        if path.recording:
            position.lane, position.held = place.lane, place.held
            scope = place.scope.children.get(ADOPTED) or self._scopes.define(place.scope, ADOPTED)
            self._start = path.start_mark()
            self._scope = scope
            path.enter(position, scope, path.now_ns())
        self._position = position  # Set `_position` last: from then on, the end of the step may undo the adoption.
        if step is not None:
            step.adopted[self] = None
            if step.position is None:  # the step has ended during the adoption
                self.let_go()

    def _end(self, *, failed: bool) -> None:
        position, scope, path = self._position, self._scope, self._path
        try:
            if position is not None and scope is not None and path.recording:
                end = path.end_mark()
                path.emit(scope, position, self._start, end, 1, position.lane | (FLAG_FAILED if failed else 0))
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Bring the thread or task back to where it was before the adoption.

        The step's own thread also calls this when the step ends.
        """
        # If two threads undo the adoption at once, the second thread waits for the first. In a child that was forked
        # in between, nothing releases the lock. The child gives up, because its thread has adopted nothing.
        if not self._lock.acquire(timeout=UNDONE_WITHIN_S):
            return
        try:
            position, self._position = self._position, None
            if position is None:
                return
            if self._place.step is not None:
                self._place.step.adopted.pop(self, None)
            scope, position.lane, position.held, position.step, position.recording = self._before
            self._path.enter(position, scope, 0)
        finally:
            self._lock.release()
