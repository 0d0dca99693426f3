"""Hash everything that a compiled function depends on. The hash identifies the function in the cache."""

# A stale cache runs old code. So the hash may stay the same only if all dependencies are certainly unchanged. Rules
# - Like Numba when it compiles, the hash follows the names, globals and cells in a function's code to functions,
#   numbers and the Python code of intrinsics. This includes functions that `copy_of` has inserted, although the file
#   of the code does not import them.
# - The whole file of every function is hashed as bytecode, because types, data models and overloads cannot be found
#   by name. Comments, line numbers and docstrings do not change the hash.
# - If compiled code calls a plain function, its overloads may be in any file. So all of our files that the function's
#   file imports are hashed, too.
# - The passes that compile kernels are always hashed, and for an intrinsic also the decorators of intrinsics.
# - A number is hashed by its value. If a value has an unknown kind, all of our files are hashed.
# - A file is hashed after it was imported. If it has changed since then, it is not hashed.

from __future__ import annotations

import dis
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

NAME = "cbtop.compute"
PACKAGE = Path(__file__).parents[1]
_COMPILERS = str(PACKAGE / "jit" / "compilers.py")
_INTRINSICS = str(PACKAGE / "jit" / "vectors.py")  # our file that defines the decorators of intrinsics
_VERSIONS = f"{numba.__version__} {llvmlite.__version__}"
_LIBRARIES = {"numba", "llvmlite", "numpy", *sys.stdlib_module_names}
_NUMBERS = (int, float, str, bytes, type(None), np.generic)
# A flag of functions with a docstring, from Python 3.14 on.
HAS_DOCSTRING: int = getattr(inspect, "CO_HAS_DOCSTRING", 0)
EXTENDED_ARG, STORE_NAME = dis.EXTENDED_ARG, bytes([dis.opmap["STORE_NAME"]])
TAKES_CONSTANT = re.compile(b"[" + re.escape(bytes(one for one in dis.hasconst if one < 256)) + b"]")
_NAMED: Any = (FunctionType, BuiltinFunctionType, Dispatcher, type)

Stamp = tuple[int, int, int]


class ChangedError(Exception):
    """Raised if a file cannot be hashed, because it has changed since it was imported or cannot be read."""


def _stamp(path: str) -> Stamp:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


# The stamps (time and size) of our files. They are taken when the first module that compiles anything is imported.
STAMPS = {str(path): _stamp(str(path)) for path in PACKAGE.rglob("*.py")}


def fingerprint(function: FunctionType, options: object) -> str:
    """Return 32 hexadecimal digits that identify a Python function which is compiled with `options`.

    Raises ChangedError if a file has changed or cannot be read.
    """
    walk = _Walk()
    walk.files.add(_COMPILERS)
    walk.begin(function)
    try:
        files = sorted(f"{_relative(path)} {hash_of_file(path, _checked(path))}" for path in walk.files)
    except (OSError, ImportError, SyntaxError, ValueError) as error:
        raise ChangedError from error
    what = [_VERSIONS, function.__module__, function.__qualname__, repr(options), *files, *sorted(walk.values)]
    return hashlib.sha256("\n".join(what).encode()).hexdigest()[:32]


