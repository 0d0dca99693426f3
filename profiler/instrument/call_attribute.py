"""Replaces the calls of modules without changing the modules.

`torch.nn.Module.__call__` reads the attribute `_compiled_call_impl`. If it is not None, torch calls this value
instead of the module. While a model is attached, cbtop puts a descriptor (`Slot`) of this name into
`torch.nn.Module`. The descriptor returns the replacement from a table in this file.

So a module's `__dict__`, pickles, copies and hash stay the same. If the host sets the attribute (as `Module.compile`
does), the value goes into the module's `__dict__`, as in torch.

Every process that imports torch under `cbtop run` loads this file, so it imports little.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from sys import _getframe
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import torch
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.instrument.dynamo import can_keep_dynamo_out, without_dynamo
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol.signals import reraise_host_error

ATTRIBUTE = "_compiled_call_impl"
#: Returns the method that torch calls for a module if nothing replaces the call.
plain_call: Callable[[Any], Callable[..., Any]] = attrgetter("_call_impl")
#: Returns the state of `torch.jit.trace`, or None if no trace is running.
_tracing_state: Callable[[], object] = torch._C._get_tracing_state

#: Id of a module -> the replacement of its calls. None: the module is known, and its calls are not replaced.
_standing: dict[int, Any] = {}


#: Id of a module in `_standing` -> a weak reference, which removes the module from `_standing` when it is freed. The
#: reference itself stays here until a new module gets the same id.
_alive: dict[int, weakref.ref[Any]] = {}


def _nobody(module: Any) -> None:
    """Do nothing. The default for a callback."""


#: The code of the torch function that calls modules. None if this version of torch does not have it.
_TORCH_CALL = getattr(getattr(torch.nn.Module, "_wrapped_call_impl", None), "__code__", None)
# Data of each thread. `replaced` is the id of the last module with a replaced call in this thread.
_last = threading.local()


class Meeting:
    """Holds two callbacks: for the first call of a module, and for changes of the attribute by the host."""

    def __init__(self) -> None:
        #: Called with a module that is not in the table. Returns the callable that torch calls instead of the module.
        #: None: first calls are not reported.
        self.first_call: Callable[[Any], Any] | None = None
        #: Called with a module after the host has set or deleted its attribute.
        self.was_set: Callable[[Any], None] = _nobody


meeting = Meeting()


def standing(module: Any) -> Any:
    """Return cbtop's replacement for the call of `module`, or None."""
    return _standing.get(id(module))


def is_known(module: Any) -> bool:
    """Return whether the table has an entry for `module`. The entry may be None."""
    return id(module) in _standing


def put(module: Any, call: Any) -> None:
    """Replace the call of `module` by `call`. If `call` is None, only mark `module` as known."""
    key = id(module)
    if key not in _standing:
        # A callback in C, because a signal handler of the host may raise inside a Python callback. Python would
        # ignore the exception, and the entry of the freed module would stay. A new module with the same id would get
        # it.
        _alive[key] = weakref.ref(module, functools.partial(_standing.pop, key))
    _standing[key] = call


def leave(module: Any) -> None:
    """Mark `module` as known, so that its first call is not reported. If its calls are replaced, they stay
    replaced.
    """
    if id(module) not in _standing:
        put(module, None)


def leave_all(references: Iterable[weakref.ref[Any]]) -> None:
    """Mark these modules as known, if they are alive, so that their first calls are not reported."""
    for reference in references:
        module = reference()
        if module is not None and id(module) not in _standing:
            put(module, None)


def forget(module: Any) -> None:
    """Remove `module` from the table. Its next call is reported as a first call."""
    _standing.pop(id(module), None)
    _alive.pop(id(module), None)


def of_host(module: Any) -> Any:
    """Return the value that the host has set as the attribute of `module`, or None."""
    return object.__getattribute__(module, "__dict__").get(ATTRIBUTE)


class CallArguments(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of_call(module: Any) -> CallArguments | None:
    """Return the arguments of the running call of `module` in this thread, or None if torch is not calling it.

    Reads frames of the torch function that calls modules. Each takes a few microseconds.
    """
    frame: FrameType | None = _getframe(1)
    while frame is not None:
        if frame.f_code is _TORCH_CALL and frame.f_locals.get("self") is module:
            return CallArguments(frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {}))
        frame = frame.f_back
    return None


_after_in_c: Callable[..., Any] | None = None


def prepared(look: Callable[[Any], None], module: Any) -> Any:
    """Call `look` with `module`. Returns what to call next: the replacement of the call, or else the module's usual
    call.
    """
    without_dynamo(look, module)
    call = replacement(module) if id(module) in _standing else of_host(module)
    return plain_call(module) if call is None else call


