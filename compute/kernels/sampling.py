"""Sampling: the greedy choice, the first token with the largest logit; or one drawn from the likeliest.

reference    NumPy's argmax; NumPy's stable sort, softmax and cumulative sum
numba        the same scan inside compiled code's buffers; one scan that keeps the few likeliest in order
cuda         all blocks find the largest. The last token of top_k, the last of top_p and the drawn one are each found
             in that one of 2,048 bins in which sums of weights pass their bound (cuda/sampling.py)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda import sampling as cuda
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, line
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.philox import uniform
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats

FEW = 256  # likeliest tokens that are kept in order as they come; more are found by sorting all


def reference(logits: Any, out: Any) -> None:
    """out[t] = argmax of logits[t]; logits: float32 (tokens, vocabulary), out: int64 (tokens,)."""
    out[:] = logits.argmax(axis=1)


@jit
def greedy(logits: Any, out: Any) -> None:
    """Like `reference`, in two passes: find the largest value (vectorised), then its first position."""
    vocabulary = np.uint64(logits.shape[1])
    for t in range(np.uint64(logits.shape[0])):
        largest = logits[t, np.uint64(0)]
        for i in range(vocabulary):
            largest = max(largest, logits[t, i])
        place = np.uint64(0)
        while place + np.uint64(1) < vocabulary and logits[t, place] != largest:
            place += np.uint64(1)
        out[t] = place


def work() -> KernelWork:
    """Elements are logits; a comparison each, not counted as an operation on floats, and one read."""
    return KernelWork(bytes_per_element=float(FLOAT_BYTES))


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    return floats(rng, 3, size + 1), np.zeros(3, np.int64)


def drawn_reference(
    logits: Any, temperature: float, top_k: int, top_p: float, seed: int, position: int, sequence: int, out: Any
) -> None:
    """out[0] = a token drawn from the softmax of logits[0] / temperature over the remaining tokens: the `top_k`
    likeliest (0: all; of equals the first), reduced to the fewest whose probabilities add up to `top_p` of theirs.

    logits: float32 (1, vocabulary), out: int64 (1,). The draw is number `position` of `sequence` by `seed`
    (`jit.philox.uniform`): the token at which the cumulative probability, the likeliest first, rises above it.
    """
    order = np.argsort(-logits[0], kind="stable")[: top_k or None]
    scaled = logits[0, order].astype(np.float64) / temperature
    cumulative = np.cumsum(np.exp(scaled - scaled[0]))
    kept = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1
    cumulative = cumulative[:kept]
    draw = uniform(np.uint64(position), np.uint64(sequence), np.uint64(seed)) * cumulative[-1]
    out[0] = order[min(int(np.searchsorted(cumulative, draw, "right")), len(cumulative) - 1)]


@jit
def _likeliest(logits: Any, wanted: Any) -> Any:
    """Return the places of the `wanted` largest logits, largest first, of equals the first one first."""
    vocabulary = logits.shape[1]
    if wanted > FEW:
        return np.argsort(-logits[0], kind="mergesort")[:wanted]
    order = np.empty(wanted, np.int64)
    count = 0
    for i in range(vocabulary):
        value = logits[0, i]
        if count == wanted and value <= logits[0, order[count - 1]]:
            continue
        at = count if count < wanted else count - 1
        while at > 0 and logits[0, order[at - 1]] < value:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
        count = min(count + 1, wanted)
    return order


@jit
def drawn(
    logits: Any, temperature: Any, top_k: Any, top_p: Any, seed: Any, position: Any, sequence: Any, out: Any
) -> None:
    """Like `drawn_reference`."""
    vocabulary = logits.shape[1]
    order = _likeliest(logits, min(top_k, vocabulary) if top_k > 0 else vocabulary)
    cumulative = np.empty(len(order), np.float64)
    largest, total = np.float64(logits[0, order[0]]) / temperature, 0.0
    for j in range(len(order)):
        total += math.exp(np.float64(logits[0, order[j]]) / temperature - largest)
        cumulative[j] = total
    kept = min(np.searchsorted(cumulative, top_p * total) + 1, len(order))
    draw = uniform(np.uint64(position), np.uint64(sequence), np.uint64(seed)) * cumulative[kept - 1]
    out[0] = order[min(np.searchsorted(cumulative[:kept], draw, "right"), kept - 1)]


CUDA = CudaModule("sampling", cuda.SAMPLING)  # keeps values between launches: one call at a time
GRID = line(cuda.BLOCKS, cuda.THREADS)


def launches(logits: Any, out: Any) -> tuple[CudaLaunch, ...]:
    """One launch for each token."""
    tokens, vocabulary = logits.shape
    return tuple(
        CudaLaunch(CUDA, "greedy", *GRID, (logits, out, np.int32(vocabulary), np.int32(row))) for row in range(tokens)
    )


def drawn_launches(
    logits: Any, temperature: float, top_k: int, top_p: float, seed: int, position: Any, sequence: Any, out: Any
) -> tuple[CudaLaunch, ...]:
    """Find the range of logits, their weights in bins, the last tokens of top_k and top_p if needed, and the draw."""
    vocabulary = logits.shape[1]

    def launch(entry: str, *more: Any) -> CudaLaunch:
        return CudaLaunch(CUDA, entry, *GRID, (logits, np.int32(vocabulary), np.float64(temperature), *more))

    found = [launch("find_logits_range"), launch("weigh_logits")]
    if 0 < top_k < vocabulary:
        found.append(launch("find_last", np.int32(top_k), np.float64(1)))
    if top_p < 1:
        found.append(launch("find_last", np.int32(0), np.float64(top_p)))
    return *found, launch("draw", np.uint64(seed), position, sequence, out)


def _drawn_examples(rng: np.random.Generator, size: int) -> Arguments:
    top_k = size if size < FEW / 2 else 0  # for many tokens all, which are found by sorting
    return floats(rng, 1, 3 * size), 0.8, top_k, 0.95, size, 7, 1, np.zeros(1, np.int64)


GREEDY = Kernel(
    "greedy",
    reference,
    greedy,
    work,
    (1,),
    contract("greedy"),
    _examples,
    by_token=(0, 1),
    cuda=CudaKernel((CUDA,), launches),
)
DRAWN = Kernel(
    "drawn",
    drawn_reference,
    drawn,
    work,
    (7,),
    contract("drawn"),
    _drawn_examples,
    cuda=CudaKernel((CUDA,), drawn_launches),
)
