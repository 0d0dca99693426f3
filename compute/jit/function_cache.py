"""A cache of compiled functions.

The key is a hash of everything that a function depends on, not its position in a file.
"""

# Rules
# - Each function and signature has a file. The file's name contains a hash of the function's dependencies, and a hash
#   of the signature and the processor. (Numba's key is the function's line and the text of its file. So it misses
#   edits of called functions in other files, and recompiles after edits of comments.)
# - A file is either complete or absent. It begins with a hash of its content. A damaged file is compiled again and
#   rewritten. (Numba writes an index, and then the code that the index names. If two processes compile one function
#   at the same time, one index may name the code of the other process.)
# - A loaded file is trusted, like Python's own bytecode files. kernel_cache checks who may write to the directory.
# - After a file system error, the function is compiled and not cached. The caller gets no error.
# - A process that only loads code skips Numba's preparations for compiling, which take 0.2 s and 35 MB. It needs only
#   one of them: the names of the reference counting functions. LLVM's code pages are returned to the system after
#   each use (40 MB).

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llvmlite import binding
from numba.core import caching, runtime, serialize

from cbtop.compute.jit.fingerprint import ChangedError, fingerprint
from cbtop.compute.jit.kernel_cache import CODE, remove_unused_files
from cbtop.compute.memory import give_back_code
from cbtop.protocol.cache import replace_whole

# Numba's modules have no type annotations.
_caching: Any = caching
_add_symbol: Any = binding.add_symbol
_dumps: Any = serialize.dumps
_runtime: Any = runtime

HASH_BYTES = 16
LLVM = "libllvmlite.so"
_PYTHON = f"py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}"


class FunctionCache(_caching.FunctionCache):  # type: ignore[misc]
    """The cache of one function, which is compiled with `options`. The files are in `directory`.

    The dependencies are hashed only when a signature is compiled, because called functions may be defined later than
    this one. If hashing fails, the function is compiled but not cached.
    """

    def __init__(self, directory: Path, function: Any, options: object) -> None:
        self._directory, self._options = directory, options
        self._name, self._py_func, self._cache_path = repr(function), function, str(directory)
        self._impl = _Implementation(function)
        self.enable()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        key = self._index_key(signature, target_context.codegen())
        path = self._path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if _hash(data[HASH_BYTES:]) != data[:HASH_BYTES]:
            return None
        stored_key, payload = pickle.loads(data[HASH_BYTES:])
        if stored_key != key:
            return None
        _name_reference_counting()
        with suppress(OSError):
            os.utime(path)  # note that the file was used now, see kernel_cache
        found = self._impl.rebuild(target_context, payload)
        give_back_code(LLVM)
        return found

    def save_overload(self, signature: Any, result: Any) -> None:
        give_back_code(LLVM)
        key = self._index_key(signature, result.codegen)
        path = self._path(key)
        if path is None or not self._impl.check_cachable(result):
            return
        pickled = _dumps((key, self._impl.reduce(result)))
        with suppress(OSError):
            replace_whole(path, _hash(pickled) + pickled)
            remove_unused_files(self._directory, time.time())

    def is_kept(self) -> bool:
        """Return whether the cache contains the function in its present form, for any argument types."""
        try:
            return any(self._directory.glob(f"{self._stem()}.*"))
        except (ChangedError, OSError):
            return False

    def flush(self) -> None:
        """Do nothing: code that is compiled later has a different file name, or replaces the old file."""

    def _path(self, key: tuple[Any, ...]) -> Path | None:
        try:
            return self._directory / f"{self._stem()}.{_hash(repr(key).encode()).hex()}{CODE}"
        except ChangedError:
            return None

    def _stem(self) -> str:
        """Return the beginning of the function's file names. Raises ChangedError if the function cannot be hashed."""
        name = f"{self._py_func.__module__.rpartition('.')[2]}.{self._py_func.__qualname__}".replace("<locals>.", "")
        return f"{name}-{fingerprint(self._py_func, self._options)}.{_PYTHON}"


class _Implementation(_caching.CompileResultCacheImpl):  # type: ignore[misc]
    """Selects the parts of a compiled function that are cached, and warns about functions that cannot be cached."""

    def __init__(self, function: Any) -> None:
        code = function.__code__
        self._lineno, self._locator = code.co_firstlineno, SimpleNamespace(_py_file=code.co_filename)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


@cache
def _name_reference_counting() -> None:
    for name, address in _runtime._nrt_python.c_helpers.items():
        _add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
