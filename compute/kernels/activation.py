"""SwiGLU: silu(gate) * up, the gate of the feed-forward network.

reference    NumPy, float64
numba        one vectorised pass with its own exponential (3.2-3.9x of NumPy)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.exponential import EXPONENTIAL_FLOPS, exponential
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(gate: Any, up: Any, out: Any) -> None:
    """out = gate / (1 + exp(-gate)) * up; all float32 (tokens, feed_forward). (Shazeer 2020)"""
    wide = gate.astype(np.float64)
    out[:] = wide * (0.5 * (1 + np.tanh(wide / 2))) * up  # the logistic function, with nothing to overflow


@jit
def swiglu(gate: Any, up: Any, out: Any) -> None:
    """As `reference`."""
    columns = np.uint64(gate.shape[1])
    for t in range(np.uint64(gate.shape[0])):
        for i in range(columns):
            value = gate[t, i]
            out[t, i] = value / (np.float32(1) + exponential(np.float32(-value))) * up[t, i]


def work() -> KernelWork:
    """Elements are outputs. Negate, exponential, add, divide, multiply; two readings, one writing."""
    return KernelWork(flops_per_element=EXPONENTIAL_FLOPS + 4.0, bytes_per_element=3.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    return 10 * floats(rng, 3, size), floats(rng, 3, size), np.zeros((3, size), np.float32)


SWIGLU = Kernel("swiglu", reference, swiglu, work, (2,), contract("swiglu"), _examples)
