"""Lets a plain function of the host's run ours, while the function itself stays what it is.

Only `__code__` is exchanged, and given back. The function keeps its identity, place, name, module, defaults,
attributes and closure; the code in between has the same parameters, file and first line. So `is`, pickles by name,
`inspect.signature` and `inspect.getsource` (which TorchScript reads) answer as without us.
"""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import Any

_PLACE = 0x5CB70B  # stands in the constants of the code until what is called takes its place
_UNUSUAL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_plain(function: object) -> bool:
    """Whether `function` is a function of Python's that returns what it computes."""
    return type(function) is FunctionType and not function.__code__.co_flags & _UNUSUAL


def copy_of(function: FunctionType) -> FunctionType:
    """Return a function that does what `function` does now."""
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    return copied


def trampoline_of(function: FunctionType, called: Any) -> CodeType:
    """Return a code for `function` that calls `called` with what it is given, and returns what that does.

    Dynamo must not come to it: `called` is one of its constants, and Dynamo knows no functions among those.
    """
    code = _code(function.__code__, f"{_PLACE}")
    constants = tuple(called if type(one) is int and one == _PLACE else one for one in code.co_consts)
    return code.replace(co_consts=constants)


#: What the codes call that Dynamo may come to, by number.
calls: dict[int, Any] = {}


def traceable_trampoline_of(function: FunctionType, called: Any) -> CodeType:
    """Return the same, but Dynamo can go through it, to what `called` calls while it compiles. It costs 0.3 us."""
    number = len(calls)
    calls[number] = called
    return _code(function.__code__, f"calls[{number}]", f"        from {__name__} import calls\n")


def _code(own: CodeType, called: str, before: str = "") -> CodeType:
    parameters, arguments = _signature(own)
    cells = "".join(f"    {name} = None\n" for name in own.co_freevars)
    uses = f"        if 0: ({', '.join(own.co_freevars)},)\n" if own.co_freevars else ""  # an empty cell stays unread
    call = _free_name(own)
    body = f"{uses}{before}        {call} = {called}; return {call}({arguments})\n"
    source = f"def around():\n{cells}    def code({parameters}):\n{body}"
    around = compile(source, own.co_filename, "exec", dont_inherit=True).co_consts[0]
    code = next(one for one in around.co_consts if isinstance(one, CodeType))
    return code.replace(
        co_flags=own.co_flags,
        co_name=own.co_name,
        co_qualname=own.co_qualname,
        co_firstlineno=own.co_firstlineno,
        co_linetable=_on_one_line(code),
    )


def _signature(own: CodeType) -> tuple[str, str]:
    """The parameters of a function, and the arguments that pass them on, as they are written."""
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
    """A name that is none of the function's, nor `calls`."""
    name = "call"
    while name in (*own.co_varnames, *own.co_freevars):
        name += "_"
    return name


def _on_one_line(code: CodeType) -> bytes:
    """A table that says of every instruction that it is on the first line: a traceback shows that one."""
    # Entries of PEP 626's successor (Objects/locations.md): 0x80 | kind 13 (no columns) << 3 | length - 1, then a
    # signed delta of lines, which is 0.
    units = len(code.co_code) // 2
    table = bytearray()
    while units:
        length = min(8, units)
        table += bytes((0x80 | 13 << 3 | length - 1, 0))
        units -= length
    return bytes(table)
