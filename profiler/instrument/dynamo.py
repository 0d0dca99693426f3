"""Keeps Dynamo from compiling the code of cbtop.

While a function made by `torch.compile` runs, Dynamo looks at each frame of Python that begins in this thread. Frames
of torch are skipped. If a module is called in such a frame, cbtop runs there, too, and Dynamo would compile cbtop and
whatever it calls or imports: 2,000 frames at the first call of a model. So

- our functions are marked as torch's own are. Dynamo skips them, but not the functions that they call, such as the
  host's model;
- Dynamo's callback is off while cbtop does work that does not call the model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

OUR_MODULES = "cbtop.profiler", "cbtop.protocol"  # the parts of cbtop that run in the host's process
DECORATED = staticmethod, classmethod, property, functools.cached_property, type(functools.cache(abs))
INSIDE_DECORATED = "__func__", "fget", "fset", "fdel", "func", "__wrapped__"

#: The part of Dynamo that decides about each frame of Python; None if this torch has none.
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
#: Sets the callback of this thread and returns the one before; None: no callback.
set_callback: Callable[[Any], Any] | None = getattr(_frames, "set_eval_frame", None)


def can_keep_dynamo_out() -> bool:
    """Whether Dynamo can be told to skip our frames."""
    return all([hasattr(_frames, name) for name in ("set_code_exec_strategy", "_debug_get_cache_entry_list")])


def without_dynamo(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `call`, whose frames Dynamo does not see."""
    callback = None if set_callback is None else set_callback(None)
    try:
        return call(*args, **kwargs)
    finally:
        if callback is not None and set_callback is not None:
            set_callback(callback)


def keep_dynamo_out() -> None:
    """Make Dynamo skip cbtop's frames but not the functions they call, as Dynamo does for torch.nn.

    If Dynamo compiles a function of the host, and this function calls cbtop, Dynamo still traces cbtop there.
    """
    actions = _frames._FrameAction
    as_it_is = _frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)  # skip a frame, but not its callees
    codes = [
        function.__code__
        for name, module in list(sys.modules.items())
        if name.startswith(OUR_MODULES)
        for holder in (module, *(one for one in vars(module).values() if isinstance(one, type)))
        for member in vars(holder).values()
        for function in functions_of(member)
    ]
    while codes:
        code = codes.pop()
        _frames.set_code_exec_strategy(code, as_it_is)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def functions_of(member: object) -> Iterator[FunctionType]:
    """Yield our functions that run if `member` is called, or read as an attribute."""
    if isinstance(member, FunctionType):
        inside = [vars(member).get("__wrapped__")]  # a decorated function, even if the decorator is not ours
        if member.__globals__.get("__name__", "").startswith(OUR_MODULES):
            yield member
    elif isinstance(member, DECORATED):
        inside = [getattr(member, name, None) for name in INSIDE_DECORATED]
    else:
        return
    for one in inside:
        yield from functions_of(one)
