# The compiled hot path has the Python one's types.
from collections.abc import Callable
from typing import Any

from cbtop.profiler.hot_path import HotPath as HotPath
from cbtop.profiler.hot_path import Position as Position
from cbtop.profiler.hot_path import Scope as Scope
from cbtop.profiler.hot_path import Span as Span

def compile_module_calls(type: type, elements_of: Callable[..., object], kind: type, /) -> None: ...
def compile_function_calls(type: type, swapped_in: dict[Any, Any], /) -> None: ...
