"""Roofs of the processor: the best of several rounds, with how the others were."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cbtop.compute import backends, ceilings
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.vocabulary import Provenance


def test_a_roof_is_the_best_round_beside_the_median_and_the_lowest() -> None:
    before_s = int(time.time())
    found = ceilings.ceiling("read", "bandwidth", 6e9, [3.0, 2.0, 1.0])
    assert replace(found, measured_on="") == Ceiling("read", "bandwidth", 6.0, "GB/s", Provenance.MEASURED, 3.0, 2.0)
    assert found.measured_s is not None
    assert before_s <= found.measured_s <= time.time()


def test_a_roof_of_the_processors_says_how_much_of_them_others_used_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s = iter([10.0, 10.0])
    monkeypatch.setattr(backends, "_others_s", lambda: next(used_s))
    assert ceilings._measured("read", "bandwidth", 1.0, lambda: None).load_percent == 0
    used_s = iter([10.0, 1e9])  # more than there is: the clock of the system counts in hundredths
    assert ceilings._measured("read", "bandwidth", 1.0, lambda: None).load_percent == 100


@pytest.mark.parametrize(("longest_s", "size"), [(1.0, 1024), (64.0, 4096), (63.0, 2048), (0.5, 1024)])
def test_matrices_are_as_large_as_there_is_time_for(longest_s: float, size: int) -> None:
    assert ceilings.largest_size((4096, 2048, 1024), 1.0, longest_s) == size


def test_a_product_of_torch_is_measured_with_as_many_threads_as_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    monkeypatch.setattr(ceilings, "PRODUCT_SIZES", (64, 32))
    before = torch.get_num_threads()
    try:
        measured = ceilings.measure_product(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert (measured.name, measured.kind) == ("matmul_bfloat16", "compute")
    assert 0 < (measured.lowest or 0) <= (measured.median or 0) <= measured.value
