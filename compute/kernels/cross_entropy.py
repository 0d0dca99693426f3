"""Cross-entropy: the loss of each token, -log(softmax(logits)[target]).

reference    NumPy, float64
numba        two vectorised passes over a row: its maximum, then the sum of powers
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit, jit_inlined
from cbtop.compute.jit.exponential import EXPONENTIAL_FLOPS, exponential
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(logits: Any, targets: Any, losses: Any) -> None:
    """Set losses to the cross-entropy of each token in nats.

    logits: float32 (tokens, vocabulary); targets: int64 (tokens,); losses: float32 (tokens,).
    """
    wide = logits.astype(np.float64)
    above = wide - wide.max(axis=1, keepdims=True)
    losses[:] = np.log(np.exp(above).sum(axis=1)) - above[np.arange(len(targets)), targets]


@jit_inlined
def largest_of_row(logits: Any, t: Any) -> Any:
    """Return the largest number in row t of a matrix."""
    largest = logits[t, np.uint64(0)]
    for i in range(np.uint64(logits.shape[1])):
        largest = max(largest, logits[t, i])
    return largest


@jit
def cross_entropy(logits: Any, targets: Any, losses: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    for t in range(np.uint64(logits.shape[0])):
        largest, total = largest_of_row(logits, t), np.float32(0)
        for i in range(np.uint64(logits.shape[1])):
            total += exponential(np.float32(logits[t, i] - largest))
        losses[t] = np.float32(np.log(total)) + largest - logits[t, np.uint64(targets[t])]


def work() -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are logits.

    A logit takes a comparison, a subtraction, an exponential, an addition and two reads.
    """
    return KernelWork(flops_per_element=EXPONENTIAL_FLOPS + 3.0, bytes_per_element=2.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    logits, targets = 3 * floats(rng, 3, size + 1), rng.integers(1, size + 1, 3)
    return logits, targets, np.zeros(3, np.float32)


CROSS_ENTROPY = Kernel(
    "cross_entropy",
    reference,
    cross_entropy,
    work,
    (2,),
    contract("cross_entropy"),
    _examples,
    by_token=(0, 1, 2),
)
