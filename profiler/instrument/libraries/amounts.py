"""Computes the FLOP and bytes of a call of a library function from the shapes of its arrays.

Rules
- A function here gets the arguments in the order of the library function's parameters, and the result. It returns the
  FLOP and the bytes. Either is None if it is unknown.
- FLOP are the usual counts of the algorithm: 5 n log2 n for an FFT, 2/3 n^3 for an LU decomposition. A library may
  do more or less. Counts of decompositions are from Golub, Van Loan, "Matrix Computations".
- Multiplying complex numbers counts as six FLOP and adding them as two, so that a complex product has four times the
  FLOP of a real one.
- Each array counts once, as it is stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Amounts = tuple[float | None, float | None]
AmountsOf = Callable[[Sequence[Any], Mapping[str, Any], Any], Amounts]
NOTHING_KNOWN: Amounts = (None, None)
_COMPLEX = 4  # a complex product has as many times the FLOP of a real one


def nothing(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return unknown amounts."""
    return NOTHING_KNOWN


def moved(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the bytes of all arrays among the arguments and results. The FLOP are unknown."""
    return None, _bytes(args, result)


def each(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return one FLOP for each element of the result, and the bytes of all arrays."""
    return float(result.size), _bytes(args, result)


def each_read(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return one FLOP for each element of the first array, and the bytes of all arrays."""
    return float(args[0].size), _bytes(args, result)


def written(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the bytes of the result, as for random numbers. The FLOP are unknown."""
    return None, _bytes((), result)


# --- Fourier transforms ---------------------------------------------------------------------------------------


def fft(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a complex transform of one axis: 5 n log2 n for each."""
    return _fft(result.size, [result.shape[_axis(args, kwargs)]], args, result, 5)


def real_fft(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a transform of real numbers, half as many as of complex ones."""
    given = _given(args, kwargs, 1, "n")
    axis = _axis(args, kwargs)
    length = args[0].shape[axis] if given is None else int(given)
    return _fft(result.size // result.shape[axis] * length, [length], args, result, 2.5)


def inverse_real_fft(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a transform to real numbers."""
    return _fft(result.size, [result.shape[_axis(args, kwargs)]], args, result, 2.5)


def fft_n(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a complex transform of several axes."""
    return _fft(result.size, [result.shape[axis] for axis in _axes(args, kwargs)], args, result, 5)


def real_fft_n(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a transform of real numbers along several axes."""
    axes, given = _axes(args, kwargs), _given(args, kwargs, 1, "s")
    lengths = [args[0].shape[axis] for axis in axes] if given is None else [int(size) for size in given]
    return _fft(result.size // result.shape[axes[-1]] * lengths[-1], lengths, args, result, 2.5)


def inverse_real_fft_n(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a transform to real numbers along several axes."""
    return _fft(result.size, [result.shape[axis] for axis in _axes(args, kwargs)], args, result, 2.5)


def two_axes(of: AmountsOf) -> AmountsOf:
    """Return the amounts by `of` for a function that transforms the last two axes by default."""
    return lambda args, kwargs, result: of(args, {"axes": (-2, -1), **kwargs}, result)


def _fft(points: int, lengths: Sequence[int], args: Sequence[Any], result: Any, factor: float) -> Amounts:
    return factor * points * math.log2(max(1, math.prod(lengths))), _bytes(args[:1], result)


def _axis(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    given = _given(args, kwargs, 2, "axis")
    return -1 if given is None else int(given)


def _axes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    given, sizes = _given(args, kwargs, 2, "axes"), _given(args, kwargs, 1, "s")
    if given is not None:
        return [int(axis) for axis in np.atleast_1d(given)]
    return list(range(args[0].ndim)) if sizes is None else list(range(-len(sizes), 0))


# --- products -------------------------------------------------------------------------------------------------


def product(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of `dot` or `matmul`: 2 n m k."""
    summed = args[0].shape[-1] if args[0].ndim and args[1].ndim else 1
    return 2.0 * np.size(result) * summed * _scale(args[:2]), _bytes(args[:2], result)


def vdot(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a dot product of two flattened arrays."""
    return 2.0 * args[0].size * _scale(args[:2]), _bytes(args[:2], result)


def tensordot(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a sum over axes of both arrays."""
    left, right = args[:2]
    # The result has the axes that are left over: |result| = |left| |right| / summed^2.
    summed = math.sqrt(left.size * right.size / max(1, np.size(result)))
    return 2.0 * np.size(result) * summed * _scale((left, right)), _bytes((left, right), result)


def einsum(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the FLOP that `numpy.einsum_path` counts for this contraction, optimized or not."""
    operands = [one for one in args if hasattr(one, "nbytes")]
    optimize = kwargs.get("optimize", False)
    text = np.einsum_path(*args, optimize="greedy" if optimize is False else optimize)[1]
    line = "Naive" if optimize is False else "Optimized"
    found = re.search(rf"{line} FLOP count:\s*([\d.e+]+)", text)
    return float(found[1]) * _scale(operands) if found else None, _bytes(operands, result)


def sparse_product(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a sparse matrix times dense columns: 2 nnz for each column."""
    matrix, dense = args[:2]
    columns = dense.shape[1] if dense.ndim > 1 else 1
    return 2.0 * matrix.data.size * columns * _scale((matrix, dense)), _bytes((*parts_of(matrix), dense), result)


def sparse_by_sparse(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the bytes of two sparse matrices and their product. The FLOP depend on the places of the numbers."""
    return None, _bytes([part for matrix in (*args[:2], result) for part in parts_of(matrix)], None)


def parts_of(matrix: Any) -> list[Any]:
    """Return the arrays of a sparse matrix."""
    found = [getattr(matrix, name, None) for name in ("data", "indices", "indptr", "row", "col", "offsets")]
    return [part for part in found if part is not None]


# --- decompositions -------------------------------------------------------------------------------------------


def cholesky(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a Cholesky decomposition: n^3 / 3."""
    return _of_matrices(args, result, lambda m, n: n**3 / 3)


def lu(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of an LU decomposition: 2/3 n^3 for a square matrix."""
    return _of_matrices(args, result, _lu)


def solve(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of an LU decomposition and two triangular solutions for each right side."""
    return _of_matrices(args, result, lambda m, n: _lu(n, n) + 2 * n * n * _right_sides(args))


def solve_positive(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of two triangular solutions, for `cho_solve` and `lu_solve`."""
    return _of_matrices((args[0][0], args[1]), result, lambda m, n: 2 * n * n * _right_sides(args))


def solve_triangular(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of one triangular solution: n^2 for each right side."""
    return _of_matrices(args, result, lambda m, n: n * n * _right_sides(args))


def inverse(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of an inverse: 2 n^3."""
    return _of_matrices(args, result, lambda m, n: 2 * n**3)


def qr(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of Householder's QR: 2 m n^2 - 2/3 n^3, and as many to form the columns of Q."""
    has_q = isinstance(result, tuple) and len(result) > 1
    return _of_matrices(args, result, lambda m, n: (1 + has_q) * _householder(m, n))


def svd(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of Golub and Reinsch's SVD. Without vectors, 4 m n^2 - 4/3 n^3."""
    if isinstance(result, tuple):
        return _of_matrices(args, result, lambda m, n: 14 * m * n * n + 8 * n**3)
    return _of_matrices(args, result, lambda m, n: 2 * _householder(m, n))


def symmetric_eigen(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a symmetric eigenproblem: 9 n^3 with vectors, 4/3 n^3 without."""
    return _of_matrices(args, result, lambda m, n: (9 if isinstance(result, tuple) else 4 / 3) * n**3)


def eigen(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of an eigenproblem: 25 n^3 with vectors, 10 n^3 without."""
    return _of_matrices(args, result, lambda m, n: (25 if isinstance(result, tuple) else 10) * n**3)


def _of_matrices(args: Sequence[Any], result: Any, flops: Callable[[float, float], float]) -> Amounts:
    """Return `flops(m, n)` of each matrix with m >= n in the first argument, and the bytes of all arrays."""
    *batch, rows, columns = args[0].shape
    each_flops = flops(float(max(rows, columns)), float(min(rows, columns)))
    return math.prod(batch) * each_flops * _scale(args[:1]), _bytes(args, result)


def _lu(m: float, n: float) -> float:
    return m * n * n - n**3 / 3


def _householder(m: float, n: float) -> float:
    return 2 * m * n * n - 2 * n**3 / 3


def _right_sides(args: Sequence[Any]) -> int:
    return int(args[1].shape[-1]) if args[1].ndim > 1 else 1


# --- convolutions and filters -------------------------------------------------------------------------------------


def convolve(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a direct one-dimensional convolution, two FLOP for each product."""
    large, small = sorted((args[0].size, args[1].size), reverse=True)
    products = large * small
    outside = large + small - 1 - result.size  # values of the full convolution that were not computed
    left = outside // 2
    right = outside - left
    products -= left * (left + 1) // 2 + right * (right + 1) // 2
    return 2.0 * products * _scale(args[:2]), _bytes(args[:2], result)


def convolve_n(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a direct convolution, if each value of the result needs the whole kernel."""
    smaller = min(args[0].size, args[1].size)
    return 2.0 * result.size * smaller * _scale(args[:2]), _bytes(args[:2], result)


def fft_convolve(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a convolution by three transforms of the full size, and their product."""
    points = math.prod(a + b - 1 for a, b in zip(args[0].shape, args[1].shape, strict=True))
    factor = 5.0 if _scale(args[:2]) > 1 else 2.5
    return 3 * factor * points * math.log2(max(2, points)) + 1.2 * factor * points, _bytes(args[:2], result)


def convolve_by_either(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of `scipy.signal.convolve`, which chooses the faster of both ways."""
    from scipy import signal

    mode, method = _given(args, kwargs, 2, "mode") or "full", _given(args, kwargs, 3, "method") or "auto"
    if method == "auto":
        method = signal.choose_conv_method(args[0], args[1], mode=mode)
    if method == "fft":
        return fft_convolve(args, kwargs, result)
    return (convolve if args[0].ndim == 1 else convolve_n)(args, kwargs, result)


def gaussian(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a separable Gaussian filter: one kernel for each axis."""
    sigma, truncate = _given(args, kwargs, 1, "sigma"), kwargs.get("truncate", 4.0)
    sigmas = np.broadcast_to(np.asarray(sigma, float), (args[0].ndim,))
    taps = sum(2 * int(truncate * one + 0.5) + 1 for one in sigmas)
    return 2.0 * args[0].size * taps, _bytes(args[:1], result)


# --------------------------------------------------------------------------------------------------------------


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs.get(name)


def _scale(arrays: Sequence[Any]) -> int:
    return _COMPLEX if any([array.dtype.kind == "c" for array in arrays]) else 1


def _bytes(args: Sequence[Any], result: Any) -> float:
    results = result if isinstance(result, tuple) else (result,)
    return float(sum(getattr(one, "nbytes", 0) for one in (*args, *results)))
