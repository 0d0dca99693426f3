"""Tests of the benchmark that compares each kernel with its performance bound."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest

from benchmarks import kernels
from cbtop.compute.contracts import WEIGHTS, all_names, contract


def test_every_bound_in_a_contract_is_measured_beside_its_roof() -> None:
    assert set(kernels.CASES) == set(all_names())
    assert {contract(name).performance.roof for name in all_names()} == {"dram_read", WEIGHTS, kernels.TILES}


@pytest.mark.parametrize(
    ("slower", "processor", "tier", "is_regression"),
    [
        (1.0, "AMD EPYC", "AVX2", False),
        (1.29, "AMD EPYC", "AVX2", False),
        (1.31, "AMD EPYC", "AVX2", True),
        # The kernel's contract has no usual value for this kind of machine.
        (1.31, "AMD EPYC", "AVX-512 VNNI", False),
        (1.31, "Intel(R) Xeon(R) Processor", "AVX2", False),
    ],
)
def test_a_kernel_that_takes_longer_than_its_contract_allows_is_named(
    monkeypatch: pytest.MonkeyPatch, slower: float, processor: str, tier: str, is_regression: bool
) -> None:
    monkeypatch.setattr(kernels, "cpu_name", lambda: processor)
    monkeypatch.setattr(kernels, "TIER", tier)
    bound = contract("linear").performance
    # two CPU times in ns: first the time of the kernel, then the time of a plain read of the same memory
    taken_ns = cycle([slower / bound.fraction, 1.0])

    def timed(call: Callable[[], object]) -> float:
        call()
        return next(taken_ns)

    monkeypatch.setattr(kernels, "WEIGHTS_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "_cpu_ns", timed)
    monkeypatch.setattr(kernels, "all_names", lambda: ["linear"])
    monkeypatch.setattr(kernels, "cpu_backend", lambda threads: None)
    (figure,) = kernels.run()
    assert ("A REGRESSION" in figure.what) == is_regression
    assert ("another CPU" in figure.what) == ((processor, tier) != ("AMD EPYC", "AVX2"))
    assert figure.value == pytest.approx(100 * bound.fraction / slower)
