"""The backward of attention: the gradients of queries, keys and values.

reference    NumPy, float64
numba        each token's softmax is computed again, with a running maximum, so that nothing of size tokens² is stored

The kernel works on a sequence that starts at position 0, without a cache. All keys and values belong to this pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit, jit_inlined
from cbtop.compute.jit.exponential import EXPONENTIAL_FLOPS, exponential
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(q: Any, k: Any, v: Any, scale: float, window: int, d_out: Any, d_q: Any, d_k: Any, d_v: Any) -> None:
    """Set d_q, d_k and d_v to the gradients of q, k and v. d_out is the gradient of the attention's output.

    q, d_out and d_q: float32 (tokens, heads, head_dim); the others: float32 (tokens, kv_heads, head_dim). A token
    sees only the last `window` positions, including its own (0: all positions).
    """
    tokens, kv_heads, head_dim = k.shape
    queries, d_outs = (one.reshape(tokens, kv_heads, -1, head_dim).astype(np.float64) for one in (q, d_out))
    keys, values = k.astype(np.float64), v.astype(np.float64)
    scores = scale * np.einsum("tkgd,pkd->kgtp", queries, keys)
    sees = np.tri(tokens, dtype=bool)
    if window:
        sees &= ~np.tri(tokens, k=-window, dtype=bool)
    weights = np.exp(np.where(sees, scores, -np.inf) - np.where(sees, scores, -np.inf).max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    d_weights = np.einsum("tkgd,pkd->kgtp", d_outs, values)
    d_scores = scale * weights * (d_weights - (weights * d_weights).sum(axis=3, keepdims=True))
    d_q[:] = np.einsum("kgtp,pkd->tkgd", d_scores, keys).reshape(q.shape)
    d_k[:] = np.einsum("kgtp,tkgd->pkd", d_scores, queries)
    d_v[:] = np.einsum("kgtp,tkgd->pkd", weights, d_outs)


@jit_inlined
def _dot(a: Any, t: Any, head: Any, b: Any, p: Any, kv_head: Any) -> Any:
    """Return a[t, head] . b[p, kv_head]."""
    total = np.float32(0)
    for i in range(np.uint64(a.shape[2])):
        total += a[t, head, i] * b[p, kv_head, i]
    return total


@jit
def attention_backward(
    q: Any, k: Any, v: Any, scale: float, window: int, d_out: Any, d_q: Any, d_k: Any, d_v: Any
) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    heads, head_dim, one = np.uint64(q.shape[1]), np.uint64(q.shape[2]), np.float32(1)
    group, factor = heads // np.uint64(k.shape[1]), np.float32(scale)
    d_q[:], d_k[:], d_v[:] = np.float32(0), np.float32(0), np.float32(0)
    for head in range(heads):
        of = head // group
        for t in range(np.uint64(q.shape[0])):
            end = t + np.uint64(1)
            first = end - np.uint64(window) if window and end > np.uint64(window) else np.uint64(0)
            largest = factor * _dot(q, t, head, k, first, of)
            # the sums of the weights, and of the weights times their gradients
            total, mean = np.float32(0), np.float32(0)
            for p in range(first, end):
                score = factor * _dot(q, t, head, k, p, of)
                if score > largest:
                    less = exponential(np.float32(largest - score))
                    total, mean, largest = total * less, mean * less, score
                weight = exponential(np.float32(score - largest))
                total += weight
                mean += weight * _dot(d_out, t, head, v, p, of)
            mean /= total
            for p in range(first, end):
                score = factor * _dot(q, t, head, k, p, of)
                weight = exponential(np.float32(score - largest)) * (one / total)
                d_score = factor * weight * (_dot(d_out, t, head, v, p, of) - mean)
                for i in range(head_dim):
                    d_q[t, head, i] += d_score * k[p, of, i]
                    d_k[p, of, i] += d_score * q[t, head, i]
                    d_v[p, of, i] += weight * d_out[t, head, i]


def work(head_dim: int, heads_per_key: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are heads x positions, added up over the
    tokens.

    Keys, values and their gradients are read once for all heads that share them. The gradients are also written.
    """
    return KernelWork(
        flops_per_element=14.0 * head_dim + 2.0 * EXPONENTIAL_FLOPS + 14.0,
        bytes_per_element=6.0 * FLOAT_BYTES * head_dim / heads_per_key,
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    """Return examples of arguments. head_dim is `size`, but at most 64."""
    tokens, kv_heads, group, head_dim = 9, 2, 3, min(size, 64)
    q, k, v = (floats(rng, tokens, heads, head_dim) for heads in (kv_heads * group, kv_heads, kv_heads))
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    # The scale of 2 makes only a few positions matter in the examples, even if a head has only one number.
    return q, k, v, 2.0 * head_dim**-0.5, 0 if size % 2 else 4, floats(rng, *q.shape), d_q, d_k, d_v


ATTENTION_BACKWARD = Kernel(
    "attention_backward",
    reference,
    attention_backward,
    work,
    (6, 7, 8),
    contract("attention_backward"),
    _examples,
)
