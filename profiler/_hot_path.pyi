# The compiled hot path has the Python one's types.
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from cbtop.profiler.hot_path import HotPath as HotPath
from cbtop.profiler.hot_path import Position as Position
from cbtop.profiler.hot_path import Scope as Scope
from cbtop.profiler.hot_path import Span as Span
from cbtop.profiler.instrument.open_step import OpenStep
from cbtop.profiler.instrument.phases import Call
from cbtop.profiler.instrument.steps import ModelSteps

class KnownCall:
    definition: object
    step: Any
    brick: Any
    flops: int
    bytes: int
    def __init__(self, definition: object, flops: int, bytes: int, /) -> None: ...
    def set_scopes(self, step: Scope, brick: Scope, /) -> None: ...

class LibraryCall:
    small: int
    def __init__(
        self,
        hot_path: HotPath,
        own: Callable[..., Any],
        mark: object,
        recorded: Callable[..., KnownCall | None],
        say_small: Callable[[], None],
        parts: tuple[str, ...],
        array_type: type,
        small_ns: int,
        key_from: int,
        /,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

Function = TypeVar("Function", bound=Callable[..., Any])

def compile_module_calls(
    type: type, elements_of: Callable[..., object], kind: type, is_overridden: Callable[[Any], bool], /
) -> None: ...
def compile_guarded_calls(type: type, /) -> None: ...
def compile_function_calls(
    type: type,
    definition: type,
    swapped_in: dict[Any, Any],
    hiding: frozenset[str],
    modes: Callable[[], int],
    /,
) -> None: ...
def compile_slot(
    type: type,
    standing: dict[int, Any],
    name: str,
    missed: Callable[[Any], Any],
    is_tracing: Callable[[], bool],
    failed: Callable[[Exception], None],
    code: CodeType,
    /,
) -> None: ...
def call_after(prepared: Callable[[Any, Any], Any], look: Any, module: Any, /) -> Any: ...
def count_operations(mode: Any, /) -> Callable[..., Any]: ...
def copy_builtin(function: Any, /) -> Any: ...
def time_builtin(function: Any, call: Any, /) -> None: ...
def compile_model_calls(types: tuple[type, ...], lent: dict[str, object], /) -> None: ...
def compile_wrapper(function: Function, /) -> Function: ...
def compile_generation(wrapper: Function, /) -> Function: ...
def begin_run(steps: ModelSteps, call: Call, called_ns: int, /) -> OpenStep | None: ...
def end_run(open_step: OpenStep, returned_ns: int, /) -> bool: ...
