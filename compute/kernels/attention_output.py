"""Attention output: the values of all positions a token sees, weighted by its softmax.

reference    a NumPy einsum over the values of the group
numba        four positions a pass over the head's output row, which stays in L1; one thread
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(weights: Any, v_cache: Any, start: int, out: Any) -> None:
    """out[t, h] = sum over p <= start + t of weights[t, h, p] * v_cache[h // group, p].

    weights: float32 (tokens, heads, context); v_cache: float32 (kv_heads, context, head_dim);
    out: float32 (tokens, heads * head_dim).
    """
    tokens, heads, _ = weights.shape
    kv_heads = v_cache.shape[0]
    for t in range(tokens):
        seen = weights[t, :, : start + t + 1].reshape(kv_heads, heads // kv_heads, -1).astype(np.float64)
        out[t] = np.einsum("kgp,kpd->kgd", seen, v_cache[:, : start + t + 1]).reshape(-1)


@jit
def attention_output(weights: Any, v_cache: Any, start: int, out: Any) -> None:
    """As `reference`."""
    heads = np.uint64(weights.shape[1])
    group = heads // np.uint64(v_cache.shape[0])
    head_dim = np.uint64(v_cache.shape[2])
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    for t in range(np.uint64(weights.shape[0])):
        positions = np.uint64(start) + t + one
        for head in range(heads):
            kv_head, first = head // group, head * head_dim
            for i in range(head_dim):
                out[t, first + i] = np.float32(0)
            p = np.uint64(0)
            while p + three < positions:
                a, b = weights[t, head, p], weights[t, head, p + one]
                c, d = weights[t, head, p + two], weights[t, head, p + three]
                for i in range(head_dim):
                    out[t, first + i] += (
                        a * v_cache[kv_head, p, i]
                        + b * v_cache[kv_head, p + one, i]
                        + c * v_cache[kv_head, p + two, i]
                        + d * v_cache[kv_head, p + three, i]
                    )
                p += np.uint64(4)
            while p < positions:
                a = weights[t, head, p]
                for i in range(head_dim):
                    out[t, first + i] += a * v_cache[kv_head, p, i]
                p += one


def work(head_dim: int, heads_per_value: int) -> KernelWork:
    """Elements are heads x positions, summed over the tokens. A value is read once for the heads that share it."""
    return KernelWork(
        flops_per_element=2.0 * head_dim, bytes_per_element=FLOAT_BYTES * (head_dim / heads_per_value + 1.0)
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    tokens, heads, kv_heads, start, context = 3, 4, 2, size, size + 8
    weights, v_cache = floats(rng, tokens, heads, context), floats(rng, kv_heads, context, size)
    return weights, v_cache, start, np.zeros((tokens, heads * size), np.float32)


ATTENTION_OUTPUT = Kernel("attention_output", reference, attention_output, work, (3,), 1e-5, _examples)