def _call_after(look: Callable[[Any], None], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    try:
        call = prepared(look, module)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        _failed(error)
        call = plain_call(module)
    return call(*args, **kwargs)


def _failed(error: Exception) -> None:
    log_own_error(error, "a model may not be shown")


def after(look: Callable[[Any], None], module: Any) -> Any:
    """Return a callable that first calls `look` with `module`, and then calls the module.

    The compiled version leaves no Python frame of cbtop on the stack while the module runs. Tracebacks and stack
    depth stay the same.
    """
    return (
        functools.partial(_call_after, look, module) if _after_in_c is None else _after_in_c(prepared, look, module)
    )


def _missed(module: Any) -> Any:
    first_call = meeting.first_call
    if first_call is None or _tracing_state() is not None:
        return of_host(module)
    return without_dynamo(first_call, module)


def replacement(module: Any) -> Any:
    """Return the callable that torch should call for `module`. None: the module itself."""
    there = _standing.get(id(module), _standing)
    if there is _standing:
        return _missed(module)
    # Calls under torch.jit.trace are not replaced, because the trace stores the line of torch's source that made each
    # call.
    return of_host(module) if there is None or _tracing_state() is not None else there


# `Slot` is a property, so Dynamo traces the functions below.
def _get(module: Any) -> Any:
    if is_dynamo_compiling():
        return module.__dict__.get(ATTRIBUTE)
    # Only the torch function that calls modules gets a replacement. All other readers get the host's value, such as
    # peft, which checks whether a model is compiled.
    asking: FrameType | None = _getframe(2)
    while asking is not None and asking.f_code.co_name == "__getattribute__":
        asking = asking.f_back
    if asking is None or asking.f_code is not _TORCH_CALL:
        return of_host(module)
    call = replacement(module)
    if call is not None:
        _last.replaced = id(module)
    elif getattr(_last, "replaced", None) == id(module):
        # torch reads the attribute twice for one call. Another thread has removed the replacement between the two
        # reads.
        return plain_call(module)
    return call


def _set(module: Any, value: Any) -> None:
    module.__dict__[ATTRIBUTE] = value
    _tell(module)


def _delete(module: Any) -> None:
    if ATTRIBUTE not in module.__dict__:
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {ATTRIBUTE!r}")
    del module.__dict__[ATTRIBUTE]
    _tell(module)


def _tell(module: Any) -> None:
    try:
        without_dynamo(meeting.was_set, module)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        reraise_host_error(error)


class Slot(property):
    """The descriptor for `torch.nn.Module._compiled_call_impl` while a model is attached.

    Reading it from the class returns None, as in torch. If the hot path is compiled, C code does the same as this
    class.
    """

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is None:
            return None
        try:
            return _get(module)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            _failed(error)
            # Do what `of_host` does, without calling it, because `of_host` may be what failed.
            call = object.__getattribute__(module, "__dict__").get(ATTRIBUTE)
            # torch reads the attribute twice for one call. If the first read found a replacement, the second must
            # return a callable, too.
            return plain_call(module) if call is None and getattr(_last, "replaced", None) == id(module) else call


_slot = Slot(_get, _set, _delete)


def stand_by() -> None:
    """Install the `Slot` in `torch.nn.Module`."""
    if vars(torch.nn.Module).get(ATTRIBUTE) is not _slot:
        setattr(torch.nn.Module, ATTRIBUTE, _slot)


def end() -> None:
    """Restore the attribute of `torch.nn.Module`, and clear the table and the callbacks."""
    if vars(torch.nn.Module).get(ATTRIBUTE) is _slot:
        setattr(torch.nn.Module, ATTRIBUTE, None)
    meeting.first_call, meeting.was_set = None, _nobody
    _standing.clear()
    _alive.clear()


@functools.cache
def compile_lookup() -> None:
    """Use C code to read the table and to handle first calls, if the hot path is compiled."""
    global _after_in_c
    from cbtop.profiler.hot_path import HotPath, chosen

    if chosen() is not HotPath:
        from cbtop.profiler import _hot_path
        from cbtop.profiler.instrument.torch_internals import is_tracing

        code = cast(CodeType, _TORCH_CALL)
        _hot_path.compile_slot(Slot, _standing, ATTRIBUTE, _missed, is_tracing, _failed, code)
        _after_in_c = _hot_path.call_after


@functools.cache
def is_supported() -> bool:
    """Return whether torch calls the value of the attribute, and Dynamo can be told to skip cbtop's frames."""
    called: list[None] = []

    class CallProbe(torch.nn.Module):  # type: ignore[misc]  # torch does not declare types for this
        _compiled_call_impl = property(lambda self: lambda: called.append(None))

    CallProbe()()
    is_asked = getattr(torch.nn.Module, ATTRIBUTE, True) is None and _TORCH_CALL is not None and bool(called)
    return is_asked and can_keep_dynamo_out()
