"""Finds kernels that CuPy has compiled (RawKernel, ElementwiseKernel, ReductionKernel, ufuncs) by reading CuPy's
cache.

CuPy reports no loaded kernels. Its cache has a file of machine code for each source, with the names of the kernels.
It also has the source if CUPY_CACHE_SAVE_CUDA_SOURCE is set. Kernels that are only in memory are not found.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Collection

CACHE = "~/.cupy/kernel_cache"  # CuPy's cache, unless CUPY_CACHE_DIR is set
# A file of machine code ends with CODE, and the file of its source ends with CODE + SOURCE.
CODE, SOURCE = ".cubin", ".cu"
MAX_FILES = 512  # read at most this many files, newest first, because other programs share the cache
MAX_BYTES = 1 << 20  # of a file
_SECTION = rb"\.text\.(%s)\0"  # how the name of a section with a kernel's code begins


def of_cupy(names: Collection[str]) -> dict[str, list[str]]:
    """Return the kernels in `names` that CuPy has compiled, with the locations of their sources. Reads the files of
    CuPy's cache.
    """
    if not names or "cupy" not in sys.modules:
        return {}
    found: dict[str, list[str]] = {}
    for path in _newest(os.path.expanduser(os.environ.get("CUPY_CACHE_DIR") or CACHE)):
        code = _content(path)
        for name in names if code else ():
            symbol = _symbol(name)
            if re.search(_SECTION % symbol.encode(), code):
                sources = found.setdefault(name, [])
                sources += [source for source in _sources(path + SOURCE, name) if source not in sources]
    return found


def version() -> str:
    """Return the version of CuPy in this process, or "" if it is not known."""
    found = getattr(sys.modules.get("cupy"), "__version__", "")
    return found if isinstance(found, str) else ""


def _newest(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            files = [(one.stat().st_mtime_ns, one.path) for one in entries if one.name.endswith(CODE)]
    except OSError:  # CuPy has compiled no kernel, or another process is clearing the cache
        return []
    return [path for _, path in sorted(files, reverse=True)[:MAX_FILES]]


def _content(path: str) -> bytes:
    try:
        with io.open(path, "rb") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return b""


def _symbol(name: str) -> str:
    """Return a pattern for a kernel's symbol: its name, or a mangled C++ name that contains it."""
    base, is_template, _ = name.partition("<")
    mangled = rf"_Z\w*?{len(base)}{re.escape(base)}{'I' if is_template else ''}\w*"
    return mangled if is_template else f"{re.escape(name)}|{mangled}"


def _sources(path: str, name: str) -> list[str]:
    """Return the file and line of a kernel in CuPy's source, or "" if CuPy has not kept the source."""
    text = _content(path).decode("utf-8", "replace")
    definition = re.search(rf"__global__[^;{{}}]*?\b{re.escape(name.partition('<')[0])}\s*\(", text)
    return [f"{path}:{text.count(chr(10), 0, definition.end()) + 1}"] if definition else []
