"""Where torch asks what stands in for a module's call, and the table that answers.

`torch.nn.Module.__call__` reads the attribute `_compiled_call_impl` and calls what it finds instead of the module.
While anything is attached, that attribute is a `Slot` of the class: it looks the module up in a table of ours. So
nothing of ours lies in a module: its `__dict__`, pickles, copies and hashes are those of a bare run. What the host
puts there itself (`Module.compile`) lies in the module's own dictionary, as ever.

Each process that imports torch under `cbtop run` loads this, whether it calls a model or not: it imports little.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cbtop.protocol.signals import let_through

ATTRIBUTE = "_compiled_call_impl"

#: What stands in for the call of a module, by the module's id; None: it was looked at, and nothing of ours does.
_standing: dict[int, Any] = {}
_alive: dict[
    int, weakref.ref[Any]
] = {}  # the same modules: an entry ends with its module, before its id is another's


def _nobody(module: Any) -> None:
    """Nobody asks."""


class Meeting:
    """Who is told of modules that nobody has looked at, and of what the host puts in their attribute."""

    def __init__(self) -> None:
        #: Given a module that is called for the first time, gives what to call instead; None: nobody asks.
        self.first_call: Callable[[Any], Any] | None = None
        #: Is told of a module whose attribute the host has set.
        self.was_set: Callable[[Any], None] = _nobody


meeting = Meeting()


def standing(module: Any) -> Any:
    """Return what of ours stands in for the call of `module`, or None."""
    return _standing.get(id(module))


def is_known(module: Any) -> bool:
    """Whether `module` has been looked at."""
    return id(module) in _standing


def put(module: Any, call: Any) -> None:
    """Let `call` stand in for the call of `module`; None: it is called as it is, and not looked at again."""
    key = id(module)
    if key not in _standing:
        _alive[key] = weakref.ref(module, functools.partial(_ended, key))
    _standing[key] = call


def leave(module: Any) -> None:
    """Look at `module` no more, unless something stands in for its call."""
    if id(module) not in _standing:
        put(module, None)


def forget(module: Any) -> None:
    """Let `module` be looked at again at its next call."""
    _standing.pop(id(module), None)
    _alive.pop(id(module), None)


def _ended(key: int, _: object) -> None:
    _standing.pop(key, None)
    _alive.pop(key, None)


def of_host(module: Any) -> Any:
    """Return what the host has put into the attribute of `module`, or None."""
    return object.__getattribute__(module, "__dict__").get(ATTRIBUTE)


def call_now(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what torch would if it asked for the attribute of `module` now; its class may do more in `__call__`."""
    call = _get(module)
    return module._call_impl(*args, **kwargs) if call is None else call(*args, **kwargs)


def _missed(module: Any) -> Any:
    first_call = meeting.first_call
    return of_host(module) if first_call is None or torch._C._get_tracing_state() is not None else first_call(module)


# Dynamo takes these three for the property that `Slot` is, and goes into them.
def _get(module: Any) -> Any:
    if is_dynamo_compiling():
        return module.__dict__.get(ATTRIBUTE)
    there = _standing.get(id(module), _standing)
    if there is _standing:
        return _missed(module)
    # torch.jit.trace writes down the lines of torch's own that a call has come by.
    return of_host(module) if there is None or torch._C._get_tracing_state() is not None else there


def _set(module: Any, value: Any) -> None:
    module.__dict__[ATTRIBUTE] = value
    _tell(module)


def _delete(module: Any) -> None:
    if ATTRIBUTE not in module.__dict__:
        raise AttributeError(ATTRIBUTE)
    del module.__dict__[ATTRIBUTE]
    _tell(module)


def _tell(module: Any) -> None:
    try:
        meeting.was_set(module)
    except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
        let_through(error)


class Slot(property):
    """The attribute of `torch.nn.Module` while modules are looked at. Of the class it is None, as torch's own.

    On a compiled hot path modules are looked up in C, which does the same.
    """

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        return None if module is None else _get(module)


_slot = Slot(_get, _set, _delete)


def stand_by() -> None:
    """Let modules be looked up in the table from now on."""
    if vars(torch.nn.Module).get(ATTRIBUTE) is not _slot:
        setattr(torch.nn.Module, ATTRIBUTE, _slot)


def end() -> None:
    """Let the class be as torch has it, and forget all modules."""
    if vars(torch.nn.Module).get(ATTRIBUTE) is _slot:
        setattr(torch.nn.Module, ATTRIBUTE, None)
    meeting.first_call, meeting.was_set = None, _nobody
    _standing.clear()
    _alive.clear()


@functools.cache
def compile_lookup() -> None:
    """Let modules be looked up in C, where the hot path is compiled."""
    from cbtop.profiler.hot_path import HotPath, chosen

    if chosen() is not HotPath:
        from cbtop.profiler import _hot_path

        _hot_path.compile_slot(Slot, _standing, ATTRIBUTE, _missed, torch._C._is_tracing)


@functools.cache
def is_supported() -> bool:
    """Whether this torch calls what the attribute is, and Dynamo can be told to leave our frames alone."""
    called: list[None] = []

    class Probe(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
        _compiled_call_impl = property(lambda self: lambda: called.append(None))

    Probe()()
    dynamo = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    can_be_told = all([hasattr(dynamo, name) for name in ("set_code_exec_strategy", "_debug_get_cache_entry_list")])
    return getattr(torch.nn.Module, ATTRIBUTE, True) is None and bool(called) and can_be_told


def keep_dynamo_out() -> None:
    """Let Dynamo compile no frame of ours: it looks on at what they call, as it does with those of torch.nn.

    Where it comes to a function of ours while it compiles one of the host's, it goes into it all the same.
    """
    frames = torch._C._dynamo.eval_frame
    actions = frames._FrameAction
    as_it_is = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)  # the second: of what it calls
    codes = [
        member.__code__
        for name, module in list(sys.modules.items())
        if name.startswith(("cbtop.profiler", "cbtop.protocol"))
        for holder in (module, *(one for one in vars(module).values() if isinstance(one, type)))
        for member in vars(holder).values()
        if isinstance(member, FunctionType)
    ]
    while codes:
        code = codes.pop()
        frames.set_code_exec_strategy(code, as_it_is)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
