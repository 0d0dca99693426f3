"""The work a kernel declares is the work its shapes make, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cbtop.compute.jit.exponential import EXPONENTIAL_FLOPS
from cbtop.compute.kernels import activation, attention, gated, linear, qkv, rms_norm
from cbtop.compute.kernels.base import KernelWork
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.q4_k import Q4_K


def done(work: KernelWork, elements: int) -> tuple[float, float]:
    flops = work.flops_per_call + elements * work.flops_per_element
    return flops, work.bytes_per_call + elements * work.bytes_per_element


def test_a_quantised_product_reads_its_weights_once_a_call() -> None:
    matrix = QuantizedMatrix.of(Q4_K, np.ones((128, 512), np.float32))
    flops, moved = done(linear.work(matrix, has_bias=False), elements=128)
    assert flops == 2 * 128 * 512
    assert moved == pytest.approx(128 * 2 * 144 + 4 * 512 + 4 * 128)  # a Q4_K block: 256 weights in 144 bytes


def test_fused_products_do_what_they_are_made_of_and_read_the_activations_once() -> None:
    first = QuantizedMatrix.of(Q4_K, np.ones((128, 512), np.float32))
    second = QuantizedMatrix.of(Q4_K, np.ones((64, 512), np.float32))
    tokens, once, bias = 3, 3 * 512 * 4, 64
    apart = [done(linear.work(matrix, has_bias=matrix is second), tokens * matrix.rows) for matrix in (first, second)]
    flops, moved = done(qkv.work((first, second, second), 2 * bias), tokens * (128 + 2 * 64))
    assert flops == pytest.approx(apart[0][0] + 2 * apart[1][0])
    assert moved == pytest.approx(apart[0][1] + 2 * apart[1][1] - 2 * once)
    after = done(activation.work(), tokens * 64)
    flops, moved = done(gated.work(second, second, 2), tokens * 64)
    assert flops == pytest.approx(2 * apart[1][0] + after[0])
    assert moved == pytest.approx(2 * apart[1][1] + after[1] - once)


def test_attention_reads_a_key_and_its_value_once_for_the_heads_that_share_them() -> None:
    positions, heads, kv_heads, head_dim, float16_bytes = 100, 12, 2, 64, 2
    elements = heads * positions
    flops, moved = done(attention.work(head_dim, heads // kv_heads, float16_bytes), elements)
    products = 2 * 2 * head_dim  # with the key, and of the weight with the value
    assert flops == elements * (products + EXPONENTIAL_FLOPS + 3)
    assert moved == pytest.approx(2 * positions * kv_heads * head_dim * float16_bytes)


@pytest.mark.parametrize(("hidden", "readings"), [(64, 1), (8192, 1), (8448, 2), (70, 2)])
def test_a_norm_reads_a_row_once_where_the_registers_of_a_gpu_hold_it_and_else_twice(
    hidden: int, readings: int
) -> None:
    assert rms_norm.work(hidden, is_on_gpu=True).bytes_per_element == 4 * (readings + 1)
    assert rms_norm.work(hidden).bytes_per_element == 4 * (2 + 1)
