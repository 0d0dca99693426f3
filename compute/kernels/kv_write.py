"""KV write: puts the new keys and values where attention finds them, head by head.

reference    a transposed NumPy assignment
numba        the same copy without NumPy's temporaries and call overhead
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(k: Any, v: Any, start: int, k_cache: Any, v_cache: Any) -> None:
    """k, v: float32 (tokens, kv_heads * head_dim); the caches: float32 (kv_heads, context, head_dim)."""
    tokens = k.shape[0]
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache[:, start : start + tokens] = new.reshape(tokens, *cache.shape[::2]).transpose(1, 0, 2)


@jit
def kv_write(k: Any, v: Any, start: int, k_cache: Any, v_cache: Any) -> None:
    """As `reference`."""
    head_dim = np.uint64(k_cache.shape[2])
    for t in range(np.uint64(k.shape[0])):
        position = np.uint64(start) + t
        for head in range(np.uint64(k_cache.shape[0])):
            for i in range(head_dim):
                k_cache[head, position, i] = k[t, head * head_dim + i]
                v_cache[head, position, i] = v[t, head * head_dim + i]


def work() -> KernelWork:
    """Elements are values written, keys and values both; each is read once and written once."""
    return KernelWork(bytes_per_element=2.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    caches = floats(rng, 2, size + 9, size), floats(rng, 2, size + 9, size)
    return floats(rng, 5, 2 * size), floats(rng, 5, 2 * size), 4, *caches


KV_WRITE = Kernel("kv_write", reference, kv_write, work, (3, 4), 0.0, _examples)
