"""Times the calls of numerical libraries: NumPy, SciPy, scikit-learn, CuPy. Each function of a table is a brick."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from cbtop.profiler.instrument.libraries.session import TimedLibraries, active, instrumented, library_of
from cbtop.profiler.profiler import BrickProfiler


def instrument(
    *modules: ModuleType | str, profiler: BrickProfiler | None = None, residuals: bool = False
) -> TimedLibraries:
    """Time the calls of NumPy, SciPy, scikit-learn or CuPy from now on: `cbtop.instrument(numpy, "scipy")`.

    Each function in the table of a library becomes a brick. A call outside of steps is a step. To make the iteration
    of a loop a step, write `with cbtop.step("frame"):`. To stop, call `stop()` of the result, or use the result in a
    `with` statement. Makes a new profiler if `profiler` is None. With `residuals`, results of solvers,
    decompositions, FFTs and normal random numbers are checked, which costs up to 1 % of the time.

    Raises ValueError if a library has no table, or if libraries are already timed by a different profiler.
    """
    now = active()
    if now is not None and profiler is not None and now.profiler is not profiler:
        raise ValueError("libraries are already timed by a different profiler; call `stop()` of it first")
    return instrumented(
        map(library_of, modules), lambda: BrickProfiler() if profiler is None else profiler, residuals=residuals
    )


def step(name: str) -> AbstractContextManager[Any]:
    """Return a context manager for one step of a loop: `with cbtop.step("frame"):`.

    The calls of timed libraries inside it are its bricks. If no libraries are timed, it does nothing.
    """
    now = active()
    return nullcontext() if now is None else now.profiler.step(name)
