"""The functions of CuPy that become bricks: the twins of NumPy's and SciPy's.

The host times their launches. A launch has no rate, so their work is unknown.
"""

from __future__ import annotations

from dataclasses import replace

from cbtop.profiler.instrument.libraries.amounts import nothing
from cbtop.profiler.instrument.libraries.functions import LibraryFunction
from cbtop.profiler.instrument.libraries.numpy_functions import NUMPY
from cbtop.profiler.instrument.libraries.scipy_functions import SCIPY

_TWINS = ("scipy.fft", "scipy.linalg", "scipy.signal", "scipy.ndimage", "scipy.sparse.linalg")


def _twin(row: LibraryFunction) -> LibraryFunction:
    module = row.awaited
    twin = f"cupy{module.removeprefix('numpy')}" if module.startswith("numpy") else f"cupyx.{module}"
    return replace(row, module=twin, name=f"{twin}.{row.path}", amounts=nothing, after="", smallest=0, checks=())


CUPY: tuple[LibraryFunction, ...] = tuple(
    _twin(row) for row in (*NUMPY, *SCIPY) if row.module.startswith("numpy") or row.awaited in _TWINS
)
