"""Tests of CuPy's table: with a stand-in of CuPy, and on a GPU with CuPy itself."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import cbtop
from cbtop.profiler.instrument.libraries import calls
from cbtop.profiler.instrument.libraries.cupy_functions import CUPY
from cbtop.profiler.instrument.libraries.replacing import found
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import LAUNCHES

STAND_IN = "import numpy\ndef fft(a, n=None, axis=-1, norm=None):\n    return numpy.fft.fft(a, n, axis, norm)\n"


def test_a_call_of_cupy_is_a_launch_without_work(
    tmp_path: Path, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("__version__ = '14'\n")
    (tmp_path / "cupy" / "fft.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(calls, "SMALL_NS", 0)
    profiler = BrickProfiler()
    with cbtop.instrument("cupy", profiler=profiler):
        import cupy.fft

        cupy.fft.fft(np.ones(64))
    for name in ("cupy", "cupy.fft"):
        monkeypatch.delitem(sys.modules, name)
    stats = profiler.stats_for("cupy.fft.fft")
    profiler.close()
    assert stats is not None
    assert (stats.calls.count, stats.flops, stats.bytes) == (1, None, None)
    assert stats.backend == f"cupy 14{LAUNCHES}"


@pytest.mark.gpu
def test_calls_of_cupy_are_bricks_with_the_results_of_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # pragma: no cover - gpu
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(calls, "SMALL_NS", 0)
    values = np.random.default_rng(1).normal(size=(64, 64))
    profiler = BrickProfiler()
    with cbtop.instrument("cupy", profiler=profiler):
        spectrum = cupy.fft.fft(cupy.asarray(values))
        product = cupy.dot(cupy.asarray(values), cupy.asarray(values))
    names = {one.name for one in profiler.report().bricks}
    profiler.close()
    assert names >= {"cupy.fft.fft", "cupy.dot"}
    np.testing.assert_allclose(spectrum.get(), np.fft.fft(values), atol=1e-9)
    np.testing.assert_allclose(product.get(), values @ values, atol=1e-9)
    assert any([found(row) is not None for row in CUPY])
