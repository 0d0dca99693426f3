"""The backward of cross-entropy.

It computes the gradient of the mean loss, (softmax(logits) - 1 at the target) / tokens.

reference    NumPy, float64
numba        three vectorised passes over a row: its maximum, the powers and their sum, the division
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.exponential import EXPONENTIAL_FLOPS, exponential
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats
from cbtop.compute.kernels.cross_entropy import largest_of_row


def reference(logits: Any, targets: Any, d_logits: Any) -> None:
    """Set d_logits to the gradient of the mean cross-entropy of all tokens.

    logits, d_logits: float32 (tokens, vocabulary); targets: int64 (tokens,).
    """
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    softmax = powers / powers.sum(axis=1, keepdims=True)
    softmax[np.arange(len(targets)), targets] -= 1
    d_logits[:] = softmax / len(targets)


@jit
def cross_entropy_backward(logits: Any, targets: Any, d_logits: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    tokens, vocabulary, one = logits.shape[0], np.uint64(logits.shape[1]), np.float32(1)
    for t in range(np.uint64(tokens)):
        largest, total = largest_of_row(logits, t), np.float32(0)
        for i in range(vocabulary):
            power = exponential(np.float32(logits[t, i] - largest))
            d_logits[t, i] = power
            total += power
        factor = np.float32(one / (total * np.float32(tokens)))
        for i in range(vocabulary):
            d_logits[t, i] *= factor
        d_logits[t, np.uint64(targets[t])] -= one / np.float32(tokens)


def work() -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are logits.

    A logit takes a comparison, a subtraction, an exponential, an addition, a multiplication, three reads and two
    writes.
    """
    return KernelWork(flops_per_element=EXPONENTIAL_FLOPS + 4.0, bytes_per_element=5.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    logits, targets = 3 * floats(rng, 3, size + 1), rng.integers(1, size + 1, 3)
    return logits, targets, np.zeros((3, size + 1), np.float32)


CROSS_ENTROPY_BACKWARD = Kernel(
    "cross_entropy_backward",
    reference,
    cross_entropy_backward,
    work,
    (2,),
    contract("cross_entropy_backward"),
    _examples,
)
