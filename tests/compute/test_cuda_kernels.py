"""Tests of all CUDA kernels on a GPU: on its own examples, each kernel gives the result of its reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from cbtop.compute.gpu.arguments import run_on
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.kernels import gated, linear, linear_int8, qkv
from cbtop.compute.kernels.base import Arguments, Kernel, floats, with_copies
from cbtop.compute.kernels.embedding import EMBEDDING
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.kernels.quantize_rows import empty_codes
from cbtop.compute.quantization import FORMATS, ON_GPU
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.floats import F16
from cbtop.compute.quantization.interleaved import InterleavedMatrix
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.verification import SIZES, Variant, variants_on_gpu, verified

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", variants_on_gpu(), ids=lambda one: f"{one.kernel.name} {one.how}")
def test_a_cuda_version_agrees_with_its_counterpart_and_no_fault_passes(variant: Variant, gpu: Gpu) -> None:
    found = verified(variant, SIZES, partial(run_on, gpu))
    assert (found.failed, found.missed) == ((), ())


@pytest.mark.parametrize("integers", [np.int32, np.int64])
@pytest.mark.parametrize(
    "block_format", [one for code, one in FORMATS.items() if code in ON_GPU], ids=lambda one: one.name
)
def test_rows_of_every_format_are_looked_up_by_tokens_of_either_size(
    block_format: BlockFormat, integers: type, gpu: Gpu
) -> None:
    columns = 768 if block_format.block_elements > 1 else 261
    rng = np.random.default_rng(1)
    matrix = block_format.quantize(rng.standard_normal((57, columns), dtype=np.float32))
    tokens, out = np.array([56, 0, 3, 3], integers), np.zeros((4, columns), np.float32)
    run_on(gpu, EMBEDDING, (block_format.code, matrix, tokens, 2.0, out))
    np.testing.assert_allclose(out, 2 * block_format.dequantize(matrix[tokens]), rtol=1e-6, atol=1e-6)


def product_of(
    name: str, formats: Sequence[BlockFormat], columns: int, tokens: int, is_int8: bool
) -> tuple[Kernel, Arguments]:
    """Return a kernel that multiplies matrices, and arguments for it. Each matrix has 48 rows."""
    rng, rows, outs, matrices = np.random.default_rng(columns), 48, [], []
    for block_format in formats:
        matrix = QuantizedMatrix.of(block_format, floats(rng, rows, columns))
        data = InterleavedMatrix.of(matrix).data if is_int8 else matrix.data
        matrices += [block_format.code, data, floats(rng, rows)]
        outs.append(np.zeros((tokens, rows), np.float32))
    x = floats(rng, tokens, columns) * np.float32(columns**-0.5)
    scratch = Int8Scratch(*empty_codes(tokens, columns), 1, None) if is_int8 else np.zeros((1, columns), np.float32)
    codes = [one.code for one in formats]
    if name == "gated":
        outs.append(np.zeros_like(outs[0]))
        kernel = gated.kernel_for(codes, is_int8=is_int8)
    elif name == "qkv":
        kernel = qkv.kernel_for(codes, is_int8=is_int8)
    else:
        kernel = (linear_int8 if is_int8 else linear).kernel_for(formats[0])
    return kernel, (*matrices, x, *outs, scratch)


# The rows are longer than the threads of a warp, or of two blocks, can read at once.
@pytest.mark.parametrize("columns", [3584, 9216])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(
    ("name", "formats", "is_int8"),
    [
        ("linear", (Q4_K,), True),
        ("linear", (Q6_K,), True),
        ("linear", (Q4_K,), False),
        ("linear", (F16,), False),
        ("qkv", (Q4_K, Q4_K, Q6_K), True),
        ("qkv", (Q6_K, Q4_K, Q4_K), True),
        ("qkv", (Q4_K, Q4_K, Q6_K), False),
        ("gated", (Q4_K, Q4_K), True),
        ("gated", (Q6_K, Q6_K), True),
        ("gated", (Q4_K, Q6_K), True),
        ("gated", (Q4_K, Q4_K), False),
        ("gated", (F16, F16), False),
    ],
    ids=lambda one: "_".join(each.name for each in one) if isinstance(one, tuple) else str(one),
)
def test_products_of_rows_as_long_as_in_models_agree_with_their_reference(
    name: str, formats: Sequence[BlockFormat], is_int8: bool, tokens: int, columns: int, gpu: Gpu
) -> None:
    assert error_of_product(name, formats, columns, tokens, is_int8, gpu) <= 1


def error_of_product(
    name: str, formats: Sequence[BlockFormat], columns: int, tokens: int, is_int8: bool, gpu: Gpu
) -> float:
    """Return the largest error of the product, divided by the tolerance of its contract."""
    kernel, arguments = product_of(name, formats, columns, tokens, is_int8)
    expected = with_copies(arguments, kernel.outputs)
    kernel.reference(*expected)
    run_on(gpu, kernel, arguments)
    offs = [np.abs(arguments[at] - expected[at]).max() / np.abs(expected[at]).max() for at in kernel.outputs]
    return float(np.max(offs)) / kernel.contract.tolerance  # NaN propagates through max
