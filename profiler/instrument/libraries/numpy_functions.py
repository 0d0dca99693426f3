"""The functions of NumPy that become bricks.

`numpy.matmul` is the operator `@`, too. Methods of arrays (`a.dot(b)`, `a.sum()`) are not functions of the table.
"""

from __future__ import annotations

from cbtop.profiler.instrument.libraries import amounts, residuals
from cbtop.profiler.instrument.libraries.functions import KeyFrom, LibraryFunction, functions_of

_SMALLEST = 4096  # elements; NumPy adds two such arrays of float64 in about 2 us
_SMALLEST_FACTOR = 1024  # a matrix product of 32 x 32 takes about 2 us
_RANDOM = (
    "random standard_normal standard_exponential standard_gamma normal uniform exponential gamma beta poisson "
    "binomial lognormal multivariate_normal choice permutation shuffle"
)
_GENERATOR = f"{_RANDOM} integers"
_STATE = f"{_RANDOM} randint rand randn random_sample"


def _methods(of: str, names: str) -> list[LibraryFunction]:
    return [
        LibraryFunction(
            "numpy.random",
            f"{of}.{name}",
            f"numpy.random.{of}.{name}",
            amounts.shuffled if name == "shuffle" else amounts.written,
            key_from=KeyFrom.ARGUMENTS if name == "shuffle" else KeyFrom.RESULT,
            checks=residuals.MOMENTS if name == "normal" else (),
        )
        for name in names.split()
    ]


NUMPY: tuple[LibraryFunction, ...] = (
    *functions_of("numpy.fft", amounts.fft, "fft", checks=residuals.PARSEVAL),
    *functions_of("numpy.fft", amounts.fft, "ifft"),
    *functions_of("numpy.fft", amounts.real_fft, "rfft"),
    *functions_of("numpy.fft", amounts.inverse_real_fft, "irfft"),
    *functions_of("numpy.fft", amounts.fft_n, "fftn ifftn"),
    *functions_of("numpy.fft", amounts.two_axes(amounts.fft_n), "fft2 ifft2"),
    *functions_of("numpy.fft", amounts.real_fft_n, "rfftn"),
    *functions_of("numpy.fft", amounts.two_axes(amounts.real_fft_n), "rfft2"),
    *functions_of("numpy.fft", amounts.inverse_real_fft_n, "irfftn"),
    *functions_of("numpy.fft", amounts.two_axes(amounts.inverse_real_fft_n), "irfft2"),
    *functions_of("numpy.linalg", amounts.cholesky, "cholesky", checks=residuals.CHOLESKY),
    *functions_of("numpy.linalg", amounts.lu, "det slogdet"),
    *functions_of("numpy.linalg", amounts.solve, "solve", checks=residuals.SOLVED),
    *functions_of("numpy.linalg", amounts.inverse, "inv"),
    *functions_of("numpy.linalg", amounts.qr, "qr", checks=residuals.FACTORED),
    *functions_of("numpy.linalg", amounts.svd, "svd", checks=residuals.SINGULAR),
    *functions_of("numpy.linalg", amounts.svd, "svdvals"),
    *functions_of("numpy.linalg", amounts.symmetric_eigen, "eigh", checks=residuals.EIGEN),
    *functions_of("numpy.linalg", amounts.symmetric_eigen, "eigvalsh"),
    *functions_of("numpy.linalg", amounts.eigen, "eig eigvals"),
    *functions_of("numpy.linalg", amounts.moved, "lstsq pinv matrix_power multi_dot norm"),
    *functions_of("numpy", amounts.product, "dot matmul inner", smallest=_SMALLEST_FACTOR),
    *functions_of("numpy", amounts.vdot, "vdot", smallest=_SMALLEST),
    *functions_of("numpy", amounts.tensordot, "tensordot"),
    *functions_of("numpy", amounts.einsum, "einsum"),
    *functions_of("numpy", amounts.each_product, "outer kron"),
    *functions_of("numpy", amounts.convolve, "convolve correlate"),
    *functions_of("numpy", amounts.each, "add subtract maximum minimum", smallest=_SMALLEST),
    *functions_of("numpy", amounts.each_product, "multiply", smallest=_SMALLEST),
    *functions_of("numpy", amounts.each_quotient, "divide", smallest=_SMALLEST),
    *functions_of(
        "numpy",
        amounts.moved_by(1),
        "sqrt exp expm1 exp2 log log2 log10 log1p sin cos tan arcsin arccos arctan sinh cosh tanh",
        smallest=_SMALLEST,
    ),
    *functions_of("numpy", amounts.moved_by(2), "arctan2 power hypot", smallest=_SMALLEST),
    *functions_of("numpy", amounts.each_read, "sum mean max min cumsum"),
    *functions_of("numpy", amounts.each_factor, "prod"),
    *functions_of(
        "numpy",
        amounts.moved,
        "sort argsort partition argpartition unique histogram percentile quantile median searchsorted interp "
        "std var clip",
    ),
    *functions_of("numpy", amounts.moved, "where concatenate bincount", smallest=_SMALLEST),
    *_methods("Generator", _GENERATOR),
    *_methods("RandomState", _STATE),
)
