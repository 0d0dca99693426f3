"""Makes a decorator that times every call of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cbtop.profiler.definitions import BrickDefinition
from cbtop.protocol import clock
from cbtop.protocol.signals import reraise_host_error

if TYPE_CHECKING:
    from cbtop.profiler.brick_checks import BrickChecks
    from cbtop.profiler.graph_recorder import Brick
    from cbtop.profiler.path import Path

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def timed(
    path: Path,
    brick: Brick,
    elements: int | Callable[Arguments, int],
    checks: BrickChecks,
    check: Callable[[BrickDefinition, Any, tuple[Any, ...], dict[str, Any]], None],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator that times each call as `brick` (see `BrickProfiler.timed`).

    If the definition has checks, each recorded call is followed by `check`, with the definition, the result, and the
    call's arguments and keywords. It is not called while `checks` have used up their share of the time.
    """
    checked = brick if isinstance(brick, BrickDefinition) and brick.checks else None
    # Most calls are not checked. A call of `checks.is_due` would double their cost.
    past_first, now_ns = checks.past_first, clock.perf_counter_ns

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        name = getattr(function, "__name__", type(function).__name__)
        called = (function, type(function).__call__)
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_kind(one) for is_kind in kinds for one in called):
            raise TypeError(f"{name} runs in pieces; time them with `with profiler.brick(...)` inside")

        @functools.wraps(function)
        def timed_function(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if not path.recording:
                return function(*args, **kwargs)
            count: Any = elements
            if callable(elements):
                try:
                    count = elements(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - if counting the elements fails, the call must still end
                    reraise_host_error(error)
                    count = error
            with path.brick(brick, count):
                result = function(*args, **kwargs)
            if checked is not None and (checked not in past_first or now_ns() > checks.due_ns) and path.recording:
                check(checked, result, args, kwargs)
            return result

        setattr(timed_function, "__brick__", brick)  # noqa: B010 - `cbtop verify` reads it; mypy knows no such name
        return timed_function

    return decorate
