"""The functions of SciPy that become bricks, and the products of its sparse matrices."""

from __future__ import annotations

from cbtop.profiler.checks import Check
from cbtop.profiler.instrument.libraries import amounts, residuals
from cbtop.profiler.instrument.libraries.amounts import AmountsOf
from cbtop.profiler.instrument.libraries.functions import KeyFrom, LibraryFunction, functions_of

# The public functions of scipy.fft choose a backend. These are the functions of SciPy's own one.
_FFT = "scipy.fft._basic_backend"
_PARTS = ("data", "_shape")  # the arrays of a sparse matrix are as large as `data`
_SPARSE = (
    ("scipy.sparse._compressed", "_cs_matrix"),
    ("scipy.sparse._bsr", "_bsr_base"),
    ("scipy.sparse._coo", "_coo_base"),
    ("scipy.sparse._dia", "_dia_base"),
)


def _ffts(of: AmountsOf, names: str, checks: tuple[Check, ...] = ()) -> list[LibraryFunction]:
    return [
        LibraryFunction(_FFT, name, f"scipy.fft.{name}", of, after="scipy.fft", checks=checks)
        for name in names.split()
    ]


def _products(method: str, name: str, of: AmountsOf) -> list[LibraryFunction]:
    shown = f"scipy.sparse {name}"
    return [
        LibraryFunction(
            module,
            f"{kind}.{method}",
            shown,
            of,
            after="scipy.sparse",
            parts=_PARTS,
            # The work of diagonals depends on their places, too.
            key_from=KeyFrom.NOTHING if kind == "_dia_base" else KeyFrom.ARGUMENTS,
        )
        for module, kind in _SPARSE
    ]


SCIPY: tuple[LibraryFunction, ...] = (
    *_ffts(amounts.fft, "fft", residuals.PARSEVAL),
    *_ffts(amounts.fft, "ifft"),
    *_ffts(amounts.real_fft, "rfft"),
    *_ffts(amounts.inverse_real_fft, "irfft"),
    *_ffts(amounts.fft_n, "fftn ifftn fft2 ifft2"),
    *_ffts(amounts.real_fft_n, "rfftn rfft2"),
    *_ffts(amounts.inverse_real_fft_n, "irfftn irfft2"),
    *functions_of("scipy.linalg", amounts.cholesky, "cholesky", checks=residuals.CHOLESKY),
    *functions_of("scipy.linalg", amounts.cholesky, "cho_factor"),
    *functions_of("scipy.linalg", amounts.lu, "lu lu_factor det"),
    *functions_of("scipy.linalg", amounts.scipy_solve, "solve", checks=residuals.SOLVED),
    *functions_of("scipy.linalg", amounts.solve_positive, "cho_solve lu_solve"),
    *functions_of("scipy.linalg", amounts.solve_triangular, "solve_triangular"),
    *functions_of("scipy.linalg", amounts.inverse, "inv"),
    *functions_of("scipy.linalg", amounts.qr, "qr"),
    *functions_of("scipy.linalg", amounts.svd, "svd", checks=residuals.SINGULAR),
    *functions_of("scipy.linalg", amounts.svd, "svdvals"),
    *functions_of("scipy.linalg", amounts.symmetric_eigen, "eigh", checks=residuals.EIGEN),
    *functions_of("scipy.linalg", amounts.symmetric_eigen, "eigvalsh"),
    *functions_of("scipy.linalg", amounts.eigen, "eig eigvals"),
    *functions_of("scipy.linalg", amounts.moved, "lstsq pinv expm logm sqrtm schur solve_banded solve_toeplitz"),
    *functions_of("scipy.signal", amounts.convolve_by_either, "convolve correlate"),
    *functions_of("scipy.signal", amounts.convolve_inside, "convolve2d correlate2d"),
    *functions_of("scipy.signal", amounts.fft_convolve, "fftconvolve"),
    *functions_of(
        "scipy.signal",
        amounts.moved,
        "oaconvolve lfilter sosfilt sosfiltfilt filtfilt welch spectrogram stft medfilt",
    ),
    *functions_of("scipy.ndimage", amounts.convolve_n, "convolve correlate"),
    *functions_of("scipy.ndimage", amounts.gaussian, "gaussian_filter"),
    *functions_of(
        "scipy.ndimage",
        amounts.moved,
        "uniform_filter median_filter maximum_filter minimum_filter sobel laplace zoom rotate shift affine_transform "
        "map_coordinates label binary_erosion binary_dilation distance_transform_edt",
    ),
    *_products("_matmul_vector", "SpMV", amounts.sparse_product),
    *_products("_matmul_multivector", "SpMM", amounts.sparse_product),
    *_products("_matmul_sparse", "SpGEMM", amounts.sparse_by_sparse),
    *functions_of(
        "scipy.sparse.linalg",
        amounts.nothing,
        "spsolve splu spilu factorized cg bicgstab gmres minres lsqr lsmr eigs eigsh svds expm_multiply",
    ),
    *functions_of("scipy.optimize", amounts.nothing, "minimize least_squares curve_fit root linprog milp"),
    *functions_of("scipy.integrate", amounts.nothing, "quad solve_ivp odeint simpson"),
    *functions_of("scipy.interpolate", amounts.nothing, "griddata splrep splev"),
    *functions_of("scipy.spatial.distance", amounts.moved, "cdist pdist"),
)
