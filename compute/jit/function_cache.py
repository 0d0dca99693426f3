"""Numba's cache of compiled functions, by what they are made of in place of where they stand."""

# Numba's own key is the text of the file that defines a function and the line. An edit of a function that is called
# from another file would go unnoticed; one of a comment above would not.

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core import caching

from cbtop.compute.jit.fingerprint import ChangedError, fingerprint
from cbtop.compute.jit.kernel_cache import remove_unused_files

_caching: Any = caching  # without types


class _Locator(_caching._CacheLocator):  # type: ignore[misc]
    """One directory for all; what a function is made of is a part of its file's name."""

    def __init__(self, directory: Path, key: str) -> None:
        self._directory, self._key = directory, key

    def get_cache_path(self) -> str:
        return str(self._directory)

    def get_source_stamp(self) -> str:
        return self._key

    def get_disambiguator(self) -> str:
        return self._key


class _Implementation(_caching.CompileResultCacheImpl):  # type: ignore[misc]
    def __init__(self, directory: Path, function: Any, key: str) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(directory, key)
        self._locator._py_file = function.__code__.co_filename  # for warnings
        module = function.__module__.rpartition(".")[2]
        self._filename_base = self.get_filename_base(f"{module}.{function.__qualname__}", "")


class FunctionCache(_caching.FunctionCache):  # type: ignore[misc]
    """Of one function that is compiled with `options`, in `directory`.

    What the function is made of is looked at as each of its signatures is compiled: what it calls may be defined
    after it. Where that cannot be said, or the file system fails, it is compiled, and not kept.
    """

    def __init__(self, directory: Path, function: Any, options: object) -> None:
        self._directory, self._options = directory, options
        self._name, self._py_func, self._cache_path = repr(function), function, str(directory)
        self.enable()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        if not self._find():
            return None
        with suppress(OSError):
            found = super().load_overload(signature, target_context)
            if found is not None:
                os.utime(self._directory / f"{self._impl.filename_base}.nbi")  # in use: see kernel_cache
            return found
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if self._find():
            with suppress(OSError):
                super().save_overload(signature, result)
                remove_unused_files(self._directory, time.time())

    def flush(self) -> None:
        if self._find():
            super().flush()

    def _find(self) -> bool:
        try:
            key = fingerprint(self._py_func, self._options)
        except ChangedError:
            return False
        self._impl = _Implementation(self._directory, self._py_func, key)
        self._cache_file = _caching.IndexDataCacheFile(self._cache_path, self._impl.filename_base, key)
        return True
