"""Every kernel against its NumPy reference, on its own examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbtop.compute.decoder.decoder import CACHE_TYPES
from cbtop.compute.kernels import all_kernels, attention, kv_write
from cbtop.compute.kernels.base import Kernel, from_bits
from cbtop.compute.kernels.linear import kernel_for
from cbtop.compute.quantization import FORMATS

PREFILL_AND_THREADS = [
    kernel_for(block_format, tokens, threads)
    for block_format in FORMATS.values()
    for tokens, threads in ((1, 2), (6, 1), (6, 2))
]


def copied(arguments: tuple[Any, ...], outputs: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(a.copy() if place in outputs else a for place, a in enumerate(arguments))


ATTENTION = [
    attention.kernel_for(tokens, threads, dtype)
    for tokens in (1, 2, 6, 70)  # 70 tokens of three heads are more rows than one piece of work has
    for threads in (1, 2)
    for dtype in CACHE_TYPES.values()
]
KV_WRITE = [kv_write.kernel_for(dtype) for dtype in CACHE_TYPES.values()]


@pytest.mark.parametrize("size", [1, 7, 32, 200])
@pytest.mark.parametrize(
    "kernel", [*all_kernels(), *PREFILL_AND_THREADS, *ATTENTION, *KV_WRITE], ids=lambda kernel: kernel.name
)
def test_a_kernel_agrees_with_its_reference(kernel: Kernel, size: int) -> None:
    arguments = kernel.examples(np.random.default_rng(size), size)
    expected = copied(arguments, kernel.outputs)
    kernel.implementation(*arguments)
    kernel.reference(*expected)
    for place in kernel.outputs:
        output, wanted = from_bits(arguments[place]).astype(np.float64), from_bits(expected[place])
        np.testing.assert_array_equal(np.isfinite(output), np.isfinite(wanted))
        output, wanted = (np.where(np.isfinite(values), values, 0) for values in (output, wanted))
        assert np.abs(output - wanted).max() <= kernel.tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["embedding", "f32_linear"])
def test_weights_of_an_unknown_format_are_an_error_that_says_what_is_known(name: str) -> None:
    kernel = next(kernel for kernel in all_kernels() if kernel.name == name)
    _, *arguments = kernel.examples(np.random.default_rng(1), 8)
    with pytest.raises(
        ValueError, match=r"block format 99; known are 0 F32, 1 F16, 30 BF16, 8 Q8_0, 12 Q4_K, 14 Q6_K"
    ):
        kernel.implementation(99, *arguments)
