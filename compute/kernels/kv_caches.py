"""The layouts of a KV cache, for processors and for GPUs, and arrays in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.halves import from_bits
from cbtop.compute.jit.vectors import LANES
from cbtop.compute.memory import zeros_on_huge_pages

CACHE_TYPES = {"f16": np.uint16, "f32": np.float32}  # the element type of a KV cache: uint16 has the bits of f16
POSITIONS = 64  # positions that attention processes together; a cache has a multiple of them


def empty_caches(kv_heads: int, context: int, head_dim: int, dtype: Any) -> tuple[Any, Any]:
    """Return keys (kv_heads, context / 16, head_dim, 16) and values (kv_heads, context, head_dim), zeros.

    The context is rounded up to a multiple of 64, the values' head_dim to one of 16. `dtype` is float32, or uint16
    for the bits of float16.
    """
    (caches,) = caches_of_layers(1, kv_heads, context, head_dim, dtype)
    return caches


def caches_of_layers(layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
    """Return `empty_caches` for each layer.

    They are on huge pages: a token reads them once, from memory, which takes 1.1 of the time from small pages
    (position 2,000, AMD EPYC).
    """
    positions = -(-context // POSITIONS) * POSITIONS
    of_one = (kv_heads, positions // LANES, head_dim, LANES), (kv_heads, positions, padded(head_dim))
    arrays = zeros_on_huge_pages(of_one * layers, dtype)
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def plain_caches(kv_heads: int, context: int, head_dim: int, dtype: Any, zeros: Any = np.zeros) -> tuple[Any, Any]:
    """Return keys and values in a GPU's layout, both (kv_heads, context, head_dim), made by `zeros`.

    They are views: each position is padded with zeros to a multiple of 16 numbers, so that whole vectors are read.
    """
    keys, values = (zeros((kv_heads, context, padded(head_dim)), dtype)[..., :head_dim] for _ in range(2))
    return keys, values


def padded(head_dim: int) -> int:
    """Return the numbers that a position takes in a cache: whole vectors."""
    return -(-head_dim // LANES) * LANES


def keys_of(k_cache: Any) -> Any:
    """Return the keys as (kv_heads, positions, head_dim), of float16 or float32."""
    if k_cache.ndim == 3:
        return from_bits(k_cache)
    kv_heads, _, head_dim, _ = k_cache.shape
    return from_bits(k_cache).transpose(0, 1, 3, 2).reshape(kv_heads, -1, head_dim)
