"""Compare transposition, products, addition, ReLU and softmax of NumPy, SciPy or BLAS, torch and cbtop, in float32.

python -m benchmarks targets [--rounds N]

One thread is used. Processor time is measured, in rounds that take turns, and all calls write to arrays that exist,
if their function allows it. Each result is compared with float64 before it is timed. The table has NumPy's time, and
the speed of the others as a ratio to NumPy, with the middle half of the rounds.

The predecessor names products of 64 and 128, and elements from 10,000 on. The other sizes are ours. cbtop has no
kernel for a transposition or a softmax alone: `elementwise` measures those inside of its other kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from benchmarks.base import Ratio, interleaved_cpu_ns
from cbtop.compute import activations
from cbtop.compute.backends import cpu_backend, torch_on
from cbtop.compute.errors import ComputeError
from cbtop.compute.kernels.linear import linear
from cbtop.compute.kernels.residual_add import residual_add
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from cbtop.reports.tables import table

ROUNDS, ROUND_NS = 11, 20_000_000
TOLERANCE = 1e-4  # of the largest value
MATRIX_SIDES, PRODUCT_SIDES, ELEMENTS, SOFTMAX_COLUMNS = (
    (256, 1024, 2048),
    (64, 128, 512),
    (1000, 10_000, 100_000, 1_000_000),
    (1000, 10_000, 100_000),
)
NUMPY, SCIPY, TORCH, OWN = "NumPy", "SciPy / BLAS", "torch", "cbtop"
NO_BIAS = np.zeros(0, np.float32)
Call = Callable[[], Any]
# the name of an operation and its size, its result in float64, and a function that computes it for each library
Case = tuple[str, Any, dict[str, Call]]


def main(arguments: Sequence[str]) -> int:
    """Print the table of all cases. Raises RuntimeError if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks targets", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each case (default: %(default)s)")
    rounds = parser.parse_args(arguments).rounds
    cpu_backend(1)
    try:
        torch = torch_on(1)
    except ComputeError:
        torch = None
    _scipy()  # its BLAS must be loaded when threads are limited
    with _one_blas_thread():
        print(table([("", f"{NUMPY} µs", SCIPY, TORCH, OWN), *(_row(case, rounds) for case in cases(torch))], left=1))
    print("\nratios: speed relative to NumPy; brackets: the middle half of the rounds; –: no such function")
    return 0


def cases(torch: Any) -> Iterator[Case]:
    """Yield every operation at every size. `torch` is the module, or None."""
    blas, special = _scipy()
    for side in MATRIX_SIDES:
        yield _transposition(side, torch)
    for side in PRODUCT_SIDES:
        yield _gemm(side, torch, blas)
    for side in MATRIX_SIDES:
        yield _gemv(side, torch, blas)
    for size in ELEMENTS:
        yield _addition(size, torch, blas)
    for size in ELEMENTS:
        yield _relu(size, torch)
    for size in SOFTMAX_COLUMNS:
        yield _softmax(size, torch, special)


def _row(case: Case, rounds: int) -> tuple[str, ...]:
    name, expected, calls = case
    for library, call in calls.items():
        error = float(np.abs(np.asarray(call()) - expected).max() / np.abs(expected).max())
        if not error <= TOLERANCE:
            raise RuntimeError(f"{name}: {library} differs from float64 by {error:.1e}; {TOLERANCE} is allowed")
    once_ns = min(interleaved_cpu_ns({NUMPY: calls[NUMPY]}, 3, 3)[NUMPY])
    taken = interleaved_cpu_ns(calls, max(1, int(ROUND_NS / max(once_ns, 100))), rounds)
    ratios = {library: Ratio.of(taken[NUMPY], times) for library, times in taken.items()}
    cells = [
        f"{ratios[one].median:.2f} ({ratios[one].low:.2f} to {ratios[one].high:.2f})" if one in ratios else "–"
        for one in (SCIPY, TORCH, OWN)
    ]
    return name, f"{float(np.median(taken[NUMPY])) / 1000:.2f}", *cells


