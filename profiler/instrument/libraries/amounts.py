"""Computes the FLOP and bytes of a call of a library function from the shapes of its arrays.

Rules
- A function here gets the arguments in the order of the library function's parameters, and the result. It returns the
  FLOP and the bytes. Either is None if it is unknown.
- FLOP are the usual counts of the algorithm: 5 n log2 n for an FFT, 2/3 n^3 for an LU decomposition. A library may
  do more or less. Counts of decompositions are from Golub, Van Loan, "Matrix Computations".
- Multiplying complex numbers counts as six FLOP and adding them as two, so that a complex product has four times the
  FLOP of a real one.
- Each argument and each result counts once, with the bytes that are stored. An axis with a stride of 0, as in a view
  of `broadcast_to`, is stored once. An array for the result (`out`) is a result, not an argument.
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
    """Return one FLOP for each element of the result (complex: two), and the bytes of both arguments and it."""
    return float(result.size) * (2 if _scale((result,)) > 1 else 1), _bytes(args[:2], result)


def each_product(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return one FLOP for each element of the result (complex: six), and the bytes of both arguments and it."""
    return float(result.size) * (6 if _scale((result,)) > 1 else 1), _bytes(args[:2], result)


def each_quotient(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return one FLOP for each element of the result. The FLOP of complex quotients are unknown."""
    return None if _scale((result,)) > 1 else float(result.size), _bytes(args[:2], result)


def each_read(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return one FLOP for each element of the first array (complex: two), and the bytes of it and the result."""
    return float(args[0].size) * (2 if _scale(args[:1]) > 1 else 1), _bytes(args[:1], result)


def each_factor(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return one FLOP for each element of the first array (complex: six), and the bytes of it and the result."""
    return float(args[0].size) * (6 if _scale(args[:1]) > 1 else 1), _bytes(args[:1], result)


def moved_by(inputs: int) -> AmountsOf:
    """Return the amounts of a ufunc with as many inputs: the bytes of inputs and results. The FLOP are unknown."""
    return lambda args, kwargs, result: (None, _bytes(args[:inputs], result))


def written(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the bytes of the result, as for random numbers. They are unknown if the result is not an array.

    The FLOP are unknown.
    """
    return None, _bytes((), result) if hasattr(result, "nbytes") else None


def shuffled(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the bytes of an array that was read and written in place. The FLOP are unknown."""
    return None, 2 * _bytes(args[1:2], None) if hasattr(args[1], "nbytes") else None


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
    lengths = [args[0].shape[axis] for axis in axes]
    if given is not None:  # -1 is the length of the argument
        lengths = [own if size == -1 else int(size) for own, size in zip(lengths, given, strict=True)]
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
    axes = kwargs.get("axes")
    summed = args[0].shape[-1 if axes is None else np.atleast_1d(axes[0])[-1]] if args[0].ndim and args[1].ndim else 1
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
    return 2.0 * _non_zeros(matrix) * columns * _scale((matrix, dense)), _bytes((*parts_of(matrix), dense), result)


def sparse_by_sparse(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the bytes of two sparse matrices and their product. The FLOP depend on the places of the numbers."""
    return None, _bytes([part for matrix in (*args[:2], result) for part in parts_of(matrix)], None)


def _non_zeros(matrix: Any) -> int:
    """Return the number of stored values in the matrix. The ends of diagonals may be outside of it."""
    if matrix.format != "dia":
        return int(matrix.data.size)
    rows, columns = matrix.shape
    ends = np.minimum(matrix.offsets + rows, min(columns, matrix.data.shape[1]))
    return int(np.maximum(0, ends - np.maximum(0, matrix.offsets)).sum())


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
    """Return the amounts of an LU decomposition and two triangular solutions for each right side.

    The matrices of a batch are decomposed as often as the right sides need them.
    """
    matrix, right = args[:2]
    batch = math.prod(result.shape[:-2]) if right.ndim > 1 else math.prod(matrix.shape[:-2])
    n = float(matrix.shape[-1])
    flops = batch * (_lu(n, n) + 2 * n * n * _right_sides(args))
    return flops * _scale(args[:2]), _bytes(args[:2], result)


def scipy_solve(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of `solve`. The FLOP are unknown if `assume_a` names a structure."""
    flops, moved_bytes = solve(args, kwargs, result)
    is_general = _given(args, kwargs, 6, "assume_a") in (None, "gen", "general")
    return flops if is_general else None, moved_bytes


def solve_positive(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of two triangular solutions, for `cho_solve` and `lu_solve`."""
    both = args[0][0], args[1]
    return _of_matrices(both, result, lambda m, n: 2 * n * n * _right_sides(args), both)


def solve_triangular(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of one triangular solution: n^2 for each right side."""
    return _of_matrices(args, result, lambda m, n: n * n * _right_sides(args), args[:2])


def inverse(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of an inverse: 2 n^3."""
    return _of_matrices(args, result, lambda m, n: 2 * n**3)


def qr(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of Householder's QR: 2 m n^2 - 2/3 n^3 (m >= n), and those to form the columns of Q.

    For all m columns of Q they are 4 (m^2 n - m n^2 + n^3 / 3), for the first n as many as for R.
    """
    rows, columns = args[0].shape[-2:]
    results = result if isinstance(result, tuple) else (result,)
    first = results[0]
    formed = 0.0
    if _has_q(args, kwargs, results):
        m, n = float(rows), float(min(rows, columns))
        formed = 4 * (m * m * n - m * n * n + n**3 / 3) if first.shape[-1] == rows else _householder(m, n)
    return _of_matrices(args[:1], result, lambda m, n: _householder(m, n) + formed)


def _has_q(args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]) -> bool:
    modes = {kwargs.get("mode"), *[one for one in args[1:] if isinstance(one, str)]}
    return len(results) > 1 and not modes & {"r", "raw"}


def svd(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of Golub and Reinsch's SVD of m x n numbers, m >= n: 14 m n^2 + 8 n^3.

    With m x m vectors they are 4 m^2 n + 8 m n^2 + 9 n^3, without vectors 4 m n^2 - 4/3 n^3.
    """
    if not isinstance(result, tuple):
        return _of_matrices(args, result, lambda m, n: 2 * _householder(m, n))
    rows, columns = args[0].shape[-2:]
    if rows != columns and result[0].shape[-1] == rows and result[2].shape[-2] == columns:
        return _of_matrices(args, result, lambda m, n: 4 * m * m * n + 8 * m * n * n + 9 * n**3)
    return _of_matrices(args, result, lambda m, n: 14 * m * n * n + 8 * n**3)


def symmetric_eigen(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a symmetric eigenproblem: 9 n^3 with vectors, 4/3 n^3 without."""
    return _of_matrices(args, result, lambda m, n: (9 if isinstance(result, tuple) else 4 / 3) * n**3)


def eigen(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of an eigenproblem: 25 n^3 with vectors, 10 n^3 without."""
    return _of_matrices(args, result, lambda m, n: (25 if isinstance(result, tuple) else 10) * n**3)


def _of_matrices(
    args: Sequence[Any], result: Any, flops: Callable[[float, float], float], scaled: Sequence[Any] = ()
) -> Amounts:
    """Return `flops(m, n)` of each matrix with m >= n in the first argument, and the bytes of all arrays.

    FLOP are four times as many if one of `scaled`, by default the first argument, is complex.
    """
    *batch, rows, columns = args[0].shape
    each_flops = flops(float(max(rows, columns)), float(min(rows, columns)))
    return math.prod(batch) * each_flops * _scale(scaled or args[:1]), _bytes(args, result)


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
    return 2.0 * _products_inside(large, small, result.size) * _scale(args[:2]), _bytes(args[:2], result)


def _products_inside(large: int, small: int, results: int) -> int:
    """Return the products of one axis of a convolution whose `results` are the middle of the full one."""
    outside = large + small - 1 - results  # values of the full convolution that were not computed
    left, right = outside // 2, outside - outside // 2
    return large * small - _products_at_end(left, small) - _products_at_end(right, small)


def _products_at_end(results: int, small: int) -> int:
    """Return the products of some results at one end of a full convolution: 1, 2, 3, … and at most `small` each."""
    rising = min(results, small)
    return rising * (rising + 1) // 2 + (results - rising) * small


def convolve_n(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a direct convolution, if each value of the result needs the whole kernel."""
    smaller = min(args[0].size, args[1].size)
    return 2.0 * result.size * smaller * _scale(args[:2]), _bytes(args[:2], result)


def convolve_inside(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a direct convolution of arrays with zeros around them, which count no FLOP."""
    if _given(args, kwargs, 3, "boundary") in ("wrap", "symm", "circular", "symmetric"):
        return convolve_n(args, kwargs, result)
    sides = zip(args[0].shape, args[1].shape, result.shape, strict=True)
    products = math.prod([_products_inside(max(a, b), min(a, b), size) for a, b, size in sides])
    return 2.0 * products * _scale(args[:2]), _bytes(args[:2], result)


def fft_convolve(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a convolution by three transforms of the full size, and their product."""
    if _given(args, kwargs, 3, "axes") is not None and not isinstance(_given(args, kwargs, 3, "axes"), str):
        return None, _bytes(args[:2], result)  # the other axes are broadcast
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
    return convolve_inside(args[:2], {}, result)


def gaussian(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Amounts:
    """Return the amounts of a separable Gaussian filter: one kernel for each axis with a sigma above 1e-15."""
    truncate, axes, radius = _given(args, kwargs, 6, "truncate"), kwargs.get("axes"), kwargs.get("radius")
    count = args[0].ndim if axes is None else np.size(axes)
    sigmas = np.broadcast_to(np.asarray(_given(args, kwargs, 1, "sigma"), float), (count,))
    if radius is None:
        radii = [int((4.0 if truncate is None else truncate) * sigma + 0.5) for sigma in sigmas]
    else:
        radii = [int(one) for one in np.broadcast_to(np.asarray(radius), (count,))]
    taps = sum([2 * one + 1 for one, sigma in zip(radii, sigmas, strict=True) if sigma > 1e-15])
    return 2.0 * args[0].size * taps, _bytes(args[:1], result)


# --------------------------------------------------------------------------------------------------------------


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs.get(name)


def _scale(arrays: Sequence[Any]) -> int:
    return _COMPLEX if any([array.dtype.kind == "c" for array in arrays]) else 1


def _bytes(args: Sequence[Any], result: Any) -> float:
    results = result if isinstance(result, tuple) else (result,)
    return float(sum([_stored(one) for one in (*args, *results)]))


def _stored(value: Any) -> int:
    """Return the bytes of an array, or of the arrays in a list or tuple. Repeated elements of a view count once."""
    if isinstance(value, (list, tuple)):
        return sum([_stored(one) for one in value if hasattr(one, "nbytes")])
    strides = getattr(value, "strides", None)
    if not isinstance(strides, tuple) or 0 not in strides:
        return int(getattr(value, "nbytes", 0))
    sides = [side for side, stride in zip(value.shape, strides, strict=True) if stride or not side]
    return int(value.itemsize * math.prod(sides))
