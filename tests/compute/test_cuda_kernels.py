"""Every kernel's CUDA version beside its reference, on its own examples."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.arguments import run_on
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.kernels import linear_bf16
from cbtop.compute.kernels.embedding import EMBEDDING
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.verification import MANY, REFERENCE, SIZES, Variant, variants, verified

pytestmark = pytest.mark.gpu
# Threads are the CPU's: of variants that differ in them alone the first.
# Processors without tiles run no product in bfloat16: GPUs do.
IN_BF16 = [Variant(linear_bf16.kernel_for(FORMATS[code], MANY), f"{MANY} tokens") for code in linear_bf16.LINEAR_BF16]
ON_GPU = {
    (one.kernel.name, one.how.replace("2 threads", "1 thread")): one
    for one in reversed([*variants(), *IN_BF16])
    if one.kernel.cuda is not None and one.peer == REFERENCE
}


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    try:
        return Gpu()
    except ComputeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("variant", ON_GPU.values(), ids=[" ".join(key) for key in ON_GPU])
def test_a_cuda_version_agrees_with_what_it_is_beside_and_no_planted_fault_passes(variant: Variant, gpu: Gpu) -> None:
    found = verified(variant, SIZES, partial(run_on, gpu))
    assert (found.failed, found.missed) == ((), ())


@pytest.mark.parametrize("integers", [np.int32, np.int64])
@pytest.mark.parametrize("block_format", FORMATS.values(), ids=lambda one: one.name)
def test_rows_of_every_format_are_looked_up_by_tokens_of_either_size(
    block_format: BlockFormat, integers: type, gpu: Gpu
) -> None:
    columns = 768 if block_format.block_elements > 1 else 261
    rng = np.random.default_rng(1)
    matrix = block_format.quantize(rng.standard_normal((57, columns), dtype=np.float32))
    tokens, out = np.array([56, 0, 3, 3], integers), np.zeros((4, columns), np.float32)
    run_on(gpu, EMBEDDING, (block_format.code, matrix, tokens, 2.0, out))
    np.testing.assert_allclose(out, 2 * block_format.dequantize(matrix[tokens]), rtol=1e-6, atol=1e-6)
