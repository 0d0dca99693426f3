"""The kernels, with one file per operation."""

# The table is imported on first use, because it loads Numba, which takes half a second.

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbtop.compute.kernels.base import Kernel


def all_kernels() -> tuple[Kernel, ...]:
    """Return all kernels, in the order of a token's pass (table.py)."""
    from cbtop.compute.kernels.table import KERNELS

    return KERNELS
