"""Keeps Dynamo from compiling the code of cbtop.

While a compiled function runs, Dynamo looks at each Python frame that begins in this thread, except torch's own. If
such a frame calls a module, Dynamo would compile cbtop and everything that cbtop calls or imports: 2,000 frames at
the first call of a model. So
- cbtop's functions are marked like torch's own. Dynamo skips them, but not the host's model that they call.
- While cbtop works without calling the model, Dynamo's callback is off.

`torch.compiler.is_compiling` is True in all threads while one thread compiles. Calls in the other threads are steps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._guards import CompileContext
from torch.compiler import is_compiling, is_dynamo_compiling

P = ParamSpec("P")
T = TypeVar("T")

OUR_MODULES = "cbtop.profiler", "cbtop.protocol"  # the packages of cbtop that run in the host's process
DECORATED = staticmethod, classmethod, property, functools.cached_property, type(functools.cache(abs))
INSIDE_DECORATED = "__func__", "fget", "fset", "fdel", "func", "__wrapped__"

#: Dynamo's module that decides what to do with each Python frame. None: this torch has no Dynamo.
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
#: Sets the callback of this thread, and returns the previous one. None is no callback.
set_callback: Callable[[Any], Any] | None = getattr(_frames, "set_eval_frame", None)

# Module -> how many members it had when its functions were marked. It has more after a lazy import, for example.
_marked_members: dict[str, int] = {}

#: Returns whether any thread exports a program. Before torch 2.7, `is_compiling` is True only during an export.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", is_compiling)


def is_compiling_here() -> bool:
    """Return whether Dynamo is compiling in this thread, so that the call is traced and not run. True in all threads
    during an export.
    """
    if is_dynamo_compiling():
        return True  # Dynamo traces this function to the constant True
    return is_compiling() and (_is_exporting() or CompileContext.try_get() is not None)


def can_keep_dynamo_out() -> bool:
    """Return whether Dynamo can be told to skip cbtop's frames."""
    return all([hasattr(_frames, name) for name in ("set_code_exec_strategy", "_debug_get_cache_entry_list")])


def without_dynamo(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `call` so that Dynamo does not see its frames. Returns its result."""
    callback = None if set_callback is None else set_callback(None)
    try:
        return call(*args, **kwargs)
    finally:
        if callback is not None and set_callback is not None:
            set_callback(callback)


def keep_dynamo_out() -> None:
    """Make Dynamo skip cbtop's frames, but not the functions that they call, as it does for torch.nn.

    If the host compiles a function that calls cbtop, Dynamo still traces cbtop's code.
    """
    actions = _frames._FrameAction
    # Dynamo then skips the frame, but not the functions that it calls.
    as_it_is = _frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    modules = {
        name: module
        for name, module in list(sys.modules.items())
        if name.startswith(OUR_MODULES) and _marked_members.get(name) != len(vars(module))
    }
    _marked_members.update((name, len(vars(module))) for name, module in modules.items())
    codes = [
        function.__code__
        for module in modules.values()
        for holder in (module, *(one for one in vars(module).values() if isinstance(one, type)))
        for member in vars(holder).values()
        for function in functions_of(member)
    ]
    while codes:
        code = codes.pop()
        _frames.set_code_exec_strategy(code, as_it_is)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def functions_of(member: object) -> Iterator[FunctionType]:
    """Yield cbtop's functions that run if `member` is called, or read as an attribute."""
    if isinstance(member, FunctionType):
        # Look inside a decorator, because the decorated function may belong to the host.
        inside = [vars(member).get("__wrapped__")]
        if member.__globals__.get("__name__", "").startswith(OUR_MODULES):
            yield member
    elif isinstance(member, DECORATED):
        inside = [getattr(member, name, None) for name in INSIDE_DECORATED]
    else:
        return
    for one in inside:
        yield from functions_of(one)
