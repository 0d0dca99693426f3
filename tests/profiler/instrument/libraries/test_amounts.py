"""Tests of the FLOP and bytes of library calls, compared with numbers that are computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cbtop
from cbtop.profiler.instrument.libraries import calls
from cbtop.profiler.profiler import BrickProfiler

ONES = np.ones
EYE = np.eye(8)
LOG = math.log2
CASES: list[tuple[str, Callable[[], Any], float | None, float | None]] = [
    ("numpy.fft.fft", lambda: np.fft.fft(ONES(1024)), 5 * 1024 * 10, 1024 * 24),
    ("numpy.fft.fft", lambda: np.fft.fft(ONES((3, 64)), n=32), 5 * 3 * 32 * 5, 3 * 64 * 8 + 3 * 32 * 16),
    ("numpy.fft.ifft", lambda: np.fft.ifft(ONES((64, 3)), axis=0), 5 * 3 * 64 * 6, 192 * 24),
    ("numpy.fft.rfft", lambda: np.fft.rfft(ONES(1024)), 2.5 * 1024 * 10, 1024 * 8 + 513 * 16),
    ("numpy.fft.irfft", lambda: np.fft.irfft(ONES(513)), 2.5 * 1024 * 10, 513 * 8 + 1024 * 8),
    ("numpy.fft.fft2", lambda: np.fft.fft2(ONES((2, 16, 32))), 5 * 1024 * 9, 1024 * 24),
    ("numpy.fft.rfftn", lambda: np.fft.rfftn(ONES((16, 32))), 2.5 * 512 * 9, 512 * 8 + 16 * 17 * 16),
    ("numpy.dot", lambda: np.dot(ONES((64, 32)), ONES((32, 16))), 2 * 64 * 32 * 16, 8 * (2048 + 512 + 1024)),
    ("numpy.matmul", lambda: ONES((3, 32, 64)) @ ONES((64, 32)), 2 * 3 * 32 * 32 * 64, 8 * (6144 + 2048 + 3072)),
    ("numpy.tensordot", lambda: np.tensordot(ONES((4, 5, 6)), ONES((5, 6, 7)), 2), 2 * 4 * 30 * 7, None),
    ("numpy.einsum", lambda: np.einsum("ij,jk->ik", ONES((4, 5)), ONES((5, 6))), 2 * 4 * 5 * 6, 8 * (20 + 30 + 24)),
    ("numpy.linalg.cholesky", lambda: np.linalg.cholesky(EYE), 8**3 / 3, 2 * 512),
    ("numpy.linalg.solve", lambda: np.linalg.solve(EYE, ONES((8, 3))), 2 / 3 * 512 + 2 * 64 * 3, 512 + 2 * 192),
    ("numpy.linalg.inv", lambda: np.linalg.inv(EYE.astype(complex)), 4 * 2 * 512, 2 * 1024),
    ("numpy.linalg.det", lambda: np.linalg.det(ONES((5, 8, 8))), 5 * 2 / 3 * 512, None),
    ("numpy.linalg.qr", lambda: np.linalg.qr(ONES((10, 4))), 2 * (2 * 10 * 16 - 2 / 3 * 64), None),
    ("numpy.linalg.svd", lambda: np.linalg.svd(ONES((4, 10)), full_matrices=False), 14 * 10 * 16 + 8 * 64, None),
    ("numpy.linalg.eigh", lambda: np.linalg.eigh(EYE), 9 * 512, 512 + 64 + 512),
    ("numpy.linalg.solve", lambda: np.linalg.solve(EYE, ONES((7, 8, 2))), 7 * (2 / 3 * 512 + 256), 512 + 2 * 896),
    ("numpy.linalg.solve", lambda: np.linalg.solve(EYE, ONES((8, 2)) * 1j), 4 * (2 / 3 * 512 + 256), 512 + 2 * 256),
    ("numpy.linalg.qr", lambda: np.linalg.qr(ONES((10, 4)), mode="raw"), 2 * 160 - 2 / 3 * 64, None),
    ("numpy.linalg.qr", lambda: np.linalg.qr(ONES((4, 10))), 2 * 160 - 2 / 3 * 64 + 4 / 3 * 64, None),
    (
        "numpy.linalg.qr",
        lambda: np.linalg.qr(ONES((10, 4)), mode="complete"),
        2 * 160 - 2 / 3 * 64 + 4 * (400 - 160 + 64 / 3),
        None,
    ),
    ("numpy.linalg.svd", lambda: np.linalg.svd(ONES((10, 4))), 4 * 400 + 8 * 160 + 9 * 64, None),
    ("numpy.fft.rfftn", lambda: np.fft.rfftn(ONES((16, 32)), (-1, -1), (0, 1)), 2.5 * 512 * 9, None),
    (
        "numpy.matmul",
        lambda: np.matmul(ONES((40, 64, 5)), ONES((64, 30, 5)), axes=[(0, 1)] * 3),
        2 * 5 * 40 * 64 * 30,
        None,
    ),
    ("numpy.add", lambda: np.add(ONES(5000), ONES(5000), np.empty(5000)), 5000, 3 * 40_000),
    ("numpy.add", lambda: np.add(ONES(5000), np.broadcast_to(1.0, 5000)), 5000, 2 * 40_000 + 8),
    ("numpy.add", lambda: np.add(ONES(5000) * 1j, 1j), 2 * 5000, None),
    ("numpy.multiply", lambda: np.multiply(ONES(5000), 1j), 6 * 5000, None),
    ("numpy.divide", lambda: np.divide(ONES(5000), 1j), None, None),
    ("numpy.add", lambda: np.add(ONES(5000, object), 1), None, None),
    ("numpy.sum", lambda: np.sum(ONES(5000) * 1j), 2 * 5000, None),
    ("numpy.exp", lambda: np.exp(ONES(5000), np.empty(5000)), None, 2 * 40_000),
    ("numpy.concatenate", lambda: np.concatenate([ONES(5000), ONES(10)]), None, 2 * 40_080),
    ("numpy.linalg.multi_dot", lambda: np.linalg.multi_dot([EYE, EYE, EYE]), None, 4 * 512),
    ("numpy.random.Generator.shuffle", lambda: np.random.default_rng(1).shuffle(ONES(100)), None, 2 * 800),
    ("numpy.convolve", lambda: np.convolve(ONES(2), ONES(9), "same"), 2 * 17, None),
    ("numpy.convolve", lambda: np.convolve(ONES(10), ONES(4)), 2 * 40, 8 * (10 + 4 + 13)),
    ("numpy.convolve", lambda: np.convolve(ONES(10), ONES(4), "valid"), 2 * 28, 8 * (10 + 4 + 7)),
    ("numpy.exp", lambda: np.exp(ONES(5000)), None, 2 * 40_000),
    ("numpy.sum", lambda: np.sum(ONES(5000)), 5000, 40_008),
    ("numpy.random.Generator.normal", lambda: np.random.default_rng(1).normal(size=100), None, 800),
]


def amounts_of(name: str, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr(calls, "SMALL_NS", 0)
    profiler = BrickProfiler()
    with cbtop.instrument("numpy", "scipy", profiler=profiler):
        call()
        call()
    stats = profiler.stats_for(name)
    profiler.close()
    assert stats is not None
    assert stats.calls.count == 2
    return stats.flops, stats.bytes


@pytest.mark.parametrize(("name", "call", "flops", "moved"), CASES)
def test_flop_and_bytes_are_those_of_the_algorithm(
    name: str,
    call: Callable[[], Any],
    flops: float | None,
    moved: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found_flops, found_bytes = amounts_of(name, call, monkeypatch)
    assert found_flops == (None if flops is None else 2 * round(flops))
    if moved is not None:
        assert found_bytes == 2 * moved


def test_an_optimized_contraction_counts_what_its_path_does(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = ONES((10, 20)), ONES((20, 30)), ONES((30, 5))
    flops, _ = amounts_of("numpy.einsum", lambda: np.einsum("ab,bc,cd->ad", *operands, optimize=True), monkeypatch)
    in_order, from_the_right = 2 * 10 * 20 * 30 + 2 * 10 * 30 * 5, 2 * 20 * 30 * 5 + 2 * 10 * 20 * 5
    assert flops == pytest.approx(2 * min(in_order, from_the_right), rel=1e-3)


def test_sparse_products_count_their_non_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csr_array(np.eye(50) + np.eye(50, k=1))  # 99 values
    read = 99 * 8 + 99 * 4 + 51 * 4
    assert amounts_of("scipy.sparse SpMV", lambda: matrix @ ONES(50), monkeypatch) == (2 * 198, 2 * (read + 800))
    flops, _ = amounts_of("scipy.sparse SpMM", lambda: matrix @ ONES((50, 3)), monkeypatch)
    assert flops == 2 * 198 * 3


def test_sparse_matrices_of_one_shape_differ_in_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    few, many = sparse.csr_array(np.eye(50)), sparse.csr_array(ONES((50, 50)))
    vector = ONES(50)
    monkeypatch.setattr(calls, "SMALL_NS", 0)
    profiler = BrickProfiler()
    with cbtop.instrument("scipy", profiler=profiler):
        for matrix in (few, many, few, many):
            matrix @ vector
    stats = profiler.stats_for("scipy.sparse SpMV")
    profiler.close()
    assert stats is not None
    assert stats.flops == 2 * 2 * (50 + 2500)


def test_convolutions_of_scipy_count_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    signal, ndimage = pytest.importorskip("scipy.signal"), pytest.importorskip("scipy.ndimage")
    image, kernel = ONES((20, 20)), ONES((3, 3))
    same = amounts_of("scipy.signal.convolve2d", lambda: signal.convolve2d(image, kernel, "same"), monkeypatch)
    assert same[0] == 2 * 2 * 58 * 58  # each row and column has 3 products for a value, except for 2 at the ends
    full = amounts_of("scipy.signal.convolve2d", lambda: signal.convolve2d(image, kernel), monkeypatch)
    assert full[0] == 2 * 2 * 400 * 9
    wrapped = lambda: signal.convolve2d(image, kernel, "same", "wrap")  # noqa: E731
    assert amounts_of("scipy.signal.convolve2d", wrapped, monkeypatch)[0] == 2 * 2 * 400 * 9
    assert amounts_of("scipy.ndimage.convolve", lambda: ndimage.convolve(image, kernel), monkeypatch)[0] == 14_400
    blurred = amounts_of("scipy.ndimage.gaussian_filter", lambda: ndimage.gaussian_filter(image, 1.0), monkeypatch)
    assert blurred[0] == 2 * 2 * 400 * (9 + 9)
    few = lambda: ndimage.gaussian_filter(image, 1.0, radius=2, axes=(0,))  # noqa: E731
    assert amounts_of("scipy.ndimage.gaussian_filter", few, monkeypatch)[0] == 2 * 2 * 400 * 5


def test_diagonals_count_their_values_inside_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    matrices = [sparse.dia_array((ONES((2, 50)), (0, offset)), shape=(50, 50)) for offset in (1, 40, -40)]
    for matrix, values in zip(matrices, (99, 60, 60), strict=True):
        flops, _ = amounts_of("scipy.sparse SpMV", lambda matrix=matrix: matrix @ ONES(50), monkeypatch)
        assert flops == 2 * 2 * values


def test_pivots_are_no_q_and_a_structure_has_unknown_flop(monkeypatch: pytest.MonkeyPatch) -> None:
    linalg = pytest.importorskip("scipy.linalg")
    pivoted = lambda: linalg.qr(ONES((10, 4)), mode="r", pivoting=True)  # noqa: E731
    assert amounts_of("scipy.linalg.qr", pivoted, monkeypatch)[0] == 2 * round(2 * 160 - 2 / 3 * 64)
    positive = lambda: linalg.solve(EYE, ONES(8), assume_a="pos")  # noqa: E731
    assert amounts_of("scipy.linalg.solve", positive, monkeypatch)[0] is None


def test_repeated_elements_are_told_from_stored_ones(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SMALL_NS", 0)
    profiler = BrickProfiler()
    with cbtop.instrument("numpy", profiler=profiler):
        for array in (ONES(5000), np.broadcast_to(1.0, 5000)) * 2:
            np.sum(array)
    stats = profiler.stats_for("numpy.sum")
    profiler.close()
    assert stats is not None
    assert stats.bytes == 2 * (40_000 + 8 + 8 + 8)
