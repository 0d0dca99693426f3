"""Route: which experts each token takes, with what weights, and the tokens of each expert together.

reference    NumPy, float64
numba        the next largest logit, as often as experts are taken; then pairs are counted into the order of experts

A pair is a token and one of its experts. In the order of experts each one's weights are read once for all its tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.exponential import EXPONENTIAL_FLOPS, exponential
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats
from cbtop.compute.kernels.quantize_rows import INFINITE, MAGNITUDE, NOT_A_NUMBER

LEAST = np.float32(-3e38)  # the place of a logit that is no finite number: after all others


def reference(logits: Any, normalised: bool, scale: Any, weights: Any, places: Any, tokens: Any, starts: Any) -> None:
    """logits: float32 (tokens, experts). Of each token the experts of the largest, largest first, of equal ones the
    first: weights float32 (tokens, used), softmax over these where `normalised`, else over all, times `scale`.

    Pairs ordered by expert, then token: places int64 (tokens, used) says where each stands, tokens int64
    (tokens * used,) whose it is, and those of expert e stand from starts[e] to starts[e + 1], int64 (experts + 1,).
    """
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : weights.shape[1]]
    chances = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    taken = np.take_along_axis(chances, chosen, axis=1)
    weights[:] = scale * taken / (taken if normalised else chances).sum(axis=1, keepdims=True)
    order = np.argsort(chosen.reshape(-1), kind="stable")
    tokens[:] = order // chosen.shape[1]
    places.reshape(-1)[order] = np.arange(order.size)
    starts[:] = np.searchsorted(chosen.reshape(-1)[order], np.arange(len(starts)))


@jit
def _value(logits: Any, t: Any, expert: Any) -> Any:
    value = np.float32(logits[t, expert])
    return value if (value.view(np.int32) & MAGNITUDE) < INFINITE else LEAST


@jit
def route(logits: Any, normalised: Any, scale: Any, weights: Any, places: Any, tokens: Any, starts: Any) -> None:
    """As `reference`; the weights of a token with a logit that is not finite are NaN."""
    experts, used = logits.shape[1], weights.shape[1]
    starts[:] = 0
    for t in range(logits.shape[0]):
        last, last_value = -1, np.float32(0)
        for j in range(used):
            best, best_value = -1, np.float32(0)
            for expert in range(experts):
                value = _value(logits, t, expert)
                follows = last < 0 or value < last_value or (value == last_value and expert > last)
                if follows and (best < 0 or value > best_value):
                    best, best_value = expert, value
            places[t, j] = best  # for now
            weights[t, j] = best_value
            starts[best + 1] += 1
            last, last_value = best, best_value
        _weigh(logits, t, normalised, np.float32(scale), weights)
    for expert in range(experts):
        starts[expert + 1] += starts[expert]
    # Each start counts up to the next one, and goes back by as much as it has counted.
    for t in range(logits.shape[0]):
        for j in range(used):
            expert = places[t, j]
            places[t, j] = starts[expert]
            tokens[starts[expert]] = t
            starts[expert] += 1
    for expert in range(experts, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@jit
def _weigh(logits: Any, t: Any, normalised: Any, scale: Any, weights: Any) -> None:
    """Makes of weights[t], the largest logits, what they are to be."""
    largest, total = weights[t, 0], np.float32(0)
    is_finite: Any = True
    for expert in range(logits.shape[1]):
        is_finite = is_finite and (np.float32(logits[t, expert]).view(np.int32) & MAGNITUDE) < INFINITE
        if not normalised:
            total += exponential(np.float32(_value(logits, t, expert) - largest))
    for j in range(weights.shape[1]):
        weights[t, j] = exponential(np.float32(weights[t, j] - largest))
        if normalised:
            total += weights[t, j]
    for j in range(weights.shape[1]):
        weights[t, j] = scale * weights[t, j] / total if is_finite else np.int32(NOT_A_NUMBER).view(np.float32)


def work(used: int) -> KernelWork:
    """Elements are logits: each is compared for every expert that is taken, and has an exponential, at most."""
    return KernelWork(flops_per_element=used + EXPONENTIAL_FLOPS + 1.0, bytes_per_element=FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    token_count, experts, used = 3, size + 3, 2
    pairs = token_count, used
    return (
        floats(rng, token_count, experts),
        True,
        1.0,
        np.zeros(pairs, np.float32),
        np.zeros(pairs, np.int64),
        np.zeros(token_count * used, np.int64),
        np.zeros(experts + 1, np.int64),
    )


ROUTE = Kernel("route", reference, route, work, (3, 4, 5, 6), contract("route"), _examples)
