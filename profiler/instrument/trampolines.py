"""Redirects the calls of a plain Python function by changing its `__code__`.

The function object keeps its identity, module, name, defaults, attributes and closure. The new code has the same
parameters, flags, file and first line. So `is`, pickle, `inspect.signature`, `inspect.getsource` and TorchScript give
the same results as before.
"""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import Any

_PLACE = 0x5CB70B  # compiled into the code, and then replaced by the callable
_UNUSUAL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_plain(function: object) -> bool:
    """Return whether `function` is a Python function, but not a generator or coroutine."""
    return type(function) is FunctionType and not function.__code__.co_flags & _UNUSUAL


def copy_of(function: FunctionType) -> FunctionType:
    """Return a copy of `function` that keeps its current code."""
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    return copied


def trampoline_of(function: FunctionType, called: Any) -> CodeType:
    """Return code for `function` that calls `called` with the same arguments, and returns its result.

    Dynamo cannot trace it, because Dynamo accepts no callable among the constants.
    """
    code = _code(function.__code__, f"{_PLACE}")
    constants = tuple(called if type(one) is int and one == _PLACE else one for one in code.co_consts)
    return code.replace(co_consts=constants)


#: The callables that traceable code calls, by number.
calls: dict[int, Any] = {}


def traceable_trampoline_of(function: FunctionType, called: Any) -> CodeType:
    """Return code like `trampoline_of`, but code that Dynamo can trace. Each call takes 0.3 µs longer."""
    number = len(calls)
    calls[number] = called
    return _code(function.__code__, f"calls[{number}]", f"        from {__name__} import calls\n")


def _code(own: CodeType, called: str, before: str = "") -> CodeType:
    parameters, arguments = _signature(own)
    cells = "".join(f"    {name} = None\n" for name in own.co_freevars)
    # The new code must have the same free variables as the old. This expression names them and never runs.
    uses = f"        if 0: ({', '.join(own.co_freevars)},)\n" if own.co_freevars else ""
    call = _free_name(own)
    body = f"{uses}{before}        {call} = {called}; return {call}({arguments})\n"
    source = f"def around():\n{cells}    def code({parameters}):\n{body}"
    around = compile(source, own.co_filename, "exec", dont_inherit=True).co_consts[0]
    # Not `next` on a generator: if a signal handler raises while the generator ends, the exception is lost.
    code, *_ = [one for one in around.co_consts if isinstance(one, CodeType)]
    return code.replace(
        co_flags=own.co_flags,
        co_name=own.co_name,
        co_qualname=own.co_qualname,
        co_firstlineno=own.co_firstlineno,
        co_linetable=_on_one_line(code),
    )


def _signature(own: CodeType) -> tuple[str, str]:
    """Return two lists as source code: the parameters of a function, and the arguments that pass them on."""
    names = list(own.co_varnames)
    given = names[: own.co_argcount]
    only_named = names[own.co_argcount : own.co_argcount + own.co_kwonlyargcount]
    rest = names[own.co_argcount + own.co_kwonlyargcount :]
    parameters, arguments = list(given), list(given)
    if own.co_posonlyargcount:
        parameters.insert(own.co_posonlyargcount, "/")
    if own.co_flags & inspect.CO_VARARGS:
        parameters.append(f"*{rest[0]}")
        arguments.append(f"*{rest.pop(0)}")
    elif only_named:
        parameters.append("*")
    parameters += only_named
    arguments += [f"{name}={name}" for name in only_named]
    if own.co_flags & inspect.CO_VARKEYWORDS:
        parameters.append(f"**{rest[0]}")
        arguments.append(f"**{rest[0]}")
    return ", ".join(parameters), ", ".join(arguments)


def _free_name(own: CodeType) -> str:
    """Return a variable name that the code `own` does not use."""
    name = "call"
    while name in (*own.co_varnames, *own.co_freevars):
        name += "_"
    return name


def _on_one_line(code: CodeType) -> bytes:
    """Return a line table for `code` that puts every instruction on the first line."""
    # The format of an entry is in CPython's Objects/locations.md: 0x80 | kind 13 (no columns) << 3 | length - 1, then
    # the signed difference of the line number, here 0.
    units = len(code.co_code) // 2
    table = bytearray()
    while units:
        length = min(8, units)
        table += bytes((0x80 | 13 << 3 | length - 1, 0))
        units -= length
    return bytes(table)
