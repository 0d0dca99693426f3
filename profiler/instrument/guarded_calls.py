"""Calls modules so that the guard sees their arguments and results."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument.guard_flags import GuardedRun
from cbtop.profiler.instrument.guard_padding import Hiding
from cbtop.profiler.instrument.wrapping import CallWrapper

if TYPE_CHECKING:
    from collections.abc import Hashable


class CallGuard(Protocol):
    """The parts of the guard that a `GuardedCall` uses. No method may raise, except an error of the host's signal
    handler.
    """

    @property
    def is_gone(self) -> bool: ...

    def before(
        self, call: GuardedCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> GuardedRun | None: ...

    def after(self, run: GuardedRun, result: Any) -> None: ...


class GuardedCall(CallWrapper):
    """Calls a module between `before` and `after`.

    It calls the timing wrapper of the module, so the guard's time is not part of the module's time. If the hot path
    is compiled, C code does the same.
    """

    __slots__ = ("_guard", "hiding", "key")

    def __init__(self, module: nn.Module, key: Hashable, guard: CallGuard) -> None:
        super().__init__(module)
        self._guard = weakref.ref(guard)
        self.key = key  # the key of the brick or layer
        self.hiding = Hiding.BY_SHAPE

    @property
    def is_gone(self) -> bool:
        guard = self._guard()
        return guard is None or guard.is_gone

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> GuardedRun | None:
        """Look at the arguments of a call. Returns None if no step is being checked."""
        guard = self._guard()
        return None if guard is None else guard.before(self, args, kwargs)

    def after(self, run: GuardedRun, result: Any) -> None:
        """Look at the result of a call. `run` was returned by `before`."""
        guard = self._guard()
        if guard is not None:
            guard.after(run, result)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.plain(*args, **kwargs)
        run = self.before(args, kwargs)
        result = self.plain(*args, **kwargs)
        if run is not None:
            self.after(run, result)
        return result


if chosen() is not HotPath:
    from cbtop.profiler import _hot_path

    _hot_path.compile_guarded_calls(GuardedCall)
