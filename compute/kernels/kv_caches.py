"""The layouts of a KV cache on processors and on GPUs, and functions that make arrays in these layouts."""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.halves import from_bits
from cbtop.compute.jit.vectors import LANES
from cbtop.compute.memory import zeros_on_huge_pages

# Types of the elements of a KV cache; uint16 has the bits of a float16.
CACHE_TYPES = {"f16": np.uint16, "f32": np.float32}
POSITIONS = 64  # number of positions that attention processes at a time; the size of a cache is a multiple of this


def empty_caches(kv_heads: int, context: int, head_dim: int, dtype: Any) -> tuple[Any, Any]:
    """Return keys (kv_heads, context / 16, head_dim, 16) and values (kv_heads, context, head_dim), filled with zeros.

    The context is rounded up to a multiple of 64, and head_dim of the values to a multiple of 16. `dtype` is float32,
    or uint16 for the bits of float16.
    """
    (caches,) = caches_of_layers(1, kv_heads, context, head_dim, dtype)
    return caches


def caches_of_layers(layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
    """Return the arrays of `empty_caches` for each layer, on huge pages.

    With small pages, reading the caches of a token takes 1.1 times as long (position 2,000, AMD EPYC).
    """
    positions = -(-context // POSITIONS) * POSITIONS
    of_one = (kv_heads, positions // LANES, head_dim, LANES), (kv_heads, positions, padded(head_dim))
    arrays = zeros_on_huge_pages(of_one * layers, dtype)
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def plain_caches(kv_heads: int, context: int, head_dim: int, dtype: Any, zeros: Any = np.zeros) -> tuple[Any, Any]:
    """Return keys and values in a GPU's layout, both (kv_heads, context, head_dim). `zeros` makes the arrays.

    Both are views of larger arrays. There, zeros pad each position to a multiple of 16 numbers, so that kernels can
    read whole vectors.
    """
    keys, values = (zeros((kv_heads, context, padded(head_dim)), dtype)[..., :head_dim] for _ in range(2))
    return keys, values


def padded(head_dim: int) -> int:
    """Return how many numbers a position takes in a cache. This is head_dim, rounded up to whole vectors."""
    return -(-head_dim // LANES) * LANES


def keys_of(k_cache: Any) -> Any:
    """Return the keys as an array (kv_heads, positions, head_dim) of float16 or float32."""
    if k_cache.ndim == 3:
        return from_bits(k_cache)
    kv_heads, _, head_dim, _ = k_cache.shape
    return from_bits(k_cache).transpose(0, 1, 3, 2).reshape(kv_heads, -1, head_dim)
