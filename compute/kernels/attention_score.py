"""Attention score: how much each new token's query agrees with every key up to its own position.

reference    a NumPy einsum over the keys of the group
numba        a dot product a (head, position), the query row staying in L1; one thread
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(q: Any, k_cache: Any, start: int, scale: float, scores: Any) -> None:
    """scores[t, h, p] = scale * q[t, h] . k_cache[h // group, p] for p <= start + t; the rest is left alone.

    q: float32 (tokens, heads * head_dim); k_cache: float32 (kv_heads, context, head_dim);
    scores: float32 (tokens, heads, context). A group of heads shares a key head (Ainslie et al. 2023).
    """
    tokens, heads, _ = scores.shape
    kv_heads, _, head_dim = k_cache.shape
    queries = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(np.float64)
    for t in range(tokens):
        keys = k_cache[:, : start + t + 1]  # (kv_heads, positions, head_dim)
        products = np.einsum("kgd,kpd->kgp", queries[t], keys)
        scores[t, :, : start + t + 1] = scale * products.reshape(heads, -1)


@jit
def attention_score(q: Any, k_cache: Any, start: int, scale: float, scores: Any) -> None:
    """As `reference`."""
    heads = np.uint64(scores.shape[1])
    group = heads // np.uint64(k_cache.shape[0])
    head_dim = np.uint64(k_cache.shape[2])
    factor = np.float32(scale)
    for t in range(np.uint64(scores.shape[0])):
        for head in range(heads):
            kv_head = head // group
            for p in range(np.uint64(start) + t + np.uint64(1)):
                total = np.float32(0)
                for i in range(head_dim):
                    total += q[t, head * head_dim + i] * k_cache[kv_head, p, i]
                scores[t, head, p] = total * factor


def work(head_dim: int, heads_per_key: int) -> KernelWork:
    """Elements are heads x positions, summed over the tokens. A key is read once for the heads that share it."""
    return KernelWork(
        flops_per_element=2.0 * head_dim + 1, bytes_per_element=FLOAT_BYTES * (head_dim / heads_per_key + 1.0)
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    tokens, heads, kv_heads, start, context = 3, 4, 2, size, size + 8
    q, k_cache = floats(rng, tokens, heads * size), floats(rng, kv_heads, context, size)
    return q, k_cache, start, 0.125, np.zeros((tokens, heads, context), np.float32)


ATTENTION_SCORE = Kernel("attention_score", reference, attention_score, work, (4,), 1e-5, _examples)
