"""Tests of attention on a GPU: at the sizes of real models, and at the edges of the pieces that it works on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbtop.compute.gpu.device import Gpu
from cbtop.compute.kernels import attention
from cbtop.compute.kernels.base import floats
from cbtop.compute.kernels.kv_caches import CACHE_TYPES, plain_caches

pytestmark = pytest.mark.gpu
TOLERANCE = attention.ATTENTION.contract.tolerance
HELD = 50.0


class _Call:
    """A call of attention. Its caches contain NaN in all positions that must not be read."""

    def __init__(
        self, gpu: Gpu, dtype: Any, tokens: int, start: int, heads: int, kv_heads: int, head_dim: int, window: int,
        cap: float
    ) -> None:  # fmt: skip
        rng = np.random.default_rng([tokens, start, head_dim])
        first, end = attention.first_seen(start, window), start + tokens
        caches = plain_caches(kv_heads, end + 70, head_dim, dtype)
        for cache in caches:
            numbers = floats(rng, *cache.shape)
            numbers[:, :first] = numbers[:, end:] = np.nan
            cache[...] = numbers.astype(np.float16).view(np.uint16) if dtype == np.uint16 else numbers
        self.q = 2 * floats(rng, tokens, heads * head_dim)
        self._gpu, self._caches, self._start = gpu, caches, start
        self._scores = head_dim**-0.5, window, cap
        on_gpu = [gpu.zeros(one.base.shape, dtype)[..., :head_dim] for one in caches]
        for to, one in zip(on_gpu, caches, strict=True):
            to[...] = gpu.array(np.ascontiguousarray(one))
        self.start, self.out = gpu.array(np.array([start], np.int32)), gpu.zeros(self.q.shape, np.float32)
        self._scratch = gpu.zeros(attention.scratch_shape(gpu.multiprocessors), np.float32)
        self._arguments = gpu.array(self.q), *on_gpu, self.start, *self._scores, self.out, self._scratch

    def found(self) -> Any:
        self.out.fill(np.nan)
        self._gpu.run(attention.ATTENTION, *self._arguments)
        return self._gpu.host(self.out)

    def error(self, found: Any, start: int | None = None) -> float:
        """Return the largest error of the outputs, divided by the largest output."""
        expected = np.empty_like(self.q)
        at = self._start if start is None else start
        attention.reference(self.q, *self._caches, at, *self._scores, expected, None)
        return float(np.abs(found - expected).max() / np.abs(expected).max())


# shapes of calls: tokens, start, heads, kv_heads, head_dim, window, cap
SHAPES = [
    (1, 0, 28, 4, 128, 0, 0.0), (1, 63, 28, 4, 128, 0, 0.0), (1, 1000, 28, 4, 128, 0, 0.0),
    (1, 8191, 28, 4, 128, 0, 0.0), (3, 500, 28, 4, 128, 0, 0.0), (1, 2000, 14, 2, 64, 0, 0.0),
    (1, 300, 32, 32, 96, 0, 0.0), (1, 900, 20, 1, 64, 0, 0.0), (1, 4000, 8, 4, 256, 1024, HELD),
    (40, 60, 8, 4, 256, 0, HELD), (64, 100, 28, 4, 128, 0, 0.0), (200, 700, 28, 4, 128, 300, 0.0),
    (130, 0, 14, 2, 64, 0, HELD), (70, 30, 32, 32, 96, 0, 0.0), (65, 0, 3, 3, 80, 20, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", CACHE_TYPES.values(), ids=CACHE_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_of_models_agree_with_the_reference_call_by_call(gpu: Gpu, shape: tuple[Any, ...], dtype: Any) -> None:
    call = _Call(gpu, dtype, *shape)
    first = call.found()
    assert call.error(first) <= TOLERANCE
    # The second call has the same result, so the first call has reset the scratch memory.
    np.testing.assert_array_equal(call.found(), first)


@pytest.mark.parametrize("tokens", [1, 70])
def test_the_position_is_the_one_that_stands_on_the_device_when_it_runs(gpu: Gpu, tokens: int) -> None:
    call = _Call(gpu, np.uint16, tokens, 900, 28, 4, 128, 0, 0.0)
    call.found()
    for start in (0, 17, 500):
        call.start.fill(start)
        assert call.error(call.found(), start) <= TOLERANCE
