"""The table of targets compares results before times, and shows a library that is not installed as missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import targets
from cbtop.compute.backends import cpu_backend

SMALL = {"MATRIX_SIDES": (32,), "PRODUCT_SIDES": (32,), "ELEMENTS": (256,), "SOFTMAX_COLUMNS": (64,)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_backend(1)
    for name, sizes in SMALL.items():
        monkeypatch.setattr(targets, name, sizes)
    monkeypatch.setattr(targets, "ROUND_NS", 1000)


@pytest.mark.slow
def test_every_library_computes_each_operation() -> None:
    torch: Any = pytest.importorskip("torch")
    rows = {case[0]: targets._row(case, 2) for case in targets.cases(torch)}
    assert [name.partition(" ")[0] for name in rows] == ["transpose", "GEMM", "GEMV", "add", "ReLU", "softmax"]
    for name, (_, numpy_us, scipy, by_torch, own) in rows.items():
        assert float(numpy_us) >= 0
        assert float(by_torch.split()[0]) > 0
        assert (own == "–") == name.startswith(("transpose", "softmax"))
        assert (scipy == "–") == (targets._scipy()[0] is None or name.startswith(("transpose", "ReLU")))


def test_a_library_that_is_missing_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_scipy", lambda: (None, None))
    assert all(targets._row(case, 2)[2:4] == ("–", "–") for case in targets.cases(None))


def test_a_wrong_result_is_not_timed() -> None:
    name, expected, calls = next(iter(targets.cases(None)))
    wrong = {targets.NUMPY: lambda: np.asarray(calls[targets.NUMPY]()) * 1.01}
    with pytest.raises(RuntimeError, match=r"transpose 32 x 32: NumPy differs from float64 by 1\.0e-02"):
        targets._row((name, expected, wrong), 2)
