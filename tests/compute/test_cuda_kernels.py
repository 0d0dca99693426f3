"""Every kernel's CUDA version beside its reference, on its own examples."""

from __future__ import annotations

from functools import partial

import pytest

from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.arguments import run_on
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.verification import REFERENCE, SIZES, Variant, variants, verified

pytestmark = pytest.mark.gpu
# Threads are the CPU's: of variants that differ in them alone the first.
ON_GPU = {
    (one.kernel.name, one.how.replace("2 threads", "1 thread")): one
    for one in reversed([*variants()])
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
