"""AdamW: one step of the optimizer. It uses the gradient, and running means of the gradient and of its square.

reference    NumPy, float64
numba        one vectorised pass over the weights and both means
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats

# The constants of AdamW that Kingma and Ba 2015 recommend.
MEAN_KEPT, SQUARE_KEPT, EPSILON = 0.9, 0.999, 1e-8


def reference(weights: Any, gradient: Any, mean: Any, square: Any, step: int, rate: float, decay: float) -> None:
    """Update the weights and both means, all float32 (rows, columns). `step` counts from 1.

    `rate` is the learning rate. With a rate of 1, a step would subtract the share `decay` of each weight. (Loshchilov
    and Hutter 2019)
    """
    wide = gradient.astype(np.float64)
    new_mean = MEAN_KEPT * mean.astype(np.float64) + (1 - MEAN_KEPT) * wide
    new_square = SQUARE_KEPT * square.astype(np.float64) + (1 - SQUARE_KEPT) * wide * wide
    unbiased = new_square / (1 - SQUARE_KEPT**step)
    change = new_mean / (1 - MEAN_KEPT**step) / (np.sqrt(unbiased) + EPSILON)
    weights[:] = weights - rate * (change + decay * weights)
    mean[:], square[:] = new_mean, new_square


@jit
def adam_w(weights: Any, gradient: Any, mean: Any, square: Any, step: int, rate: float, decay: float) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    rest, square_rest = np.float32(1 - MEAN_KEPT), np.float32(1 - SQUARE_KEPT)
    kept, square_kept = np.float32(MEAN_KEPT), np.float32(SQUARE_KEPT)
    factor = np.float32(rate / (1 - MEAN_KEPT**step))
    square_factor, epsilon = np.float32(1 / (1 - SQUARE_KEPT**step)), np.float32(EPSILON)
    left = np.float32(1 - rate * decay)
    for row in range(np.uint64(weights.shape[0])):
        for i in range(np.uint64(weights.shape[1])):
            slope = gradient[row, i]
            new_mean = kept * mean[row, i] + rest * slope
            new_square = square_kept * square[row, i] + square_rest * slope * slope
            mean[row, i], square[row, i] = new_mean, new_square
            length = np.float32(np.sqrt(square_factor * new_square)) + epsilon
            weights[row, i] = left * weights[row, i] - factor * new_mean / length


def work() -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are weights.

    A weight takes fourteen operations, four reads and three writes.
    """
    return KernelWork(flops_per_element=14.0, bytes_per_element=7.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    weights, gradient, mean = floats(rng, 3, 3, size)
    return weights, gradient, mean, floats(rng, 3, size) ** 2, 1 + size, 0.1, 0.5


ADAM_W = Kernel("adam_w", reference, adam_w, work, (0, 2, 3), contract("adam_w"), _examples)
