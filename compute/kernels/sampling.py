"""Sampling: the first token with the largest logit (greedy), or a token drawn from the likeliest ones.

reference    greedy: NumPy's argmax; drawn: NumPy's stable sort, softmax and cumulative sum
numba        greedy: one scan for the largest; drawn: one scan that keeps the likeliest few in order
cuda         greedy: all blocks search for the largest; drawn: sums of weights in 2,048 bins find the last token of
             top_k, the last of top_p and the drawn token (cuda/sampling.py)
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

# If `top_k` is at most this number, one scan keeps the likeliest tokens in order. Otherwise, all tokens are sorted.
FEW = 256


def reference(logits: Any, out: Any) -> None:
    """Set out[t] = argmax of logits[t]. logits: float32 (tokens, vocabulary); out: int64 (tokens,)."""
    out[:] = logits.argmax(axis=1)


@jit
def greedy(logits: Any, out: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    A first pass finds the largest value (vectorised). A second pass finds its first position.
    """
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
    """Return the work of a call: its FLOP and bytes. The elements of a call are logits. Each logit is read once.

    Comparisons are not counted, because they are not operations on floats.
    """
    return KernelWork(bytes_per_element=float(FLOAT_BYTES))


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    return floats(rng, 3, size + 1), np.zeros(3, np.int64)


def drawn_reference(
    logits: Any, temperature: float, top_k: int, top_p: float, seed: int, position: int, sequence: int, out: Any
) -> None:
    """Set out[0] to a token drawn from the softmax of logits[0] / temperature over the likeliest tokens.

    First, the `top_k` tokens with the largest logits are chosen (0: all; equal logits keep their order). Only the
    likeliest of these remain: as few as have together `top_p` of the total probability.

    The draw is number `position` of `sequence` with `seed` (`jit.philox.uniform`). Probabilities are added, largest
    first, until the sum exceeds the draw. The last added token is drawn.

    logits: float32 (1, vocabulary). out: int64 (1,).
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
    """Return the tokens with the `wanted` largest logits, largest first. If logits are equal, the earlier token comes
    first.
    """
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
    """Compute the same as the function `drawn_reference`, in code that Numba compiles."""
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


# calls must not overlap, because the CUDA module keeps values between launches
CUDA = CudaModule("sampling", cuda.SAMPLING)
GRID = line(cuda.BLOCKS, cuda.THREADS)


def launches(logits: Any, out: Any) -> tuple[CudaLaunch, ...]:
    """Return one launch for each token."""
    tokens, vocabulary = logits.shape
    return tuple(
        CudaLaunch(CUDA, "greedy", *GRID, (logits, out, np.int32(vocabulary), np.int32(row))) for row in range(tokens)
    )


def drawn_launches(
    logits: Any, temperature: float, top_k: int, top_p: float, seed: int, position: Any, sequence: Any, out: Any
) -> tuple[CudaLaunch, ...]:
    """Return launches that draw a token.

    They find the range of logits, the weights of bins, the last tokens of top_k and top_p, and the drawn token.
    """
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
    top_k = size if size < FEW / 2 else 0  # in large examples, `top_k` is so large that all tokens are sorted
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
