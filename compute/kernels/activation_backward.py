"""The backward of SwiGLU and GEGLU. It computes the gradients of gate and up from the gradient of their output.

reference    NumPy, float64
numba        one vectorised pass with its own exponential
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cbtop.compute.activations import CUBIC, LINEAR, each_sigmoid
from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.exponential import EXPONENTIAL_FLOPS
from cbtop.compute.kernels.activation import Activation
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(gate: Any, up: Any, d_out: Any, d_gate: Any, d_up: Any) -> None:
    """Set d_gate and d_up to the gradients of silu(gate) * up, times d_out.

    All arrays are float32 (tokens, feed_forward).
    """
    wide = gate.astype(np.float64)
    # The logistic function, in a form that cannot overflow: 0.5 * (1 + tanh(x / 2)).
    part = 0.5 * (1 + np.tanh(wide / 2))
    d_gate[:] = d_out * up * part * (1 + wide * (1 - part))
    d_up[:] = d_out * wide * part


@jit
def swiglu_backward(gate: Any, up: Any, d_out: Any, d_gate: Any, d_up: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    columns, one = np.uint64(gate.shape[1]), np.float32(1)
    for t in range(np.uint64(gate.shape[0])):
        for i in range(columns):
            value = gate[t, i]
            part = each_sigmoid(value)
            d_gate[t, i] = d_out[t, i] * up[t, i] * part * (one + value * (one - part))
            d_up[t, i] = d_out[t, i] * value * part


def work() -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs.

    An output takes an exponential, eleven other operations, three reads and two writes.
    """
    return KernelWork(flops_per_element=EXPONENTIAL_FLOPS + 11.0, bytes_per_element=5.0 * FLOAT_BYTES)


def geglu_reference(gate: Any, up: Any, d_out: Any, d_gate: Any, d_up: Any) -> None:
    """Set d_gate and d_up to the gradients of gelu(gate) * up, times d_out. Shapes as in `reference`."""
    wide = gate.astype(np.float64)
    slope = np.sqrt(2 / np.pi)
    tangent = np.tanh(slope * (wide + 0.044715 * wide**3))
    inner = slope * (1 + 3 * 0.044715 * wide**2)
    d_gate[:] = d_out * up * 0.5 * (1 + tangent + wide * (1 - tangent**2) * inner)
    d_up[:] = d_out * 0.5 * wide * (1 + tangent)


@jit
def geglu_backward(gate: Any, up: Any, d_out: Any, d_gate: Any, d_up: Any) -> None:
    """Compute the same as the function `geglu_reference`, in code that Numba compiles."""
    columns, one, three = np.uint64(gate.shape[1]), np.float32(1), np.float32(3)
    for t in range(np.uint64(gate.shape[0])):
        for i in range(columns):
            value = gate[t, i]
            square = CUBIC * value * value
            part = each_sigmoid(value * (LINEAR + square))
            slope = value * (one - part) * (LINEAR + three * square)
            d_gate[t, i] = d_out[t, i] * up[t, i] * part * (one + slope)
            d_up[t, i] = d_out[t, i] * value * part


def geglu_work() -> KernelWork:
    """Return the work of a call of GEGLU's backward. It is the same as in `work`, plus seven operations for the cube
    and its derivative.
    """
    return KernelWork(flops_per_element=EXPONENTIAL_FLOPS + 18.0, bytes_per_element=5.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    outs = np.zeros((2, 3, size), np.float32)
    return 3 * floats(rng, 3, size), floats(rng, 3, size), floats(rng, 3, size), *outs


def _kernel(name: str, reference: Any, implementation: Any, work: Any) -> Kernel:
    rows, outputs = (0, 1, 2, 3, 4), (3, 4)
    return Kernel(name, reference, implementation, work, outputs, contract(name), _examples, by_token=rows)


SWIGLU_BACKWARD = _kernel("swiglu_backward", reference, swiglu_backward, work)
GEGLU_BACKWARD = _kernel("geglu_backward", geglu_reference, geglu_backward, geglu_work)
ACTIVATIONS_BACKWARD: Mapping[Activation, Kernel] = {"silu": SWIGLU_BACKWARD, "gelu": GEGLU_BACKWARD}
