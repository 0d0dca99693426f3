"""Tests of attention computed in pieces: it is right at any size. No token reads a position that it must not see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbtop.compute import brick_specs
from cbtop.compute.cuda.launches import CudaLaunch
from cbtop.compute.kernels.attention import (
    ATTENTION,
    MANY_OF_HALVES,
    first_seen,
    launches,
    positions_seen,
    scratch_shape,
)
from cbtop.compute.kernels.attention_bf16 import ATTENTION_BF16
from cbtop.compute.kernels.attention_loops import scratch_for
from cbtop.compute.kernels.base import Kernel, floats
from cbtop.compute.kernels.kv_caches import CACHE_TYPES, empty_caches, keys_of, plain_caches
from cbtop.compute.kernels.kv_write import reference as kv_write_reference

IN_BOTH = pytest.mark.parametrize("kernel", [ATTENTION, ATTENTION_BF16], ids=lambda kernel: kernel.name)
ROUNDED = brick_specs.ROUNDED.tolerance


def _halves(values: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return values.astype(np.float16).view(np.uint16)


@IN_BOTH
@settings(max_examples=settings.default.max_examples * 2)
@given(
    tokens=st.integers(1, 20),
    start=st.integers(0, 150),
    kv_heads=st.integers(1, 3),
    # If 70 heads share keys and values, there are more rows than a piece contains.
    group=st.one_of(st.integers(1, 9), st.just(70)),
    head_dim=st.integers(1, 40),
    threads=st.integers(1, 2),
    is_short=st.booleans(),
    window=st.one_of(st.just(0), st.integers(1, 200)),
    cap=st.sampled_from([0.0, 0.5, 50.0]),
    seed=st.integers(0, 999),
)
@pytest.mark.slow
def test_any_size_agrees_with_the_reference_if_unseen_positions_are_nan(
    kernel: Kernel,
    tokens: int,
    start: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    threads: int,
    is_short: bool,
    window: int,
    cap: float,
    seed: int,
) -> None:
    rng, is_bf16 = np.random.default_rng(seed), kernel is ATTENTION_BF16
    head_dim += is_bf16 and head_dim % 2
    k_cache, v_cache = empty_caches(kv_heads, start + tokens + 70, head_dim, np.float32)
    k_cache[:], v_cache[:] = floats(rng, *k_cache.shape), floats(rng, *v_cache.shape)
    first = first_seen(start, window)
    v_cache[:, start + tokens :] = v_cache[:, :first] = np.nan
    keys = k_cache.transpose(0, 1, 3, 2).reshape(kv_heads, -1, head_dim)
    keys[:, start + tokens :] = keys[:, :first] = np.nan
    k_cache[:] = keys.reshape(kv_heads, -1, 16, head_dim).transpose(0, 1, 3, 2)
    if is_short or is_bf16:
        k_cache, v_cache = _halves(k_cache), _halves(v_cache)
    q = 3 * floats(rng, tokens, kv_heads * group * head_dim)
    found, expected = np.full_like(q, np.nan), np.empty_like(q)
    scratch = scratch_for(threads, head_dim)
    scratch[:] = np.nan
    kernel.implementation(q, k_cache, v_cache, start, head_dim**-0.5, window, cap, found, scratch)
    kernel.reference(q, k_cache, v_cache, start, head_dim**-0.5, window, cap, expected, scratch)
    assert np.abs(found - expected).max() <= (ROUNDED if is_bf16 else 1e-5) * np.abs(expected).max()


@given(start=st.integers(0, 50), tokens=st.integers(1, 50), window=st.integers(0, 60))
def test_positions_seen_are_those_of_each_token_added_up(start: int, tokens: int, window: int) -> None:
    each = [position + 1 - first_seen(position, window) for position in range(start, start + tokens)]
    assert positions_seen(start, tokens, window) == sum(each)
    assert not window or max(each) <= window


@IN_BOTH
def test_a_score_far_above_the_others_takes_all_and_nothing_overflows(kernel: Kernel) -> None:
    k_cache, v_cache = empty_caches(1, 128, 16, np.float32)
    k_cache[0, 5, :, 3] = 1e4  # position 83
    v_cache[0, :, 0] = np.arange(128)
    q, out = np.full((1, 16), 1e4, np.float32), np.zeros((1, 16), np.float32)
    tolerance = 1e-6
    if kernel is ATTENTION_BF16:
        k_cache, v_cache, tolerance = _halves(k_cache), _halves(v_cache), ROUNDED
    kernel.implementation(q, k_cache, v_cache, 120, 1.0, 0, 0.0, out, scratch_for(1, 16))
    np.testing.assert_allclose(out[0, 0], 83, rtol=tolerance)
    kernel.implementation(-q, k_cache, v_cache, 120, 1.0, 0, 0.0, out, scratch_for(1, 16))
    np.testing.assert_allclose(out[0, 0], np.delete(np.arange(121), 83).mean(), rtol=tolerance)


def test_a_large_value_with_a_negligible_score_adds_nothing() -> None:
    k_cache, v_cache = empty_caches(1, 128, 16, np.float32)
    k_cache[0, 4:, 0], v_cache[0, :64], v_cache[0, 64:] = 200, 1e30, 1
    q, out = np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32)
    q[0, 0] = 1
    ATTENTION.implementation(q, k_cache, v_cache, 127, 1.0, 0, 0.0, out, scratch_for(1, 16))
    np.testing.assert_allclose(out, np.ones_like(out), rtol=1e-5)


@IN_BOTH
@given(rises=st.lists(st.floats(-60, 60), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_rising_scores_are_weighed_as_if_all_were_known_in_advance(
    kernel: Kernel, rises: list[float], seed: int
) -> None:
    rng, positions = np.random.default_rng(seed), 64 * len(rises)
    k_cache, v_cache = empty_caches(1, positions, 16, np.float32)
    v_cache[:] = floats(rng, *v_cache.shape)
    scores = np.repeat(np.cumsum(rises), 64) + floats(rng, positions)
    k_cache[0, :, 0] = scores.reshape(-1, 16)
    if is_bf16 := kernel is ATTENTION_BF16:
        k_cache, v_cache = _halves(k_cache), _halves(v_cache)
    q = np.zeros((1, 16), np.float32)
    q[0, 0] = 1
    found, expected = np.zeros_like(q), np.zeros_like(q)
    kernel.implementation(q, k_cache, v_cache, positions - 1, 1.0, 0, 0.0, found, scratch_for(1, 16))
    kernel.reference(q, k_cache, v_cache, positions - 1, 1.0, 0, 0.0, expected, None)
    assert np.abs(found - expected).max() <= (ROUNDED if is_bf16 else 1e-4) * np.abs(expected).max()


@IN_BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@given(
    position=st.integers(0, 130),
    group=st.integers(1, 6),
    is_in_value=st.booleans(),
    cap=st.sampled_from([0.0, 50.0]),
    seed=st.integers(0, 999),
)
def test_a_non_finite_key_or_value_that_is_seen_makes_the_output_non_finite(
    kernel: Kernel, value: float, position: int, group: int, is_in_value: bool, cap: float, seed: int
) -> None:
    rng, start, head_dim = np.random.default_rng(seed), 130, 32
    k_cache, v_cache = empty_caches(2, start + 1, head_dim, np.float32)
    k_cache[:], v_cache[:] = floats(rng, *k_cache.shape), floats(rng, *v_cache.shape)
    if is_in_value:
        v_cache[1, position] = value
    else:
        k_cache[1, position // 16, :, position % 16] = value
    if kernel is ATTENTION_BF16:
        k_cache, v_cache = _halves(k_cache), _halves(v_cache)
    q = floats(rng, 1, 2 * group * head_dim)
    out = np.zeros_like(q)
    kernel.implementation(q, k_cache, v_cache, start, head_dim**-0.5, 0, cap, out, scratch_for(1, head_dim))
    sound, other = np.split(out[0], 2)
    assert np.isfinite(sound).all()
    assert not np.isfinite(other).any()


@IN_BOTH
@given(
    # 63 and 127 are the last positions before a new block of 64 positions.
    position=st.one_of(st.integers(1, 130), st.sampled_from([63, 127])),
    tokens=st.integers(2, 40),
    group=st.integers(1, 6),
    window=st.integers(1, 30),
)
def test_a_large_value_that_a_token_does_not_see_leaves_its_output_unchanged(
    kernel: Kernel, position: int, tokens: int, group: int, window: int
) -> None:
    rng, head_dim, start = np.random.default_rng(position), 16, max(position - tokens // 2, 0)
    k_cache, v_cache = empty_caches(1, start + tokens, head_dim, np.float32)
    k_cache[:], v_cache[:] = floats(rng, *k_cache.shape), floats(rng, *v_cache.shape)
    largest: Any = 1e37
    if kernel is ATTENTION_BF16:
        k_cache, v_cache, largest = _halves(k_cache), _halves(v_cache), _halves(np.array(65504))
    q, scratch = floats(rng, tokens, group * head_dim), scratch_for(1, head_dim)
    outs = np.zeros_like(q), np.zeros_like(q)
    for out, value in zip(outs, (0, largest), strict=True):
        v_cache[0, position] = value
        kernel.implementation(q, k_cache, v_cache, start, head_dim**-0.5, window, 0.0, out, scratch)
    of_token = start + np.arange(tokens)
    sees = (of_token >= position) & (of_token - window < position)
    np.testing.assert_array_equal((outs[0] != outs[1]).all(axis=1), sees)
    np.testing.assert_array_equal(outs[0][~sees], outs[1][~sees])


@pytest.mark.parametrize("name", CACHE_TYPES)
@pytest.mark.parametrize("head_dim", [7, 32])
def test_caches_as_a_gpu_has_them_hold_and_give_the_same_numbers(name: str, head_dim: int) -> None:
    rng, kv_heads, start, tokens = np.random.default_rng(head_dim), 2, 21, 5
    caches, plain = (make(kv_heads, 128, head_dim, CACHE_TYPES[name]) for make in (empty_caches, plain_caches))
    k, v = floats(rng, start + tokens, kv_heads * head_dim), floats(rng, start + tokens, kv_heads * head_dim)
    q = floats(rng, tokens, 3 * kv_heads * head_dim)
    outs = np.empty_like(q), np.zeros_like(q)
    for (keys, values), out in zip((caches, plain), outs, strict=True):
        kv_write_reference(k, v, 0, keys, values)
        ATTENTION.reference(q, keys, values, start, head_dim**-0.5, 9, 0.0, out, None)
    np.testing.assert_array_equal(keys_of(caches[0]), keys_of(plain[0]))
    np.testing.assert_array_equal(caches[1][..., :head_dim], plain[1])
    assert plain[0].strides[1] % 16 == plain[1].strides[1] % 16 == 0
    np.testing.assert_array_equal(*outs)


def launch_of(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: Any = np.uint16) -> CudaLaunch:
    """Return the launch of attention that a GPU with 132 multiprocessors would get. Nothing runs."""
    q, caches = np.empty((tokens, heads * head_dim), np.float32), plain_caches(kv_heads, 64, head_dim, dtype)
    scratch = np.empty(scratch_shape(132), np.float32)
    [launch] = launches(q, *caches, np.zeros(1, np.int32), 1.0, 0, 0.0, q, scratch)
    return launch


@given(
    tokens=st.integers(1, 64),
    kv_heads=st.integers(1, 200),
    group=st.integers(1, 70),
    head_dim=st.integers(1, 256),
    dtype=st.sampled_from([np.uint16, np.float32]),
)
def test_what_the_blocks_of_a_gpu_leave_for_the_last_one_fits_its_scratch(
    tokens: int, kv_heads: int, group: int, head_dim: int, dtype: Any
) -> None:
    launch = launch_of(tokens, kv_heads * group, kv_heads, head_dim, dtype)
    pieces, heads, others = launch.grid
    if launch.module is MANY_OF_HALVES:
        assert dtype == np.uint16
        assert head_dim <= 128
        assert others == 1
    else:
        assert heads == kv_heads
        assert pieces == 1 or pieces * heads * others <= 132


def test_a_context_is_split_across_the_gpu_if_a_single_token_attends_to_it() -> None:
    assert launch_of(1, 28, 4, 128).grid == (33, 4, 1)
    # The grid has twice as many blocks, because each block computes only half of the output.
    assert launch_of(1, 8, 4, 256).grid == (16, 4, 2)
    assert launch_of(512, 28, 4, 128).grid == (4, 56, 1)


def test_heads_that_are_too_large_for_a_gpu_are_refused_by_size() -> None:
    with pytest.raises(ValueError, match="heads are of 320 numbers; on a GPU at most 256 are wanted"):
        launch_of(1, 1, 1, 320)


def test_rows_of_caches_and_of_scratch_begin_where_lines_of_the_cache_do() -> None:
    scratch = scratch_for(2, 80)
    for array in (*empty_caches(3, 70, 80, np.float32), scratch, scratch[1:]):
        assert array.ctypes.data % 64 == 0
        assert not array.any()
