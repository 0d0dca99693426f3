"""Times functions of the host while the calls of a model's modules are timed.

Rules
- Function objects keep their identity, hash, name, pickle, signature and source. A plain function gets a different
  `__code__` (trampolines.py), a builtin function a different vectorcall. A function in a closure cell, or a method of
  a C++ class, is replaced in its cell or class.
- Functions are timed from the begin of a recorded step until a step begins that is not recorded.
- Dynamo guards on `__code__`. So plain functions keep the host's code once Dynamo compiles or has compiled. It then
  compiles the same graphs as without cbtop.
- A value that the host has replaced in the meantime is not touched.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, MutableMapping
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from cbtop.profiler.instrument.awaited import once_imported, stop_awaiting
from cbtop.profiler.instrument.trampolines import copy_of, traceable_trampoline_of, trampoline_of

if TYPE_CHECKING:
    from weakref import ref

    from cbtop.profiler.hot_path import HotPath
    from cbtop.profiler.instrument.capturing import Capture
    from cbtop.profiler.instrument.eager_stamps import Timing
    from cbtop.profiler.path import Path

DYNAMO = "torch._dynamo"
# model whose calls are timed now -> the object that times these calls
swapped_in: dict[ref[Any], HotPath | Path | Timing | Capture] = {}
Function = Callable[..., Any]


def held(owner: Any, name: str) -> Any:
    """Return the attribute `name` of `owner` itself, not of a base class. If `owner` is a closure cell, return its
    contents.
    """
    if isinstance(owner, CellType):
        return owner.cell_contents
    return owner.get(name) if isinstance(owner, MutableMapping) else vars(owner).get(name)


class SwapTarget(Protocol):
    """A function of the host. It can be replaced by a function that times its calls."""

    is_seen_by_dynamo: bool  # whether Dynamo (torch's compiler) would notice the replacement

    def is_of(self, function: Any) -> bool:
        """Return whether `function` is this function of the host, or its replacement."""

    def put(self) -> None:
        """Start timing calls of the function."""

    def take(self) -> None:
        """Stop timing the calls, and restore the host's function."""


class TimedFunction:
    """A plain Python function.

    While it is timed, its calls run `wrapper(copy)`, where `copy` is a copy of the function. With `traceable`, Dynamo
    can compile it even then.
    """

    is_seen_by_dynamo = True

    def __init__(
        self, function: FunctionType, wrapper: Callable[[Function], Function], *, traceable: bool = False
    ) -> None:
        make = traceable_trampoline_of if traceable else trampoline_of
        self._function = function
        self._own = function.__code__
        self._ours = make(function, wrapper(copy_of(function)))

    def is_of(self, function: Any) -> bool:
        return function is self._function

    def put(self) -> None:
        if self._function.__code__ is self._own:
            self._function.__code__ = self._ours

    def take(self) -> None:
        if self._function.__code__ is self._ours:
            self._function.__code__ = self._own


class TimedEntry:
    """A function in a closure cell or a class.

    While it is timed, the cell or class contains `wrapper(function)` instead.
    """

    is_seen_by_dynamo = True

    def __init__(self, owner: Any, name: str, function: Any, wrapper: Callable[[Function], Function]) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._ours = wrapper(function)

    def is_of(self, function: Any) -> bool:
        return function is self._function or function is self._ours

    def put(self) -> None:
        self._set(self._ours, self._function)

    def take(self) -> None:
        self._set(self._function, self._ours)

    def _set(self, there: Any, instead: Any) -> None:
        if held(self._owner, self._name) is instead:
            setattr(self._owner, self._name, there)


class TimedBuiltin:
    """A builtin function with the flags METH_VARARGS | METH_KEYWORDS. Needs the compiled hot path."""

    is_seen_by_dynamo = False

    def __init__(self, function: Any, call_of: Callable[[Function], Any]) -> None:
        from cbtop.profiler import _hot_path

        self._function = function
        self._time = _hot_path.time_builtin
        self._call = call_of(_hot_path.copy_builtin(function))

    def is_of(self, function: Any) -> bool:
        return function is self._function

    def put(self) -> None:
        self._time(self._function, self._call)

    def take(self) -> None:
        self._time(self._function, None)


class Swaps:
    """The functions of this process that are timed together with the calls of a model."""

    def __init__(self) -> None:
        # Models may share modules, so this lock also protects the swapping of modules' calls. A signal handler of the
        # host may call a model while cbtop holds the lock, so it is reentrant.
        self.lock = threading.RLock()
        self._functions: list[SwapTarget] = []  # oldest first
        # Whether all functions are replaced now. None: perhaps only some.
        self._are_in: bool | None = False
        self._stay_out = False
        self._watched: Any = None  # Dynamo's list of callbacks that it calls before it compiles

    def add(self, function: SwapTarget) -> None:
        """Add a function. If calls of a model are being timed, start timing it."""
        with self.lock:
            if not self._functions:
                once_imported(DYNAMO, self._watch)
            self._functions.append(function)
            if self._are_in is not False and self._may_be_in(function):
                function.put()

    def has(self, function: Any) -> bool:
        """Return whether `function` was added before."""
        return any([one.is_of(function) for one in self._functions])

    def clear(self) -> None:
        """Restore all functions of the host, and drop them."""
        with self.lock:
            self._swap(False)
            self._functions.clear()
            self._stay_out = False
            if self._watched is not None and self._compiles in self._watched:
                self._watched.remove(self._compiles)
            self._watched = None
            stop_awaiting(DYNAMO)

    def swap_in(self, model: ref[Any], times: HotPath | Path | Timing | Capture) -> None:
        """Start timing the calls of `model` and the functions of the host."""
        with self.lock:
            swapped_in[model] = times
            if self._watched is not None and self._compiles not in self._watched:
                # The host has reset Dynamo, which has dropped its callbacks.
                self._stay_out, self._are_in = True, None
            if self._are_in is not True:
                self._swap(True)

    def swap_out(self, model: ref[Any]) -> None:
        """Stop timing the calls of `model`. If no other model is timed, restore the functions."""
        with self.lock:
            swapped_in.pop(model, None)
            if self._are_in is not False and not swapped_in:
                self._swap(False)

    def _swap(self, are_in: bool) -> None:
        self._are_in = None
        for one in self._functions if are_in else reversed(self._functions):
            one.put() if are_in and self._may_be_in(one) else one.take()
        self._are_in = are_in

    def _may_be_in(self, function: SwapTarget) -> bool:
        return not (self._stay_out and function.is_seen_by_dynamo)

    def _watch(self) -> None:
        """Make Dynamo call `_compiles` when it begins to compile. Dynamo must have been imported."""
        dynamo: Any = sys.modules[DYNAMO]
        self._watched = getattr(getattr(dynamo, "callback_handler", None), "start_callbacks", None)
        frames = getattr(sys.modules.get(f"{DYNAMO}.utils"), "counters", {}).get("frames")
        if self._watched is None or frames:
            self._compiles()
        if self._watched is not None:
            self._watched.append(self._compiles)

    def _compiles(self, *_: Any) -> None:
        with self.lock:
            self._stay_out = True
            if self._are_in is not False:
                self._swap(True)


swaps = Swaps()
