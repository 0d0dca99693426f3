"""Calls a function after the host has imported a certain module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from cbtop.profiler.instrument.trouble import log_own_error


def once_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module `name` has been imported, or now if it is imported already."""
    if name in sys.modules:
        then()
        return
    for finder in sys.meta_path:
        if isinstance(finder, _Finder) and finder.name == name:
            finder.then.append(then)
            return
    sys.meta_path.insert(0, _Finder(name, then))


def stop_awaiting(name: str = "") -> None:
    """Stop waiting for the module `name`, or for all modules if `name` is empty."""
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not isinstance(finder, _Finder) or name not in ("", finder.name)
    ]


class _Finder:
    """An import finder that calls `then` after the module `name` was imported.

    The other finders find the module. For this one import, `exec_module` of their loader is replaced.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = [then]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        for finder in sys.meta_path:
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                try:
                    self._follow(spec.loader)
                except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                    log_own_error(error, f"{name} is not followed")
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        if loader is None or "exec_module" in vars(loader):
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                for then in self.then:
                    try:
                        then()
                    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                        log_own_error(error, f"{self.name} is not followed")

        loader.exec_module = exec_module