class _Walk:
    """Collects the `files` and `values` that a function depends on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.values: set[str] = set()
        self._todo: list[tuple[Any, bool]] = []
        # Keeps the hashed objects alive, so that their ids are not used for new objects.
        self._met: dict[tuple[int, bool], Any] = {}

    def begin(self, function: FunctionType) -> None:
        self._function(function, is_compiled=True)
        while self._todo:
            self._follow(*self._todo.pop())

    def _meet(self, thing: Any, is_compiled: bool) -> None:
        if (id(thing), is_compiled) not in self._met:
            self._met[id(thing), is_compiled] = thing
            self._todo.append((thing, is_compiled))

    def _follow(self, thing: Any, is_compiled: bool) -> None:
        if isinstance(thing, Dispatcher):
            self.values.add(f"{thing.py_func.__qualname__} {thing.targetoptions!r}")
            self._function(thing.py_func, is_compiled=True)
        elif isinstance(thing, _Intrinsic):
            self.files.add(_INTRINSICS)
            self._function(inspect.unwrap(thing), is_compiled=False)
        elif isinstance(thing, FunctionType):
            self._function(thing, is_compiled)
            if is_compiled:
                self.files |= _imported_by(thing.__code__.co_filename)
        elif isinstance(thing, type):
            self._file_of(thing)
        elif isinstance(thing, (types.Type, ir.Type, ir.Constant)):
            self.values.add(f"{type(thing).__qualname__} {thing}")
            self._file_of(type(thing))
        elif isinstance(thing, (tuple, list)):
            for one in thing:
                self._value("", one, is_compiled)
        else:
            self.files |= set(STAMPS)

    def _file_of(self, kind: type) -> None:
        if not _is_library(kind.__module__):
            self.files.add(str(sys.modules[kind.__module__].__file__))

    def _function(self, function: FunctionType, is_compiled: bool) -> None:
        self.files.add(function.__code__.co_filename)
        for name, value in _named_by(function):
            self._value(f"{function.__qualname__} {name}", value, is_compiled)

    def _value(self, name: str, value: Any, is_compiled: bool) -> None:
        if isinstance(value, _NUMBERS):
            self.values.add(f"{name} {type(value).__name__} {value!r}")
        elif isinstance(value, _NAMED) and _is_library(value.__module__):
            self.values.add(f"{name} {value.__module__}.{value.__name__}")
        elif isinstance(value, np.ufunc) or (isinstance(value, ModuleType) and _is_library(value.__name__)):
            self.values.add(f"{name} {value.__name__}")
        else:
            self._meet(value, is_compiled)
            self.values.add(f"{name} {len(value) if isinstance(value, (tuple, list)) else ''}")


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals, closure variables and defaults that the function's code may read.

    Also yields globals with the same name as an attribute in the code. Additional values do no harm.
    """
    for code in _codes(function.__code__):
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents
    yield "defaults", function.__defaults__ or ()


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _relative(path: str) -> str:
    return os.path.relpath(path, PACKAGE) if path in STAMPS else path


def _checked(path: str) -> Stamp:
    """Return the stamp of a file. Raises ChangedError if one of our files has changed since it was imported."""
    stamp = _stamp(path)
    if STAMPS.get(path, stamp) != stamp:
        raise ChangedError
    return stamp


def _code_of(path: str) -> CodeType:
    # Read the bytecode file that the import used, because that is faster than compiling.
    code = SourceFileLoader(NAME, path).get_code(NAME)
    assert code is not None
    return code


@cache
def hash_of_file(path: str, stamp: Stamp) -> str:
    digest = hashlib.sha256()
    for code in _codes(_code_of(path)):
        flags = code.co_flags & ~HAS_DOCSTRING
        numbers = flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
        names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        digest.update(f"{numbers} {names} {_operations(code)}".encode())
        digest.update(code.co_exceptiontable)
    return digest.hexdigest()


def _operations(code: CodeType) -> tuple[bytes, bytes, list[str]]:
    """Return the operations with their arguments, and the constants that they load.

    The indices of constants become 0, because adding a docstring would change them (it is the first constant). The
    docstring itself is left out: a function never loads it, and a module or a class only stores it.
    """
    operations, arguments, loaded = code.co_code[::2], bytearray(code.co_code[1::2]), []
    for match in TAKES_CONSTANT.finditer(operations):
        at = match.start()
        number, arguments[at] = arguments[at], 0
        if at and operations[at - 1] == EXTENDED_ARG:
            number, arguments[at - 1] = number | arguments[at - 1] << 8, 0
        is_stored = operations[at + 1 : at + 2] == STORE_NAME
        if not is_stored or code.co_names[arguments[at + 1]] != "__doc__":
            loaded.append(_written(code.co_consts[number]))
    return operations, bytes(arguments), loaded


def _written(constant: object) -> str:
    """Return the `repr` of a constant, with sorted sets. The order of a set differs between processes."""
    if isinstance(constant, CodeType):
        return "code"
    if isinstance(constant, frozenset):
        return f"set {sorted(map(_written, constant))}"
    if isinstance(constant, tuple):
        return f"tuple {[_written(one) for one in constant]}"
    return f"{type(constant).__name__} {constant!r}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _imported_by(path: str) -> set[str]:
    """Return our files that a file imports, directly or indirectly."""
    found: set[str] = set()
    todo = [path]
    while todo:
        for one in _imports_of(todo.pop()) - found:
            found.add(one)
            todo.append(one)
    return found


@cache
def _imports_of(path: str) -> set[str]:
    found = set()
    for code in _codes(_code_of(path)):
        for module in (name for name in code.co_names if name.startswith(NAME)):
            folder = PACKAGE.joinpath(*module.split(".")[NAME.count(".") + 1 :])
            parts = (folder / part for part in code.co_names if part.isidentifier())
            found |= {str(one.with_suffix(".py")) for one in (folder, *parts)} | {str(folder / "__init__.py")}
    return found & STAMPS.keys()
