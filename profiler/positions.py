"""The running unit: each thread, asyncio or trio task and greenlet has a position of its own in the graph.

Otherwise tasks that take turns in one thread would nest: one would be inside a call that another had begun. A task or
greenlet that is started inside a step begins outside of it, because the step may end before it does.
"""

from __future__ import annotations

import sys
from _thread import _local as thread_local  # not threading.local, which gevent replaces
from collections.abc import Callable
from typing import TypeVar
from weakref import ref

Position = TypeVar("Position")


def running_unit() -> object | None:
    """Return the asyncio task, trio task or greenlet that runs now, or None if it is the thread itself.

    A greenlet inside a task (as SQLAlchemy makes them) belongs to the task, which waits for it.
    """
    modules = sys.modules
    asyncio = modules.get("asyncio")
    if asyncio is not None:
        loop = getattr(asyncio, "_get_running_loop", _no_unit)()  # not there while asyncio is being imported
        task: object | None = asyncio.current_task(loop) if loop is not None else None
        if task is not None:
            return task
    trio = modules.get("trio")
    # This is checked first if possible (trio 0.23), because an exception costs five times as much.
    if trio is not None and getattr(getattr(trio, "lowlevel", None), "in_trio_run", _is_possible)():
        try:
            running: object = trio.lowlevel.current_task()
        except (RuntimeError, AttributeError):  # outside of trio, or while it is being imported
            pass
        else:
            return running
    greenlets = modules.get("greenlet")
    if greenlets is not None:
        greenlet = getattr(greenlets, "getcurrent", _no_unit)()
        if greenlet is not None and greenlet.parent is not None:  # the one without a parent is the thread's own
            return greenlet  # type: ignore[no-any-return]
    return None


def finder(make: Callable[[], Position]) -> Callable[[], Position]:
    """Return a function that gives the caller its position; `make` makes a new one.

    A position lives as long as its thread, task or greenlet.
    """
    of_thread = thread_local()
    # Not a WeakKeyDictionary: it runs Python code when a task goes, and a signal handler's exception is lost there.
    of_unit: dict[ref[object], Position] = {}
    modules = sys.modules
    # Python's hot path calls this at every brick. If no module was loaded since the last call, and no loop runs,
    # there are only threads: that takes 190 ns instead of 450, compared with 95 for a clock read.
    modules_seen = 0
    has_others = False
    running_loop: Callable[[], object] = _no_unit

    def find() -> Position:
        nonlocal modules_seen, has_others, running_loop
        if len(modules) != modules_seen:
            modules_seen = len(modules)
            has_others = "greenlet" in modules or "trio" in modules
            # It is not there while asyncio is being imported.
            running_loop = getattr(modules.get("asyncio"), "_get_running_loop", _no_unit)
        if has_others or running_loop() is not None:
            unit = running_unit()
            if unit is not None:
                try:
                    position = of_unit.get(ref(unit))
                    if position is None:
                        position = of_unit[ref(unit, of_unit.pop)] = make()
                except TypeError:  # a custom task without weak references: its thread represents it
                    position = None
                if position is not None:
                    return position
        try:
            mine: Position = of_thread.position
        except AttributeError:
            mine = of_thread.position = make()
        return mine

    return find


def _no_unit() -> None:
    return None


def _is_possible() -> bool:
    return True
