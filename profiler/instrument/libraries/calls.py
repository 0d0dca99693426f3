"""Times the calls of one library function.

Rules
- Calls inside a timed call are a part of it, and are not timed. This includes the calls of its callbacks.
- A call outside of steps is a step of its own, with the phase CALL and one brick. A call inside a step is a brick of
  this step.
- A call that takes less than SMALL_NS is only counted. It leaves no record.
- Work depends on the shapes of the arguments. It is computed once for each combination of shapes.
- If cbtop's code fails, recording ends, and the host's function runs unchanged.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.libraries.amounts import NOTHING_KNOWN
from cbtop.profiler.instrument.libraries.functions import KeyFrom, LibraryFunction
from cbtop.protocol.attributes import Work
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_FAILED, NO_NODE, UNKNOWN_AMOUNT
from cbtop.protocol.signals import reraise_host_error
from cbtop.protocol.vocabulary import CALL, BrickCategory, NodeKind

if TYPE_CHECKING:
    from cbtop.profiler.hot_path import Position, Scope
    from cbtop.profiler.profiler import BrickProfiler

SMALL_NS = 10_000  # calls that take less are counted; the wrapper takes about 1 us, a tenth of it
MAX_AMOUNT = 1 << 62  # the largest amount of a record
MAX_KNOWN = 1024  # combinations of shapes of one function; if there are more, all are forgotten
FIRST_SAID = 1024  # number of small calls of a function that is announced first
_PLAIN = (bool, int, float, complex, str)  # values of these types may be kept in a key
_REAL = {"complex64": "float32", "complex128": "float64", "complex256": "float128"}


class LibraryBrick(BrickDefinition):
    """The brick of a library function. Calls inside such a brick are not timed."""

    __slots__ = ()


class PlainKnownCall:
    """The brick and the work of calls with the same key, and their scopes outside of steps. KnownCall without C."""

    __slots__ = ("brick", "bytes", "definition", "flops", "step")

    def __init__(self, definition: LibraryBrick, flops: int, moved_bytes: int, /) -> None:
        self.definition = definition
        self.flops = flops
        self.bytes = moved_bytes
        self.step: Any = None
        self.brick: Any = None

    def set_scopes(self, step: Any, brick: Any, /) -> None:
        """Set the scopes of a call outside of steps."""
        self.step, self.brick = step, brick


class LibraryCalls:
    """The calls of the function in `row`, which belongs to a library called `backend`.

    `first_call` is called before the first
    step, and `say_small` after FIRST_SAID small calls, and each time that their number has doubled.
    """

    def __init__(
        self,
        row: LibraryFunction,
        backend: str,
        profiler: BrickProfiler,
        first_call: Callable[[], None],
        say_small: Callable[[], None],
    ) -> None:
        self.row = row
        self.backend = backend
        self._small = 0
        self._compiled: Any = None  # the LibraryCall, if the hot path is compiled
        self._make_known: Callable[..., Any] = PlainKnownCall
        self._profiler = profiler
        self._parts = profiler.parts
        self._path = profiler.parts.paths.host
        self._record = profiler.parts.recorder
        self._first_call = first_call
        self._say_small = say_small
        self._known: dict[Any, Any] = {}
        self._definitions: dict[tuple[str, str], LibraryBrick] = {}

    @property
    def small(self) -> int:
        """The number of small calls that were timed."""
        return self._small if self._compiled is None else int(self._compiled.small)

    def timed(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callable that calls `own` and times the call."""
        hot: Any = self._path.hot_path
        mark = LibraryBrick(self.row.name, BrickCategory.OTHER)
        if hot.implementation != "compiled":
            return self._timed_in_python(own, mark)
        from numpy import ndarray

        from cbtop.profiler import _hot_path

        self._make_known = _hot_path.KnownCall
        row = self.row
        self._compiled = _hot_path.LibraryCall(
            hot, own, mark, self._recorded, self._say_small, row.parts, ndarray, SMALL_NS, int(row.key_from)
        )
        compiled: Callable[..., Any] = self._compiled
        return compiled

    def _timed_in_python(self, own: Callable[..., Any], mark: LibraryBrick) -> Callable[..., Any]:
        path, hot, steps = self._path, self._path.hot_path, self._parts.steps
        enter, now_ns, recorded = path.enter, path.now_ns, self._recorded
        inside: Any = None  # the scope of calls that run now; it has no node, so that small calls define none

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            position = hot.position
            outer = position.scope
            if type(outer.key) is LibraryBrick or not (steps.is_on and position.recording):
                return own(*args, **kwargs)
            if inside is None or inside.parent is not outer:
                inside = type(outer)(mark, NO_NODE, outer, None)
            entered, start_ns = inside, now_ns()
            enter(position, entered, start_ns)
            result, has_failed = None, True
            try:
                result = own(*args, **kwargs)
                has_failed = False
                return result
            finally:
                end_ns = now_ns()
                if end_ns - start_ns < SMALL_NS:
                    self._count_small()
                elif position.scope is entered:  # else this is a forked child, or a step has ended inside
                    recorded(position, outer, start_ns, end_ns, args, kwargs, result, has_failed)
                position.leave(entered)

        return call

    def _count_small(self) -> None:
        self._small += 1
        if self._small >= FIRST_SAID and self._small & (self._small - 1) == 0:
            self._say_small()

    def _recorded(
        self,
        position: Position,
        outer: Scope,
        start_ns: int,
        end_ns: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        result: Any,
        has_failed: bool,
    ) -> Any:
        """Record a call. Returns what is known of such calls, or None. No error of cbtop reaches the host."""
        try:
            kwargs = kwargs or {}
            known = self._known_of(args, kwargs, result, has_failed)
            flags = FLAG_FAILED if has_failed else 0
            if outer.parent is None:
                step, brick = known.step, known.brick
                if step is None:
                    step, brick = self._scopes_of(known, outer)
                self._write_step(step.node | flags, brick.node | flags, start_ns, end_ns, known)
                self._record.flush()
            else:
                self._write_part(position, outer, start_ns, end_ns, flags, known)
            if self.row.checks and not has_failed:
                self._profiler.check(known.definition, result, *args, **kwargs)
                return None  # so that Python sees the next call
            return known
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._path.give_up(error)
            return None

    def _write_step(self, step: int, brick: int, start_ns: int, end_ns: int, known: Any) -> None:
        """Record a call that is a step of its own."""
        record = self._record.record
        # The records of two threads must not mix, because a step has the records before it.
        with _writing:
            record(brick, start_ns, end_ns, 1)
            record(brick | FLAG_AMOUNTS, known.flops, known.bytes, 0)
            record(step, start_ns, end_ns, 0)

    def _write_part(
        self, position: Position, outer: Scope, start_ns: int, end_ns: int, flags: int, known: Any
    ) -> None:
        """Record a call inside a step or another brick."""
        scope: Any = outer.children.get(known.definition) or self._parts.scopes.define(outer, known.definition)
        flags |= position.lane
        if scope.node > NO_NODE:
            with _writing:
                self._record.record(scope.node | flags, start_ns, end_ns, 1)
                self._record.record(scope.node | flags | FLAG_AMOUNTS, known.flops, known.bytes, 0)
        else:  # the step has no name yet
            self._path.emit(scope, position, start_ns, end_ns, 1, flags)

    def _scopes_of(self, known: Any, root: Any) -> tuple[Any, Any]:
        """Return the scopes of a step and its brick outside of steps. New ones are defined."""
        self._first_call()
        define, key = self._parts.scopes.define, (NodeKind.STEP, CALL)
        step = root.children.get(key) or define(root, key)
        brick = step.children.get(known.definition) or define(step, known.definition)
        known.set_scopes(step, brick)
        return step, brick

    def _known_of(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, has_failed: bool) -> Any:
        try:
            key = None if has_failed else self._key(args, kwargs, result)
            known = None if key is None else self._known.get(key)
        except TypeError:  # an argument is neither an array nor a plain value
            key = known = None
        if known is None:
            known = self._learn(args, kwargs, result, has_failed)
            if key is not None:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = known
        return known

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Return what decides the work of a call. None: nothing that is known before it."""
        match self.row.key_from:
            case KeyFrom.NOTHING:
                return None
            case KeyFrom.RESULT:
                return self._part(result)
            case _:
                named = [(name, self._part(one)) for name, one in kwargs.items()] if kwargs else ()
                return *map(self._part, args), *named

    def _part(self, value: Any) -> Any:
        """Return the shape and type of an array, the parts of an object, or any other value itself."""
        parts = self.row.parts
        if parts and hasattr(value, parts[0]) and not hasattr(value, "strides"):
            return type(value), *[getattr(getattr(value, part), "shape", None) for part in parts], value.shape
        if isinstance(value, _ndarray()):
            return value.shape, value.dtype, tuple([not stride for stride in value.strides])
        if type(value) is tuple:
            return tuple(map(self._part, value))
        if value is None or type(value) in _PLAIN:
            return type(value), value
        raise TypeError("a key would keep an object of the host")

    def _learn(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, has_failed: bool) -> Any:
        flops, moved_bytes = NOTHING_KNOWN
        if not has_failed and not any([_is_foreign(one) or _has_objects(one) for one in args]):
            try:
                flops, moved_bytes = self.row.amounts(args, kwargs, result)
            except Exception as error:  # noqa: BLE001 - arguments that the table does not know; their work is unknown
                reraise_host_error(error)
        name = self.row.name.format(type(args[0]).__name__) if self.row.by_class else self.row.name
        dtype = _dtype_of(args, result)
        definition = self._definitions.get((name, dtype))
        if definition is None:
            work = Work(dtype=_REAL.get(dtype, dtype))
            definition = self._definitions[name, dtype] = LibraryBrick(
                name, BrickCategory.OTHER, backend=self.backend, work=work, label=dtype, checks=self.row.checks
            )
        return self._make_known(definition, _amount(flops), _amount(moved_bytes))


_writing = threading.RLock()  # reentrant, because a signal handler of the host may call a library


def _after_fork() -> None:
    global _writing
    _writing = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _has_objects(value: Any) -> bool:
    """Return whether an array has Python objects. Their work is unknown."""
    return getattr(getattr(value, "dtype", None), "kind", "") == "O"


def _is_foreign(value: Any) -> bool:
    """Return whether NumPy hands a call with this argument over to a different library, such as CuPy."""
    function = getattr(type(value), "__array_function__", None)
    return function is not None and function is not _own_function()


@functools.cache
def _own_function() -> Any:
    return _ndarray().__array_function__


@functools.cache
def _ndarray() -> Any:
    from numpy import ndarray

    return ndarray


def _dtype_of(args: Sequence[Any], result: Any) -> str:
    """Return the type of the numbers of a call, or "" if it has no array."""
    results = result if isinstance(result, tuple) else (result,)
    for one in (*results, *args):
        dtype = getattr(one, "dtype", None)
        if dtype is not None and getattr(dtype, "kind", "") in "fc":
            return str(dtype)
    return next((str(one.dtype) for one in (*args, *results) if hasattr(one, "dtype")), "")


def _amount(value: float | None) -> int:
    return UNKNOWN_AMOUNT if value is None or not 0 <= value < MAX_AMOUNT else round(value)
