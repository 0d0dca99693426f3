"""Steps: one forward pass each, whose name, tokens and start may be known only when it has run.

Rules
- A step decides for the thread, task or greenlet that it runs in, and for nobody else, whether it is sampled.
- Steps that run at the same time have a lane each, which their records carry: so the time in each is known apart.
- What runs in a step without a name is held until the step has one: its nodes lie under that name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cbtop.profiler.pending import HostTime
from cbtop.profiler.scopes import UNNAMED, Scopes
from cbtop.protocol.ring import FLAG_CANCELLED, FLAG_FAILED, LANE_SHIFT, LANES
from cbtop.protocol.vocabulary import NodeKind

if TYPE_CHECKING:
    from cbtop.profiler.hot_path import HeldRecord, Position, Scope
    from cbtop.profiler.path import Path

NO_NAME = "step"  # of a step that ended without one
SHARED_LANE = (LANES - 1) << LANE_SHIFT  # of all steps beyond the others: of these, which time is whose is not known

_log = logging.getLogger("cbtop")


class Steps:
    """The steps of one profiler: which of them are sampled, and in which lanes they run."""

    def __init__(
        self,
        path: Path,
        scopes: Scopes,
        is_sampled: Callable[[object], bool],
        give_up: Callable[[Exception], None],
        flush: Callable[[], None],
    ) -> None:
        self.path = path
        self.scopes = scopes
        self.is_sampled = is_sampled
        self.give_up = give_up
        self.flush = flush
        self.free_lanes = list(range(LANES - 2, -1, -1))  # the last is never taken: it is for all beyond the others


class Step:
    """`with profiler.step("decode", tokens=1) as step:` is one forward pass; tokens are counted here, and only here.

    What is known only inside may be set inside: `name`, `model`, `tokens`, and `start_ns` (on the monotonic clock, of
    `time.perf_counter_ns`) for a step that began before this block did. `cancel()` lets it not count.
    """

    __slots__ = (
        "_cancelled",
        "_model",
        "_name",
        "_outer",
        "_position",
        "_scope",
        "_start",
        "_start_ns",
        "_steps",
        "tokens",
    )

    def __init__(self, steps: Steps, name: str | None, tokens: int, model: str) -> None:
        self._steps = steps
        self._position: Position | None = None  # while it runs
        self._scope: Any = None  # None where it is not recorded
        self._cancelled = False
        self._name = name
        self._model = model
        self._start_ns: int | None = None
        self.tokens = tokens

    @property
    def name(self) -> str | None:
        """`decode`, `prefill`, or a name of your own; None until one is set.

        Of a step that began with a name, what ran before it was set anew keeps its time and does not count as a step.
        """
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        self._rename()

    @property
    def model(self) -> str:
        """Which model of this process ran (`draft`, `target`); empty where there is one."""
        return self._model

    @model.setter
    def model(self, model: str) -> None:
        self._model = model
        self._rename()

    @property
    def start_ns(self) -> int | None:
        """When it began, on the clock of `time.perf_counter_ns`, if that was before its block did."""
        return self._start_ns

    @start_ns.setter
    def start_ns(self, start_ns: int) -> None:
        try:
            if 0 <= start_ns <= self._steps.path.now_ns():
                self._start_ns = start_ns
            else:
                _log.warning("cbtop: a step cannot begin at %r: no time of this clock, or yet to come", start_ns)
        except Exception as error:  # noqa: BLE001 - as in __enter__
            self._steps.give_up(error)

    def cancel(self) -> None:
        """Let this step, its tokens and the time in it not count; bricks that ran in it keep their own statistics."""
        self._cancelled = True

    def __enter__(self) -> Step:
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - trouble of ours, or of a clock, is not the host's
            self._steps.give_up(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        position, self._position = self._position, None
        if position is not None:
            try:
                self._end(position, failed=kind is not None)
            except Exception as trouble:  # noqa: BLE001 - as above
                self._steps.give_up(trouble)

    @property
    def _key(self) -> tuple[object, ...]:
        name = NO_NAME if self._name is None else self._name
        return (NodeKind.STEP, name, self._model) if self._model else (NodeKind.STEP, name)

    def _begin(self) -> None:
        steps, path = self._steps, self._steps.path
        position = path.position
        self._outer = outer = position.step
        self._scope = None
        key = self._key
        if outer is None:
            position.recording = steps.is_sampled(None if self._name is None else key)
        if not path.recording:
            if outer is None:  # what lies in it is not recorded either, until it ends
                position.step, self._position = self, position
            return
        is_held = self._name is None and position.held is None
        if is_held:
            key = UNNAMED
        inside = position.scope
        scope = inside.children.get(key) or steps.scopes.define(inside, key)
        self._start, now_ns = path.start_mark(), path.now_ns()
        # Nothing from here on can fail.
        if is_held:
            position.held = []
        if outer is None:
            try:
                position.lane = steps.free_lanes.pop() << LANE_SHIFT
            except IndexError:
                position.lane = SHARED_LANE
        position.step, self._position, self._scope = self, position, scope
        path.enter(position, scope, now_ns)

    def _end(self, position: Position, *, failed: bool) -> None:
        path, scope, lane = self._steps.path, self._scope, position.lane
        step: Any = position.step
        while step is not None and step._position is None:  # this one, and any that ended before one inside it
            step = step._outer
        position.step = step
        if self._outer is None:
            position.recording = True
        if scope is None:
            return
        held = None
        try:
            end = path.end_mark()
        finally:
            position.leave(scope)
            if self._outer is None:
                position.lane = 0
            if scope.key == UNNAMED:
                held, position.held = position.held, None
        if path.recording:
            if held is not None:
                scope = self._give_name(scope, held, lane)
            flags = lane | (FLAG_FAILED if failed else 0) | (FLAG_CANCELLED if self._cancelled else 0)
            start = self._start if self._start_ns is None else HostTime(self._start_ns)
            path.emit(scope, position, start, end, self.tokens, flags)
        if self._outer is None:
            if lane != SHARED_LANE:  # only now: whoever takes it next writes behind this step's end
                self._steps.free_lanes.append(lane >> LANE_SHIFT)
            path.step_ended()
            self._steps.flush()

    def _rename(self) -> None:
        """Go on under the name that was set, where this step began under another."""
        position, scope = self._position, self._scope
        if position is None or scope is None or scope.key in (UNNAMED, self._key) or position.scope is not scope:
            return
        path = self._steps.path
        try:
            position.leave(scope)
            path.emit(scope, position, self._start, path.end_mark(), 0, position.lane | FLAG_CANCELLED)
            outer = scope.parent
            self._scope = outer.children.get(self._key) or self._steps.scopes.define(outer, self._key)
            path.enter(position, self._scope, path.now_ns())
        except Exception as error:  # noqa: BLE001 - as in __enter__
            self._steps.give_up(error)

    def _give_name(self, unnamed: Scope, held: list[HeldRecord], lane: int) -> Scope:
        """The scope of this step under its name, once what ran in it stands there too."""
        path, scopes = self._steps.path, self._steps.scopes
        places: dict[int, Scope] = {id(unnamed.parent): unnamed.parent}  # type: ignore[dict-item]

        def place(scope: Scope, key: object) -> Scope:
            found = places.get(id(scope))
            if found is None:
                outer = place(scope.parent, scope.parent.key)  # type: ignore[arg-type, union-attr]
                found = places[id(scope)] = outer.children.get(key) or scopes.define(outer, key)
            return found

        named = place(unnamed, self._key)
        for scope, start, end, elements, flags in held:
            path.emit(place(scope, scope.key), None, start, end, elements, flags | lane)
        return named
