"""Records steps. A step is one forward pass. Its name, tokens and start may be known only after the pass.

Rules
- A step always counts for its own phase. If it runs inside a function or another step, its time is also recorded in a
  second node there.
- Sampling concerns only the step's own thread, task or greenlet.
- A step that is not sampled is plain. It is timed as a whole, and leaves one record at its end. Bricks and steps
  inside it leave none, so it needs no lane.
- Sampled steps that run at the same time have different lanes, which tell their records apart.
- The records of a step without a name wait for the name, because their nodes are below it.
- A step belongs to its process. A forked child does not complete its parent's steps, and does not begin inside of
  them.
- The code uses no __del__ and finishes every generator. Otherwise, exceptions of the host's signal handlers could be
  lost. Weak references tell which step has which lane.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from cbtop.profiler.graph_recorder import checked
from cbtop.profiler.held_steps import HeldStep, HeldSteps, Part
from cbtop.profiler.lanes import SHARED_LANE, Lanes
from cbtop.profiler.path import Told, amount_of
from cbtop.profiler.pending import HostTime
from cbtop.profiler.progress import show_progress
from cbtop.profiler.scopes import UNNAMED, NamedScopes, Scopes
from cbtop.profiler.step_parts import AlikeParts, Ended, Inside, scope_of
from cbtop.protocol import clock
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_CANCELLED, FLAG_FAILED, FLAG_PLAIN, UNKNOWN_AMOUNT
from cbtop.protocol.vocabulary import NodeKind

if TYPE_CHECKING:
    from cbtop.profiler.hot_path import HeldRecord, Position, Scope
    from cbtop.profiler.path import Path
    from cbtop.profiler.places import Adopted

NO_NAME = "step"  # the name of a step that was never named
# Flags of a cancelled plain step. In the shared lane, its record cancels no other record.
CANCELLED_PLAIN = FLAG_CANCELLED | SHARED_LANE
StepKey: TypeAlias = tuple[NodeKind, str] | tuple[NodeKind, str, str]  # (STEP, name) or (STEP, name, model)
STEP = NodeKind.STEP  # a global, because reading it from the enum would double the time to make a key

_log = logging.getLogger("cbtop")


class Steps:
    """Makes the steps of one profiler on one path, and gives them lanes."""

    __slots__ = (
        "__weakref__",
        "_others",
        "_warned",
        "flush",
        "forks",
        "give_up",
        "governor",
        "is_on",
        "is_sampled",
        "lanes",
        "path",
        "scopes",
        "show",
        "take_lane",
        "warm_ups",
    )

    def __init__(
        self,
        path: Path,
        scopes: Scopes,
        is_sampled: Callable[[object], bool],
        give_up: Callable[[Exception], None],
        flush: Callable[[], None],
        show: Callable[[], None],
    ) -> None:
        self.path = path
        self.scopes = scopes
        self.is_sampled = is_sampled
        self.give_up = give_up
        self.flush = flush
        self.show = show  # opens the ring, so that viewers see this process before its first record
        self.forks = 0  # number of forks from the first process to this one
        self.is_on = True  # whether the profiler is recording now
        self.governor: Any = None  # called at each step if not None (instrument/governor.py)
        self.warm_ups: Any = None  # names the first steps of each kind if not None (instrument/warm_up.py)
        self._others: WeakSet[Steps] = WeakSet()  # copies of this object for other paths, from `on`
        self.lanes = Lanes()
        self.take_lane = self.lanes.take  # without a wrapper, which would cost time at every recorded step
        self._warned: set[str] = set()  # lines that were logged; shared by all copies

    def warn_once(self, line: str, *arguments: object) -> None:
        """Log `line` only once, even if every step causes it."""
        if line not in self._warned:
            self._warned.add(line)
            _log.warning(line, *arguments)

    def on(self, path: Path) -> Steps:
        """Return a copy of this object that times steps on `path`, with the same lanes."""
        steps = copy.copy(self)
        steps.path, steps.give_up = path, path.give_up
        self._others.add(steps)
        return steps

    def turn(self, on: bool) -> None:
        """Turn recording on or off."""
        for steps in (self, *self._others):
            steps.is_on = on

    def record(
        self,
        name: str,
        tokens: int,
        start_ns: int,
        end_ns: int,
        parts: Iterable[Part] | None,
        *,
        lost: int = 0,
        model: str = "",
        sequences: int | None = None,
    ) -> None:
        """Record a step that was timed elsewhere on the host's clock, and its `parts`.

        Without `parts` (None), the step is plain. `lost` is the number of steps lost since the last recorded one.
        """
        step = ActiveStep(self, name, tokens, model)
        try:
            if self.path.recording:
                lane = FLAG_PLAIN if parts is None else self.take_lane(step)
                root = self._root
                for keys, began_ns, ended_ns, elements in parts or ():
                    self.emit(root, (step.key, *keys), began_ns, ended_ns, elements, lane)
                self.emit(root, (step.key,), start_ns, end_ns, tokens, lane)
                if sequences is not None:
                    self.emit(root, (step.key,), sequences, UNKNOWN_AMOUNT, 0, FLAG_AMOUNTS)
                self.path.step_ended()
                self.flush()
        except Exception as error:  # noqa: BLE001 - an error of cbtop or a clock must not reach the host
            self.give_up(error)
        finally:
            step.lane = None
        self.lose(lost)

    def lose(self, count: int) -> None:
        """Count `count` lost steps. Each leaves a record without a node."""
        try:
            for _ in range(count):
                self.path.emit(self._root, None, HostTime(0), HostTime(0), 0, 0)
        except Exception as error:  # noqa: BLE001 - an error of cbtop or a clock must not reach the host
            self.give_up(error)

    @property
    def _root(self) -> Scope:
        root = self.path.position.scope
        while root.parent is not None:
            root = root.parent
        return root

    def emit(
        self, root: Scope, keys: tuple[Hashable, ...], start_ns: int, end_ns: int, elements: int, lane: int
    ) -> None:
        """Record a call in the scope that is reached from `root` by `keys`. New scopes are defined."""
        scope = scope_of(root, keys, self.scopes)
        self.path.emit(scope, None, HostTime(start_ns), HostTime(end_ns), elements, lane)

    def after_fork(self) -> None:
        """In a forked child, drop the parent's running steps, and make a new lock, because the parent may hold the
        old one.
        """
        self.lanes.after_fork()
        for steps in (self, *self._others):
            steps.forks += 1
        position = self.path.position
        for step in [*self.lanes.holders, position.step]:  # steps in the shared lane are not among the holders
            if isinstance(step, ActiveStep):
                step.leave_to_parent()
        inner: Any = position.step
        while inner is not None:
            inner.leave_to_parent()
            inner = inner.outer
        root = self._root
        position.lane, position.held, position.recording = 0, None, True
        self.path.enter(position, root, 0)


def _key(name: str | None, model: str) -> StepKey:
    name = NO_NAME if name is None else name
    return (STEP, name, model) if model else (STEP, name)


def _let_go(adopted: Iterable[Adopted]) -> None:
    for one in list(adopted):
        one.let_go()


class ActiveStep:
    """One forward pass: `with profiler.step("decode", tokens=1) as step:`. Only here are tokens counted.

    Values that are known only inside the block are set there: `name`, `model`, `tokens`, `start_ns`, `sequences` and
    `cached`. `start_ns` is a time of `time.perf_counter_ns`, if the step began before the block. `sequences` is the
    number of sequences in the pass, and `cached` the number of positions that each had before (None: unknown).
    `cancel()` excludes the step from all counts.
    """

    __slots__ = (
        "__weakref__",
        "_begun_ns",
        "_cancelled",
        "_ended",
        "_inside",
        "_is_outermost",
        "_is_plain",
        "_mark",
        "_model",
        "_name",
        "_outer_held",
        "_scope",
        "_start",
        "_start_ns",
        "_steps",
        "_waits",
        "adopted",
        "cached",
        "forks",
        "key",
        "lane",
        "outer",
        "own_ns",
        "position",
        "returned_ns",
        "sequences",
        "tokens",
    )

    def __init__(self, steps: Steps, name: str | None, tokens: int, model: str) -> None:
        self._steps = steps
        self.lane: int | None = None  # the step's lane while it has one
        self.position: Position | None = None  # the step's position while it runs
        self._scope: Any = None  # the step's scope; None if its bricks are not recorded
        self._cancelled = False
        self.adopted: dict[Adopted, None] = {}  # work that other threads or tasks do for this step
        self._waits = 0  # number of expected calls of `told`, which bring the times of parts
        self._ended: Ended | HeldStep | None = None  # set after the end of the step, while it waits for parts
        self._mark: Any = None  # from Governor.began, while the step runs
        self._name = name
        self._model = model
        named = NO_NAME if name is None else name
        self.key: StepKey = (STEP, named, model) if model else (STEP, named)
        self._start_ns: int | None = None
        self.own_ns = 0  # ns of cbtop's own work to start the step, and of calls in it that are not the model's
        self.returned_ns: int | None = None  # when the call that ends the step returned; None if unknown
        self.tokens = tokens
        self.sequences: int | None = None
        self.cached: int | None = None

    @property
    def name(self) -> str | None:
        """The name: `decode`, `prefill` or your own. None until it is set.

        If a running step is renamed, its earlier time stays under the old name, but does not count as a step.
        """
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = checked(name, "step")
        self.key = _key(name, self._model)
        self._rename()

    @property
    def model(self) -> str:
        """The model that ran (`draft`, `target`), if this process runs several; else ""."""
        return self._model

    @model.setter
    def model(self, model: str) -> None:
        self._model = checked(model, "model")
        self.key = _key(self._name, model)
        self._rename()

    @property
    def start_ns(self) -> int | None:
        """When the step began, on the clock of `time.perf_counter_ns`. None: together with its block."""
        return self._start_ns

    @start_ns.setter
    def start_ns(self, start_ns: int) -> None:
        try:
            if isinstance(start_ns, int) and 0 <= start_ns <= self._steps.path.now_ns():
                self._start_ns = start_ns
            else:
                self._steps.warn_once(
                    "cbtop: a step cannot begin at %r; give a time of time.perf_counter_ns that is not in the future",
                    start_ns,
                )
        except Exception as error:  # noqa: BLE001 - an error of cbtop or a clock must not reach the host
            self._steps.give_up(error)

    def cancel(self) -> None:
        """Exclude this step, its tokens and its time from all counts. Calls of its bricks still count."""
        self._cancelled = True

    def take_lane(self) -> int:
        """Reserve a lane for this step until `leave_lane`. Returns the shared lane if no other lane is free."""
        return self._steps.take_lane(self)

    def leave_lane(self) -> None:
        """Release the lane after this step's last record. The next step may take it."""
        self.lane = None

    def wait(self) -> None:
        """Expect one more call of `told` after the end of this step, with parts that a device has timed."""
        self._waits += 1

    def told(self, parts: Iterable[Part] | None) -> None:
        """Record `parts` that the step has waited for. None: count them as lost.

        The last expected call also records the step.
        """
        ended, self._waits = self._ended, self._waits - 1
        if ended is None:  # the step is running, was not recorded, or is the parent process's
            return
        if isinstance(ended, HeldStep):
            ended.told(parts)
            return
        if parts is None:
            self._steps.lose(1)

        def read(scopes: Scopes) -> Told:
            told = list(parts or ())
            keys, *columns = zip(*told, strict=True) if told else ((), (), (), ())
            return [scope_of(ended.scope, one, scopes) for one in keys], *columns

        self._record(ended, read)

    def record_known_parts(
        self, parts: AlikeParts, starts_ns: Sequence[int], ends_ns: Sequence[int], elements: Sequence[int]
    ) -> None:
        """Record parts like `told`, but faster for parts that many steps have. A column has one entry per part."""
        ended = self._ended
        if not isinstance(ended, Ended):  # the step may have no name yet
            self.told(list(zip(parts.keys, starts_ns, ends_ns, elements, strict=True)))
            return
        self._waits -= 1
        self._record(ended, lambda scopes: (parts.scopes_in(ended.scope, scopes), starts_ns, ends_ns, elements))

    def _record(self, ended: Ended, read: Callable[[Scopes], Told]) -> None:
        """Record the parts that `read` returns. If all parts have come, record the step, too."""
        steps, path = self._steps, self._steps.path
        try:
            told = _, _, ends_ns, _ = read(steps.scopes)
            path.emit_deferred(told, self.lane or 0)
            if isinstance(ended.end, int):
                ended.end = HostTime(max([ended.end, *ends_ns]))
            if not self._waits:
                self._emit(ended.scope, ended.start, ended.end, ended.flags, ended.inside)
                self._ended = self.lane = None
                path.step_ended()
                steps.flush()
        except Exception as error:  # noqa: BLE001 - an error of cbtop or a clock must not reach the host
            self._ended = self.lane = None
            steps.give_up(error)

    @property
    def is_running(self) -> bool:
        """Whether the step has begun and not ended."""
        return self.position is not None

    # __enter__ and __exit__ call few functions, because the model evicts cbtop's code from the processor's caches.

    def __enter__(self) -> ActiveStep:
        try:
            steps, path = self._steps, self._steps.path
            governor, position = steps.governor, path.position
            if governor is not None:
                self._begun_ns = clock.perf_counter_ns()
            outer: Any = position.step
            while outer is not None and outer.position is None:  # a signal has interrupted the end of `outer`
                outer = outer.outer
            self.outer = outer
            self._scope, self._is_plain, self.forks = None, False, steps.forks
            self._is_outermost = outer is None or outer.forks != steps.forks
            if self._is_outermost:
                position.recording = True
            if not (steps.is_on and position.recording):
                self.position, position.step = position, self
                show_progress(outer, path)
                return self
            root = top = self._inside = position.scope
            while root.parent is not None:
                top, root = root, root.parent
            if outer is None and isinstance(top.key, tuple) and top.key[0] is STEP:
                # A signal has interrupted the end of an earlier step, so the position is still inside it.
                self._inside = root
            if self._is_outermost and not steps.is_sampled(None if self._name is None else self.key):
                # A plain step must not wait for a device. If recorded steps do (`held_steps`), use the host's time.
                start = self._start = path.end_mark() if path.held_steps is None else HostTime(path.now_ns())
                self._is_plain = True
                if governor is not None:
                    self._mark = governor.began(self, self._model, recorded=False)
                    self.own_ns = clock.perf_counter_ns() - self._begun_ns
                self.position, position.step = position, self
                position.recording = False  # calls inside this step are not recorded
                if (there := root.children.get(self.key)) is not None:
                    start_ns = start if isinstance(start, int) else path.now_ns()
                    path.publish(position, there, start_ns, self.tokens, self.sequences)
                return self
            if self._name is None:
                steps.show()  # this step's records are written only once it has a name, so open the ring now
            key = UNNAMED if self._name is None or path.held_steps is not None else self.key
            scope = root.children.get(key) or steps.scopes.define(root, key)
            if governor is not None and self._is_outermost:
                self._mark = governor.began(self, self._model, recorded=True)
                self.own_ns = clock.perf_counter_ns() - self._begun_ns
            start = self._start = path.start_mark()
            now_ns = start if isinstance(start, int) else path.now_ns()
            self._outer_held = position.held  # no line below can fail
            position.held = [] if key is UNNAMED else None
            position.lane = steps.take_lane(self)
            # Together, because a signal handler may run steps in between. A step without a position has ended.
            self._scope, self.position, position.step = scope, position, self
            path.enter(position, scope, now_ns)
            if self._is_outermost:
                path.publish(position, scope, now_ns, self.tokens, self.sequences)
        except BaseException as error:
            self.position = self._mark = None  # otherwise `__exit__` would end a step that has not begun
            if not isinstance(error, Exception):
                raise
            self._steps.give_up(error)  # an error of cbtop or a clock must not reach the host
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object, /) -> None:
        position, self.position = self.position, None
        if position is None:
            return
        mark, governor = self._mark, self._steps.governor
        ending_ns = 0 if mark is None else self.returned_ns or clock.perf_counter_ns()
        try:
            path, scope, lane, failed = self._steps.path, self._scope, self.lane or 0, kind is not None
            if self.adopted:
                _let_go(self.adopted)
            outer: Any = position.step
            while outer is not None and outer.position is None:  # skip outer steps that have ended
                outer = outer.outer
            position.step = outer
            if self._is_outermost:
                position.recording = True
            if self._is_plain:  # a plain step counts under its last name
                self._is_plain, steps, root = False, self._steps, self._inside
                path.publish(position, position.scope, 0, None, None)
                if not steps.is_on or self.forks != steps.forks:
                    return
                end = path.end_mark() if path.held_steps is None else HostTime(path.now_ns())  # as in __enter__
                while root.parent is not None:
                    root = root.parent
                flags = (CANCELLED_PLAIN if self._cancelled else FLAG_PLAIN) | (FLAG_FAILED if failed else 0)
                scope = root.children.get(self.key) or steps.scopes.define(root, self.key)
                start = self._start if self._start_ns is None else HostTime(self._start_ns)
                if self._cancelled or (position.scope is self._inside and self._inside.parent is not None):
                    self._emit(scope, start, end, flags, self._inside_at(position))
                else:
                    path.emit_step(scope, start, end, self.tokens, flags, self.sequences, self.cached)
            elif scope is not None:
                try:
                    end = path.end_mark()
                finally:
                    held, position.held = position.held, self._outer_held
                    position.leave(scope)  # back to where the step began, or to the root if the outer step has ended
                    if position.scope.parent is None and (self.outer is None or self.outer.position is not None):
                        path.enter(position, self._inside, 0)
                    position.lane = 0 if outer is None else outer.lane or 0
                self._record_inside(position, scope, held, end, lane, failed)
        except Exception as trouble:  # noqa: BLE001 - an error of cbtop or a clock must not reach the host
            self._steps.give_up(trouble)
        finally:
            if mark is not None:
                self._mark = None
                try:
                    if self._scope is not None:
                        governor.left(self, mark)
                    if kind is None:
                        now_ns = clock.perf_counter_ns()
                        own_ns = self.own_ns + now_ns - ending_ns + governor.told_ns
                        governor.ended(self._name or "", self._model, now_ns - self._begun_ns, mark, own_ns)
                        told_ns = clock.perf_counter_ns() - now_ns
                        if governor.has_looked:
                            governor.look_ns = told_ns
                        else:
                            governor.told_ns = told_ns
                except Exception as trouble:  # noqa: BLE001 - an error of cbtop or a clock must not reach the host
                    self._steps.give_up(trouble)

    _begun_ns: int  # only set if there is a governor
    outer: Any  # the innermost step around this step, or None
    _is_outermost: bool  # True if no other step of this process is around this one
    _is_plain: bool  # True if the step's bricks are not recorded (a plain step)
    forks: int  # number of forks when the step began; it is higher in a child

    def _record_inside(
        self, position: Position, scope: Scope, held: list[HeldRecord] | None, end: Any, lane: int, failed: bool
    ) -> None:
        """Record a step and its bricks, or keep it until the device has reported their times."""
        path = self._steps.path
        if path.recording:
            flags = (FLAG_FAILED if failed else 0) | (FLAG_CANCELLED if self._cancelled else 0)
            start = self._start if self._start_ns is None else HostTime(self._start_ns)
            if path.held_steps is not None and held is not None:
                self._hold(path.held_steps, position, scope, held, start, end, flags)
            else:
                if scope.key == UNNAMED:
                    scope = self._give_name(scope, held or [], lane)
                elif scope.key != self.key:  # the step was renamed while a brick ran inside it
                    path.emit(scope, None, self._start, end, 0, lane | FLAG_CANCELLED)
                    scope = self._named(scope.parent)
                inside = self._inside_at(position)
                if self._waits:
                    self._ended = Ended(scope, start, end, lane | flags, inside)
                else:
                    self._emit(scope, start, end, lane | flags, inside)
        if not isinstance(self._ended, Ended):
            self.lane = None  # last, because the lines above still need the lane
        if self._is_outermost:
            path.step_ended()
            self._steps.flush()

    def _inside_at(self, position: Position) -> Inside | None:
        """Return the call around this step. None if it ran outside of calls, or if `position` has moved."""
        if position.scope is self._inside and self._inside.parent is not None:
            return self._named(self._inside), position, position.lane
        return None

    def _hold(
        self,
        held_steps: HeldSteps,
        position: Position,
        scope: Scope,
        held: list[HeldRecord],
        start: Any,
        end: Any,
        flags: int,
    ) -> None:
        """Keep the ended step until the device has reported its times."""
        amounts = HostTime(amount_of(self.sequences)), HostTime(amount_of(self.cached))
        kept = HeldStep(
            self, self.key, scope, held, self._start, start, end, self.tokens, flags, amounts, waits=self._waits
        )
        self._ended = kept if self._waits else None
        held_steps.add(kept)
        inside = self._inside_at(position)
        if inside is not None:
            outer, position, lane = inside
            self._steps.path.emit(outer, position, self._start, end, self.tokens, lane)

    def _emit(self, scope: Scope, start: Any, end: Any, flags: int, inside: Inside | None) -> None:
        """Record this step, its sequences and cached positions. Inside a call, also record its time there."""
        path, is_known = self._steps.path, not self._cancelled
        sequences, cached = (self.sequences, self.cached) if is_known else (None, None)
        path.emit_step(scope, start, end, self.tokens, flags, sequences, cached)
        if inside is not None:
            outer, position, lane = inside
            path.emit(outer, position, self._start, end, self.tokens, lane)

    def leave_to_parent(self) -> None:
        """In a forked child, do not record this step and the work adopted for it, because both are the parent's."""
        _let_go(self.adopted)
        self._scope = self.lane = self._ended = None

    def _rename(self) -> None:
        """If this step was renamed, go on under the new name. Its earlier time stays under the old name."""
        position, scope = self.position, self._scope
        if position is None or scope is None or scope.key in (UNNAMED, self.key) or position.scope is not scope:
            return
        path = self._steps.path
        try:
            position.leave(scope)
            path.emit(scope, None, self._start, path.end_mark(), 0, (self.lane or 0) | FLAG_CANCELLED)
            self._scope = self._named(scope.parent)
            path.enter(position, self._scope, path.now_ns())
        except Exception as error:  # noqa: BLE001 - an error of cbtop or a clock must not reach the host
            self._steps.give_up(error)

    def _named(self, outer: Any) -> Scope:
        found: Scope = outer.children.get(self.key) or self._steps.scopes.define(outer, self.key)
        return found

    def _give_name(self, unnamed: Scope, held: list[HeldRecord], lane: int) -> Scope:
        """Record the calls that waited for this step's name. Returns the scope under this name."""
        path = self._steps.path
        places = NamedScopes(self._steps.scopes, unnamed, self.key)
        for scope, start, end, elements, flags in held:
            path.emit(places.of(scope), None, start, end, elements, flags | lane)
        return places.named
