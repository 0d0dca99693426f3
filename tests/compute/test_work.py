"""The work a kernel declares is the work its shapes make, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cbtop.compute.kernels import attention_output, attention_score, linear
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


def test_attention_reads_a_key_once_for_the_heads_that_share_it() -> None:
    positions, heads, kv_heads, head_dim = 100, 12, 2, 64
    elements = heads * positions
    flops, moved = done(attention_score.work(head_dim, heads // kv_heads), elements)
    assert flops == elements * (2 * head_dim + 1)  # the product, and its scale
    assert moved == pytest.approx(positions * kv_heads * head_dim * 4 + elements * 4)
    flops, moved = done(attention_output.work(head_dim, heads // kv_heads), elements)
    assert flops == elements * 2 * head_dim
    assert moved == pytest.approx(positions * kv_heads * head_dim * 4 + elements * 4)
