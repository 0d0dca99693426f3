"""Kernels beside the shares of their roofs that their contracts name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest

from benchmarks import kernels
from cbtop.compute.contracts import WEIGHTS, all_names, contract


def test_every_bound_in_a_contract_is_measured_beside_its_roof() -> None:
    assert set(kernels.CASES) == set(all_names())
    assert {contract(name).performance.roof for name in all_names()} == {"dram_read", WEIGHTS, kernels.TILES}


@pytest.mark.parametrize(("slower", "is_regression"), [(1.0, False), (1.29, False), (1.31, True)])
def test_a_kernel_that_takes_longer_than_its_contract_allows_is_named(
    monkeypatch: pytest.MonkeyPatch, slower: float, is_regression: bool
) -> None:
    bound = contract("linear").performance
    taken_ns = cycle([slower / bound.fraction, 1.0])  # of the kernel, and of reading

    def timed(call: Callable[[], object]) -> float:
        call()
        return next(taken_ns)

    monkeypatch.setattr(kernels, "WEIGHTS_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "_cpu_ns", timed)
    monkeypatch.setattr(kernels, "all_names", lambda: ["linear"])
    monkeypatch.setattr(kernels, "cpu_backend", lambda threads: None)
    (figure,) = kernels.run()
    assert ("A REGRESSION" in figure.what) == is_regression
    assert figure.value == pytest.approx(100 * bound.fraction / slower)
