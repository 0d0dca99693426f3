"""Every kernel against its NumPy reference, on its own examples."""

from __future__ import annotations

import numpy as np
import pytest

from cbtop.compute.kernels import all_kernels
from cbtop.compute.verification import FAULTS, Variant, variants, verified


@pytest.mark.parametrize("variant", variants(), ids=lambda variant: f"{variant.kernel.name} {variant.how}".strip())
def test_a_kernel_agrees_with_its_reference_and_no_planted_fault_passes_its_checks(variant: Variant) -> None:
    found = verified(variant)
    assert (found.failed, found.missed) == ((), ())
    assert found.planted >= len(FAULTS)


@pytest.mark.parametrize("name", ["embedding", "f32_linear"])
def test_weights_of_an_unknown_format_are_an_error_that_says_what_is_known(name: str) -> None:
    kernel = next(kernel for kernel in all_kernels() if kernel.name == name)
    _, *arguments = kernel.examples(np.random.default_rng(1), 8)
    with pytest.raises(
        ValueError, match=r"block format 99; known are 0 F32, 1 F16, 30 BF16, 8 Q8_0, 12 Q4_K, 14 Q6_K"
    ):
        kernel.implementation(99, *arguments)