def _drawn(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def _transposition(side: int, torch: Any) -> Case:
    x, out = _drawn(side, side), np.zeros((side, side), np.float32)

    def by_numpy() -> Any:
        np.copyto(out, x.T)
        return out

    calls: dict[str, Call] = {NUMPY: by_numpy}
    if torch is not None:
        a, b = torch.from_numpy(x), torch.zeros(side, side)
        calls[TORCH] = lambda: b.copy_(a.t())
    return f"transpose {side:,} x {side:,}", x.T.astype(np.float64), calls


def _gemm(side: int, torch: Any, blas: Any) -> Case:
    x, y, out = _drawn(side, side), _drawn(side, side + 1)[:, 1:].copy(), np.zeros((side, side), np.float32)
    weights, own_out = QuantizedMatrix.of(F32, y.T.copy()).data, np.zeros((side, side), np.float32)
    scratch = np.zeros((1, side), np.float32)

    def by_own() -> Any:
        linear(F32.code, weights, NO_BIAS, x, own_out, scratch)
        return own_out

    calls: dict[str, Call] = {NUMPY: lambda: np.matmul(x, y, out=out), OWN: by_own}
    if blas is not None:
        blas_out = np.zeros((side, side), np.float32, order="F")
        calls[SCIPY] = lambda: blas.sgemm(1, y.T, x.T, 0, blas_out, overwrite_c=1).T
    if torch is not None:
        a, b, c = torch.from_numpy(x), torch.from_numpy(y), torch.zeros(side, side)
        calls[TORCH] = lambda: torch.mm(a, b, out=c)
    return f"GEMM {side:,} x {side:,} x {side:,}", x.astype(np.float64) @ y, calls


def _gemv(side: int, torch: Any, blas: Any) -> Case:
    matrix, x, out = _drawn(side, side), _drawn(side), np.zeros(side, np.float32)
    weights, row, own_out = QuantizedMatrix.of(F32, matrix).data, x.reshape(1, -1), np.zeros((1, side), np.float32)
    scratch = np.zeros((1, side), np.float32)

    def by_own() -> Any:
        linear(F32.code, weights, NO_BIAS, row, own_out, scratch)
        return own_out[0]

    calls: dict[str, Call] = {NUMPY: lambda: np.matmul(matrix, x, out=out), OWN: by_own}
    if blas is not None:
        blas_out = np.zeros(side, np.float32)
        calls[SCIPY] = lambda: blas.sgemv(1, matrix.T, x, 0, blas_out, trans=1, overwrite_y=1)
    if torch is not None:
        a, b, c = torch.from_numpy(matrix), torch.from_numpy(x), torch.zeros(side)
        calls[TORCH] = lambda: torch.mv(a, b, out=c)
    return f"GEMV {side:,} x {side:,}", matrix.astype(np.float64) @ x, calls


def _addition(size: int, torch: Any, blas: Any) -> Case:
    """Add in place. The addend is 0, so that the sum stays the same for all calls."""
    x, addend = _drawn(1, size), np.zeros((1, size), np.float32)
    own, flat, flat_addend = x.copy(), x[0].copy(), addend[0]

    def by_own() -> Any:
        residual_add(own, addend)
        return own

    calls: dict[str, Call] = {NUMPY: lambda: np.add(x, addend, out=x), OWN: by_own}
    if blas is not None:
        calls[SCIPY] = lambda: blas.saxpy(flat_addend, flat)
    if torch is not None:
        a, b = torch.from_numpy(x.copy()), torch.from_numpy(addend)
        calls[TORCH] = lambda: a.add_(b)
    return f"add {size:,}", x.astype(np.float64), calls


def _relu(size: int, torch: Any) -> Case:
    """Compute ReLU. cbtop's function returns a new array, the others write to one that exists."""
    x, out = _drawn(size), np.zeros(size, np.float32)
    calls: dict[str, Call] = {NUMPY: lambda: np.maximum(x, 0, out=out), OWN: lambda: activations.relu(x)}
    if torch is not None:
        a, b = torch.from_numpy(x), torch.zeros(size)
        calls[TORCH] = lambda: torch.clamp_min(a, 0, out=b)
    return f"ReLU {size:,}", np.maximum(x.astype(np.float64), 0), calls


def _softmax(size: int, torch: Any, special: Any) -> Case:
    x = _drawn(1, size)

    def by_numpy() -> Any:
        powers = np.exp(x - x.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers

    calls: dict[str, Call] = {NUMPY: by_numpy}
    if special is not None:
        calls[SCIPY] = lambda: special.softmax(x, axis=1)
    if torch is not None:
        a = torch.from_numpy(x)
        calls[TORCH] = lambda: torch.softmax(a, 1)
    powers = np.exp(x.astype(np.float64))
    return f"softmax {size:,}", powers / powers.sum(), calls


def _scipy() -> tuple[Any, Any]:
    """Return SciPy's modules `linalg.blas` and `special`, or None for both."""
    try:
        from scipy import special
        from scipy.linalg import blas
    except ImportError:
        return None, None
    return blas, special


def _one_blas_thread() -> AbstractContextManager[Any]:
    """Limit the BLAS of NumPy and SciPy to one thread, if threadpoolctl is installed."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[Any] = threadpool_limits(1)
    return limits
