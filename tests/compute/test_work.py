"""The work a kernel declares is the work its shapes make, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cbtop.compute.jit.exponential import EXPONENTIAL_FLOPS
from cbtop.compute.kernels import attention, linear
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


def test_attention_reads_a_key_and_its_value_once_for_the_heads_that_share_them() -> None:
    positions, heads, kv_heads, head_dim, float16_bytes = 100, 12, 2, 64, 2
    elements = heads * positions
    flops, moved = done(attention.work(head_dim, heads // kv_heads, float16_bytes), elements)
    products = 2 * 2 * head_dim  # with the key, and of the weight with the value
    assert flops == elements * (products + EXPONENTIAL_FLOPS + 3)
    assert moved == pytest.approx(2 * positions * kv_heads * head_dim * float16_bytes)
