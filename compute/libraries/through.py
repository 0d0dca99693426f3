"""Functions that give a library's function its further arguments, or make its result unique.

Each is the `through` of contracts in this folder. It is called with the bound function and the inputs, and returns
the outputs. The arrays are NumPy's or CuPy's.
"""

# A decomposition is unique only up to signs, or an order. So an output is made of three things: the product that must
# be the matrix again, the products that must be the identity, and the parts that are unique.

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
BINS, LOW, HIGH = 16, -3.0, 3.0  # of the histogram
ZOOM, SIGMA = 2, 1.0


def copied(function: Function, x: Any) -> Any:
    """Return the result as an array of its own. A library may return a view."""
    return function(x).copy()


def relu(function: Function, x: Any) -> Any:
    """Return the larger one of each element and 0."""
    return function(x, 0)


def rows(function: Function, x: Any) -> Any:
    """Call a function of rows."""
    return function(x, axis=1)


def lower(function: Function, a: Any, b: Any) -> Any:
    """Solve with the lower triangle of `a`."""
    return function(a, b, lower=True)


def qr(function: Function, a: Any) -> tuple[Any, Any]:
    """Return Q and R. The diagonal of R is made positive, so that both are unique."""
    q, r = function(a)
    signs = sys.modules[type(a).__module__.partition(".")[0]].sign(r.diagonal())
    return q * signs, r * signs[:, None]


def svd(function: Function, a: Any) -> tuple[Any, Any, Any, Any]:
    """Return the singular values, U S V*, and the products U* U and V* V."""
    u, s, v = function(a, full_matrices=False)
    return s, (u * s) @ v, u.T @ u, v @ v.T


def eigh(function: Function, a: Any) -> tuple[Any, Any, Any]:
    """Return the eigenvalues in ascending order, V w V*, and the product V* V."""
    w, v = function(a)
    return w, (v * w) @ v.T, v.T @ v


def compressed(function: Function, a: Any) -> tuple[Any, Any, Any]:
    """Return the arrays of a sparse matrix: begins of rows, columns, values."""
    return _sorted(function(a))


def blocks(function: Function, a: Any) -> tuple[Any, Any, Any]:
    """Return the arrays of a sparse matrix with blocks of 2 x 2."""
    return _sorted(function(a, blocksize=(2, 2)))


def _sorted(found: Any) -> tuple[Any, Any, Any]:
    found.sort_indices()  # a library may leave the columns of a row in any order
    return found.indptr, found.indices, found.data


def sparse_dense(function: Function, a: Any, x: Any) -> Any:
    """Return the product of a sparse matrix and a dense vector or matrix."""
    return function(a) @ x


def sparse_sparse(function: Function, a: Any, b: Any) -> Any:
    """Return the product of two sparse matrices, as a dense matrix."""
    return (function(a) @ function(b)).toarray()


def zoom(function: Function, image: Any) -> Any:
    """Resize an image by linear interpolation to ZOOM times its sides."""
    return function(image, ZOOM, order=1)


def canny(function: Function, image: Any) -> Any:
    """Return the edges of an image, with the default thresholds."""
    return function(image, sigma=SIGMA)


def histogram(function: Function, x: Any) -> Any:
    """Return the counts of BINS equal bins from LOW to HIGH."""
    return function(x, bins=BINS, range=(LOW, HIGH))[0]


def raw_words(function: Function, key: int, count: int) -> Any:
    """Return the first words of a random generator with 64-bit words."""
    return function(key=key).random_raw(count)


def contraction(function: Function, a: Any, b: Any) -> Any:
    """Contract two shared indices of tensors, in an order other than the axes have."""
    return function("abc,cbd->da", a, b)


def one_axis(function: Function, a: Any, b: Any) -> Any:
    """Contract the last axis of `a` with the first one of `b`."""
    return function(a, b, axes=1)
