"""Tools for Numba kernels: the decorators and their cache, AVX-512 vectors, and the exponential."""

from __future__ import annotations

import os

from cbtop.compute.errors import ComputeError


def _refuse_no_threads() -> None:
    """Raise ComputeError if NUMBA_NUM_THREADS is too small. Importing Numba would raise a ValueError."""
    try:
        threads = int(os.environ["NUMBA_NUM_THREADS"])
    except (KeyError, ValueError):  # if the setting is not a number, Numba logs a warning and uses its default
        return
    if threads < 1:
        raise ComputeError(f"NUMBA_NUM_THREADS is {threads}: kernels run on 1 thread or more; unset it")


_refuse_no_threads()
