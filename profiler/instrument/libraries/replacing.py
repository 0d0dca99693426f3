"""Puts timed calls into functions of a library, and restores the functions.

Objects keep their identity, type, name, pickle and signature. A ufunc, a dispatcher of NumPy or a function of Cython
gets a different vectorcall, which needs the compiled `_vectorcalls`. A function written in Python gets a different
code (trampolines.py), which adds a frame to the stack. Without the compiled part, dispatchers get it in the function
that they call for NumPy's own arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from cbtop.profiler.instrument.libraries.functions import LibraryFunction
from cbtop.profiler.instrument.trampolines import copy_of, is_plain, trampoline_of

Timed = Callable[[Callable[..., Any]], Callable[..., Any]]


class ReplacedCode:
    """A function written in Python, with a different code. `target` is itself or its dispatcher."""

    def __init__(self, target: Any, function: FunctionType, timed: Timed) -> None:
        self.target = target
        self._function = function
        self._own = function.__code__
        self._ours = trampoline_of(function, timed(copy_of(function)))
        function.__code__ = self._ours

    @property
    def small(self) -> int:
        """The number of calls that were too small to be timed."""
        return 0

    def restore(self) -> None:
        """Restore the host's code, unless the host has changed it."""
        if self._function.__code__ is self._ours:
            self._function.__code__ = self._own


class ReplacedVectorcall:
    """An object with a different vectorcall. Raises ImportError without the compiled part, or TypeError if the object
    has no vectorcall.
    """

    def __init__(self, target: Any, timed: Timed, smallest: int) -> None:
        from numpy import ndarray

        from cbtop.profiler import _vectorcalls as compiled

        self.target = target
        self._compiled = compiled
        self._before = compiled.small_calls(target)
        compiled.redirect(target, timed(compiled.own_call(target)), smallest, ndarray)

    @property
    def small(self) -> int:
        """The number of calls that were too small to be timed."""
        return self._compiled.small_calls(self.target) - self._before

    def restore(self) -> None:
        """Restore the host's vectorcall."""
        self._compiled.restore(self.target)


Replaced = ReplacedCode | ReplacedVectorcall


def found(row: LibraryFunction) -> Any:
    """Return the function of a row that can be replaced, or None if the module has no such function."""
    target: Any = sys.modules.get(row.module)
    for name in row.path.split("."):
        if target is None:
            return None
        if isinstance(target, type):
            target = next((vars(base)[name] for base in target.__mro__ if name in vars(base)), None)
        else:
            target = getattr(target, name, None)
    return target


def replace_calls(target: Any, row: LibraryFunction, timed: Timed) -> Replaced | None:
    """Time the calls of `target`, the function of `row`. Returns None if they cannot be timed."""
    if is_plain(target):
        return ReplacedCode(target, target, timed)
    try:
        return ReplacedVectorcall(target, timed, row.smallest)
    except (ImportError, TypeError):  # without the compiled part, or an object that is called in another way
        implementation: Any = getattr(target, "_implementation", None)
        return ReplacedCode(target, implementation, timed) if is_plain(implementation) else None
