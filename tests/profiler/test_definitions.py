"""Tests of the definitions of bricks: definitions accept values of users, and reject wrong values immediately."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cbtop.profiler.analysis.budget import ByteBudget, TokenBudget
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.protocol import codec
from cbtop.protocol.attributes import Work
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.vocabulary import BrickId, Provenance


def test_numpys_numbers_are_numbers() -> None:
    work = Work(flops_per_element=2 * np.prod((4, 8)), bytes_per_call=np.float32(0.5))  # type: ignore[arg-type]
    assert (type(work.flops_per_element), work.flops_per_element, work.bytes_per_call) == (float, 64.0, 0.5)
    kernel = KernelDefinition("k", "cuda", grid=list(np.array([1, 2, 3])))  # type: ignore[arg-type]
    assert kernel.grid == (1, 2, 3)
    ceiling = Ceiling("dram", "bandwidth", np.float32(20), "GB/s", Provenance.MEASURED)  # type: ignore[arg-type]
    decoded = codec.decode(codec.encode(ceiling))
    assert isinstance(decoded, Ceiling)
    assert decoded.value == 20.0


def test_a_half_of_the_work_that_nobody_gave_is_unknown_which_zero_is_not() -> None:
    work = Work(flops_per_element=2)
    assert (work.flops(calls=3, elements=10), work.bytes(calls=3, elements=10)) == (20, None)
    assert Work(bytes_per_call=0).bytes(calls=3, elements=10) == 0
    assert (Work().flops(1, 1), Work().bytes(1, 1)) == (None, None)


def test_a_bare_number_is_no_budget() -> None:
    with pytest.raises(TypeError, match=r"budget is 12\.2; a TokenBudget or a ByteBudget is wanted"):
        BrickDefinition.of(BrickId.RMS_NORM, budget=12.2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Work(flops_per_call=float("nan")),
        lambda: Work(bytes_per_element=-1),
        lambda: Work(flops_per_element=1e308),
        lambda: BrickDefinition.of(BrickId.RMS_NORM, budget=TokenBudget(0)),
        lambda: ByteBudget(float("inf")),
        lambda: KernelDefinition("k", "cuda", ptx_hash=1 << 70),
        lambda: Ceiling("dram", "bandwidth", 0.0, "GB/s", Provenance.MEASURED),
    ],
)
def test_what_can_only_be_wrong_is_refused_where_it_is_written(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="is wanted"):
        make()
