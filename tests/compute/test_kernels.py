"""Tests of all kernels on their own examples.

The results equal those of the reference, of single tokens, and of parts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.errors import NumbaError

from cbtop.compute.kernels import (
    all_kernels,
    expert_gated,
    expert_linear,
    gated,
    linear,
    linear_bf16,
    linear_int8,
    qkv,
)
from cbtop.compute.kernels.base import Kernel, with_copies
from cbtop.compute.kernels.linear import kernel_for
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.verification import REFERENCE, SIZES, Variant, variants, verified
from tests.representatives import first_by_default

FEW = (7, 200)  # sizes of the examples; the last size is enough work for two threads
# By default, all variants with this format are compared with the reference, but only one with each other format.
EVERY_WAY = "q4_k"
# Formats of three kinds: floats, blocks of 32, blocks of 256. Other formats differ only in how sixteen weights are
# read. So by default, only their single products are tested: on one thread, against the reference.
IN_EVERY_KIND = ("f32", "q8_0", "q4_k")
ALONE = "linear", "linear_backward", "linear_int8"  # single products
WITH_OTHERS = "qkv", "gated", "expert_linear", "expert_gated"


def is_repetition(variant: Variant) -> bool:
    """Return whether the default run tests everything in this product with another format."""
    name = variant.kernel.contract.name
    if name not in (*ALONE, *WITH_OTHERS) or variant.kernel.name.startswith(IN_EVERY_KIND):
        return False
    return name in WITH_OTHERS or "2 threads" in variant.how or variant.peer != REFERENCE


def table() -> Iterator[Any]:
    """Yield the rows of the table of `cbtop verify`.

    The default run has some rows at a few sizes. Slow tests have all rows at all sizes.
    """
    ways: dict[tuple[str, ...], list[Variant]] = {}
    for variant in variants():
        name = f"{variant.kernel.name} {variant.how} beside {variant.peer}"
        yield pytest.param(variant, SIZES, id=f"{name}, all sizes", marks=pytest.mark.slow)
        own = name if variant.kernel.name.startswith(EVERY_WAY) and variant.peer == REFERENCE else ""
        kind = variant.how.rpartition("thread")[2].removeprefix("s")
        if not is_repetition(variant):
            ways.setdefault((variant.kernel.name, variant.peer, kind, own), []).append(variant)
    for turn, several in enumerate(ways.values()):
        one = several[turn % len(several)]
        yield pytest.param(one, FEW, id=f"{one.kernel.name} {one.how} beside {one.peer}")


@pytest.mark.parametrize(("variant", "sizes"), [*table()])
def test_a_kernel_agrees_with_what_it_is_beside_and_no_planted_fault_passes(
    variant: Variant, sizes: Sequence[int]
) -> None:
    found = verified(variant, sizes)
    assert (found.failed, found.missed) == ((), ())
    assert found.planted >= len(variant.kernel.contract.output_faults)


@pytest.mark.parametrize("name", ["embedding", "f32_linear"])
def test_weights_of_an_unknown_format_are_an_error_that_says_what_is_known(name: str) -> None:
    kernel = next(kernel for kernel in all_kernels() if kernel.name == name)
    _, *arguments = kernel.examples(np.random.default_rng(1), 8)
    with pytest.raises(ValueError, match=r"block format 99; known are 0 F32, .*14 Q6_K"):
        kernel.implementation(99, *arguments)


# No caller uses column-major arrays, so the kernel must be compiled for them here. By default, test one accepted case
# and one rejected case.
@first_by_default(
    "block_format",
    [
        pytest.param(one, id=one.name, marks=() if one.name in ("F32", "Q4_K") else pytest.mark.slow)
        for one in FORMATS.values()
    ],
)
def test_column_major_arrays_are_multiplied_correctly_or_refused(block_format: BlockFormat) -> None:
    kernel = kernel_for(block_format)
    code, weights, bias, x, out, scratch = kernel.examples(np.random.default_rng(1), 8)
    # The row is a part of a larger array, so its neighbouring elements are two numbers apart in memory.
    two = np.asfortranarray(np.concatenate([x, x]))[:1]
    expected = np.zeros_like(out)
    kernel.reference(code, weights, bias, x, expected, scratch)
    for arguments in ((weights, bias, two), (np.asfortranarray(weights), bias, x)):
        out[:] = expected
        with suppress(NumbaError, ValueError):
            kernel.implementation(code, *arguments, out, scratch)
        np.testing.assert_allclose(out, expected, atol=1e-4)


def test_activations_of_another_type_are_read_correctly_on_two_threads() -> None:
    kernel = kernel_for(FORMATS[0], tokens=2, threads=2)
    arguments = list(kernel.examples(np.random.default_rng(1), max(SIZES)))
    for dtype in (np.float32, np.float64):
        arguments[3], arguments[4] = arguments[3].astype(dtype), np.zeros_like(arguments[4])
        expected = with_copies(tuple(arguments), kernel.outputs)
        kernel.reference(*expected)
        kernel.implementation(*arguments)
        np.testing.assert_allclose(arguments[4], expected[4], atol=1e-3)


ONE_FORMAT = """
import numpy as np
from cbtop.compute.kernels import embedding, linear
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.q8_0 import Q8_0
linear.linear(*linear.LINEAR[Q8_0.code].examples(np.random.default_rng(1), 8))
embedding.embedding(Q8_0.code, np.zeros((1, 34), np.uint8), np.zeros(1, np.int64), 1.0, np.zeros((1, 32), np.float32))
compiled = (linear.ROWS_OF[Q8_0.code].function, embedding._COMPILED[Q8_0.code])
print([one.name for one in FORMATS.values() if one.dot_row.signatures or one.dequantize_row.signatures])
print([sum(function.stats.cache_hits.values()) for function in compiled])
"""


# The default run skips this test, because test_function_cache.py and test_kernel_cache.py test the caches.
@pytest.mark.slow
def test_only_formats_that_run_are_compiled_and_the_next_process_finds_them(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    def printed() -> list[str]:
        command = [sys.executable, "-c", ONE_FORMAT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert printed() == ["['Q8_0']", "[0, 0]"]
    assert printed() == ["[]", "[1, 1]"]


@pytest.mark.parametrize(
    "kernel",
    [
        *linear.LINEAR.values(),
        *linear_int8.LINEAR_INT8.values(),
        *linear_bf16.LINEAR_BF16.values(),
        *qkv.QKV.values(),
        *qkv.QKV_INT8.values(),
        *gated.GATED.values(),
        *gated.GATED_INT8.values(),
        *expert_linear.EXPERT_LINEAR.values(),
        *expert_linear.EXPERT_LINEAR_INT8.values(),
        *expert_gated.EXPERT_GATED.values(),
        *expert_gated.EXPERT_GATED_INT8.values(),
    ],
    ids=lambda kernel: kernel.name,
)
def test_a_product_of_activations_that_are_not_float32_is_refused(kernel: Kernel) -> None:
    arguments = list(kernel.examples(np.random.default_rng(1), 8))
    place = kernel.outputs[0] - 1  # position of the input x among the arguments, just before the output
    for dtype in (np.float64, np.float16):
        arguments[place] = arguments[place].astype(dtype)
        with pytest.raises(ValueError, match="; float32 are wanted: give"):
            kernel.implementation(*arguments)
    assert not any(arguments[out].any() for out in kernel.outputs)
